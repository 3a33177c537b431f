"""QuantMLACache in stock transformers models of every family."""

import copy
import inspect

import pytest
import torch

from exact import exact_cache, forward, stock, tiny_model, tokens
from quantmla.cache.policy import packed_pairs
from quantmla.config import KVScheme
from quantmla.dims import MLADims
from quantmla.engine.hf import QuantMLACache, use_packed_attention
from quantmla.errors import CacheError, SchemeError, UnsupportedModelError
from tiny import TINY_IDS, TINY_KWARGS

SINK, WINDOW = 4, 8
IDENTITY = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def scheme_cache(model, name="c4r4", **settings):
    scheme = KVScheme.parse(name, sink_tokens=SINK, window_tokens=WINDOW)
    return QuantMLACache.from_scheme(scheme, model.config, **settings)


@pytest.mark.parametrize("kwargs", TINY_KWARGS, ids=TINY_IDS)
def test_identity_quantiser_leaves_the_logits_of_every_family_unchanged(kwargs):
    kwargs = dict(kwargs)
    model, ids = tiny_model(kwargs.pop("family"), **kwargs), tokens(40, batch=2)
    expected = stock(model, ids)
    layers = MLADims.from_config(model.config).num_cache_layers
    pairs = 2 * layers * packed_pairs(0, 40, SINK, WINDOW)
    for calls in ([40], [7] * 5 + [5], [20] + [1] * 20):
        cache = exact_cache(model.config)
        torch.testing.assert_close(forward(model, cache, ids, calls), expected, **IDENTITY)
        assert cache.packed_rows_read == pairs > 0
    fast = exact_cache(model.config, chunk_tokens=5, rope_online="hadamard")
    torch.testing.assert_close(forward(model, fast, ids, [17, 23]), expected, **IDENTITY)
    assert 0 < fast.packed_rows_read < pairs
    rows = QuantMLACache.from_scheme(
        KVScheme.parse("c16r16"), model.config, row_dtype=torch.float32
    )
    torch.testing.assert_close(forward(model, rows, ids, [30, 10]), expected, **IDENTITY)
    assert rows.packed_rows_read == 0


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "c4r4"), ("deepseek_v3", "c2r4"), ("minicpm3", "c4r16")]
)
def test_strict_mode_does_not_depend_on_chunking(family, name):
    # float64, so that rounding differences of the matrix products cannot flip a code;
    # not deepseek_v2, whose complex RoPE rounds to float32 in an order that depends on the length
    model, ids = tiny_model(family, torch.float64), tokens(150, batch=2)
    expected = scheme_cache(model, name)
    logits = forward(model, expected, ids)
    for calls in ([50, 50, 50], [64, 1, 65, 20], [100] + [1] * 50, [1] * 150):
        cache = scheme_cache(model, name)
        torch.testing.assert_close(forward(model, cache, ids, calls), logits, atol=1e-6, rtol=0)
        assert cache.packed_rows_read == expected.packed_rows_read
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(layer.store.pages[:, :3], other.store.pages[:, :3])
            assert torch.equal(layer.store.recent.ring, other.store.recent.ring)


def test_a_left_padded_batch_equals_solo_runs():
    # field reports FR-001, FR-038 and FR-047
    model, lengths = tiny_model(dtype=torch.float64), [80, 3, 41]
    ids, mask = tokens(90, batch=3), torch.ones(3, 90, dtype=torch.long)
    for b, length in enumerate(lengths):
        mask[b, : 80 - length] = 0
    cache = scheme_cache(model)
    logits = forward(model, cache, ids, [50, 30] + [1] * 10, mask)
    assert logits.isfinite().all()
    pairs = 0
    for b in range(3):
        alone, own = scheme_cache(model), ids[b : b + 1, mask[b].bool()]
        expected = forward(model, alone, own)
        torch.testing.assert_close(logits[b, mask[b].bool()], expected[0], atol=1e-6, rtol=0)
        for layer, other in zip(cache.layers, alone.layers, strict=True):
            assert torch.equal(
                layer.store.pages[b, : other.store.pages.shape[1]], other.store.pages[0]
            )
        pairs += alone.packed_rows_read
    assert cache.packed_rows_read == pairs


def test_three_turns_with_one_cache_equal_one_shot(model):
    # field reports FR-001 and FR-043: reuse the context, trim the answer, ask again
    context, questions = tokens(60), [tokens(12), tokens(5), tokens(12)]
    cache = scheme_cache(model, slack_tokens=12)
    forward(model, cache, context)
    for question in questions:
        logits = forward(model, cache, question)
        fresh = forward(model, scheme_cache(model), torch.cat([context, question], 1))
        torch.testing.assert_close(logits, fresh[:, 60:], atol=1e-3, rtol=0)
        assert cache.get_seq_length() == 60 + question.shape[1]
        cache.crop(-question.shape[1])
        assert cache.get_seq_length() == 60


def test_order_of_the_tokens_matters_and_a_common_shift_does_not():
    # field report FR-015
    model, ids = tiny_model(dtype=torch.float64), tokens(60)
    logits = forward(model, scheme_cache(model), ids)
    swapped = torch.cat([ids[:, 20:40], ids[:, :20], ids[:, 40:]], 1)
    assert (forward(model, scheme_cache(model), swapped)[:, -1] - logits[:, -1]).abs().max() > 1e-3
    cache = exact_cache(model.config)
    with torch.no_grad():
        shifted = model(
            ids, position_ids=torch.arange(60)[None] + 64, **cache.as_kwargs(model)
        ).logits
    torch.testing.assert_close(
        shifted, forward(model, exact_cache(model.config), ids), atol=1e-4, rtol=0
    )


def test_fewer_bits_hurt_more_and_one_bit_wrecks_the_model(model):
    ids = tokens(120)
    exact = forward(model, scheme_cache(model, "c16r16"), ids).log_softmax(-1)
    errors = []
    for name in ("c8r8", "c4r4", "c2r2", "c1r1"):
        logits = forward(model, scheme_cache(model, name), ids).log_softmax(-1)
        errors.append(float((exact.exp() * (exact - logits)).sum(-1).mean()))
    assert errors == sorted(errors)
    assert errors[-1] > 100 * errors[0]


def test_a_sequence_inside_sink_and_window_reads_no_packed_row(model):
    cache = scheme_cache(model, "c1r1")
    ids = tokens(SINK + WINDOW)
    logits = forward(model, cache, ids)
    assert cache.packed_rows_read == 0
    torch.testing.assert_close(logits, forward(model, scheme_cache(model, "c16r16"), ids))
    forward(model, cache, tokens(1))
    assert cache.packed_rows_read == 2  # one key in each of two layers


def test_rope_online_changes_the_codes_and_not_the_model(model):
    ids = tokens(80)
    plain, turned = scheme_cache(model, "c8r8"), scheme_cache(model, "c8r8", rope_online="hadamard")
    logits = [forward(model, cache, ids) for cache in (plain, turned)]
    torch.testing.assert_close(*logits, atol=0.05, rtol=0)
    pages = [cache.layers[0].store.pages for cache in (plain, turned)]
    assert not torch.equal(*pages)


def test_clips_and_schemes_may_differ_by_layer(model):
    ids = tokens(64)
    schemes = [
        KVScheme.parse(name, sink_tokens=SINK, window_tokens=WINDOW) for name in ("c4r4", "c2r8")
    ]
    cache = QuantMLACache.from_scheme(schemes, model.config, clips=[(0.5, None), (None, 0.9)])
    forward(model, cache, ids)
    plain = QuantMLACache.from_scheme(schemes, model.config)
    forward(model, plain, ids)
    stores = [layer.store for layer in cache.layers]
    assert [s.layout.scheme.name for s in stores] == ["c4r4", "c2r8"]
    for store, other in zip(stores, plain.layers, strict=True):
        assert not torch.equal(store.pages, other.store.pages)
    with pytest.raises(CacheError, match="do not fit the model"):
        QuantMLACache.from_scheme(schemes[:1], model.config)
    with pytest.raises(CacheError, match="do not fit the model"):
        QuantMLACache.from_scheme(schemes, model.config, clips=[(0.5, None)])


def test_clips_are_one_pair_or_a_pair_a_layer(model):
    half = torch.tensor([0.5])
    cases = [
        ((0.5, None), [(0.5, None)] * 2),
        ([half, 0.9], [(half, 0.9)] * 2),
        (((0.5, None), (None, 0.9)), [(0.5, None), (None, 0.9)]),
        ([[half, 0.7], [half, 0.8]], [(half, 0.7), (half, 0.8)]),
    ]
    for clips, expected in cases:
        stores = [layer.store for layer in scheme_cache(model, clips=clips).layers]
        assert [(store.content_clip, store.rope_clip) for store in stores] == expected
    for clips in (0.5, half, [0.5], (), (0.5, 0.5, 0.5), [(0.5, 0.5), 0.5], [(0.5,), (0.5,)]):
        with pytest.raises(CacheError, match="clip ratios cannot be given"):
            scheme_cache(model, clips=clips)
    for clips in ((1.5, None), (None, 0), [(0.5, None), (torch.ones(2), None)]):
        with pytest.raises(CacheError, match="clip ratio cannot be used"):
            scheme_cache(model, clips=clips)


@pytest.mark.parametrize(
    "change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"]
)
def test_batch_changes_follow_the_sequences(model, change):
    ids, more = tokens(100, batch=3), tokens(20, batch=3)
    cache = exact_cache(model.config)
    forward(model, cache, ids)
    index = torch.tensor([2, 0, 0, 1])
    if change == "batch_repeat_interleave":
        cache.batch_repeat_interleave(2)
        index = torch.tensor([0, 0, 1, 1, 2, 2])
    elif change == "reorder_cache":
        index = index[:3]
        cache.reorder_cache(index)
    else:
        cache.batch_select_indices(torch.tensor([True, False, True]))
        index = torch.tensor([0, 2])
    logits = forward(model, cache, more[index % 3][: len(index)])
    whole = torch.cat([ids[index], more[index % 3][: len(index)]], 1)
    torch.testing.assert_close(logits, stock(model, whole)[:, 100:], **IDENTITY)


def test_the_transformers_interface_of_the_cache(model):
    cache = scheme_cache(model)
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache)) == (0, -1, 2)
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.is_croppable
    assert not cache.is_compileable
    assert not any(cache.is_sliding)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([0]))
    forward(model, cache, tokens(30))
    assert (cache.get_seq_length(1), cache.get_mask_sizes(5, 1)) == (30, (35, 0))
    with pytest.raises(CacheError, match="negative"):
        cache.crop(3)
    cache.crop(0)
    cache.crop(torch.tensor(-1))
    assert cache.get_seq_length() == 29
    assert type(cache.get_seq_length()) is int
    held = cache.resident_bytes()
    cache.offload(0)
    cache.prefetch(0)
    assert cache.resident_bytes() == held == sum(x.store.resident_bytes() for x in cache.layers) > 0
    cache.reset()
    assert (cache.get_seq_length(), cache.resident_bytes()) == (0, 0)


def test_deepcopy_goes_its_own_way(model):
    ids, left, right = tokens(50), tokens(10), tokens(10)
    cache = exact_cache(model.config)
    forward(model, cache, ids)
    twin = copy.deepcopy(cache)
    for one, more in ((cache, left), (twin, right)):
        logits = forward(model, one, more)
        torch.testing.assert_close(
            logits, stock(model, torch.cat([ids, more], 1))[:, 50:], **IDENTITY
        )


def test_as_kwargs_uses_the_name_of_the_model(model):
    names = inspect.signature(model.forward).parameters
    (name,) = scheme_cache(model).as_kwargs(model)
    assert name == ("cache" if "cache" in names else "past_key_values")


def test_another_attention_function_is_noticed_at_once(model):
    cache = scheme_cache(model)
    kwargs = cache.as_kwargs(model)
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match="use_packed_attention"):
        model(tokens(5), **kwargs)
    assert cache.get_seq_length() == 0


def test_another_attention_function_is_noticed_without_a_config(model):
    dims = MLADims.from_config(model.config)
    cache = QuantMLACache.from_scheme(KVScheme.parse("c4r4"), dims)
    name = next(iter(scheme_cache(model).as_kwargs(model)))
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match="no packed attention read them"):
        model(tokens(5), **{name: cache})
    forward(model, scheme_cache(model), tokens(5))  # the slot is clean again


def test_a_call_that_stopped_half_way_is_noticed(model):
    cache = scheme_cache(model)
    forward(model, cache, tokens(5))
    with torch.no_grad():
        model.model.layers[1].register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="stopped"):
            model(tokens(3), **cache.as_kwargs(model))
        model.model.layers[1]._forward_pre_hooks.clear()
    with pytest.raises(CacheError, match="different numbers of tokens"):
        forward(model, cache, tokens(3))


def _fail(*args):
    raise RuntimeError("stopped")


@pytest.mark.parametrize(
    "settings", [{"prefill": "slow"}, {"chunk_tokens": 0}, {"slack_tokens": -1}], ids=str
)
def test_wrong_settings_are_refused(model, settings):
    with pytest.raises(CacheError):
        scheme_cache(model, **settings)


def test_refused_families_are_refused_here_too(model):
    config = model.config.to_dict() | {"model_type": "glm_moe_dsa"}
    with pytest.raises(UnsupportedModelError, match="indexer"):
        QuantMLACache.from_scheme(KVScheme.parse("c4r4"), config)


def test_use_packed_attention_names_what_was_active(model):
    model.set_attn_implementation("eager")
    assert use_packed_attention(model) == "eager"
    assert use_packed_attention(model) == "quantmla"


def test_a_model_without_a_block_is_told_what_to_do(model):
    with pytest.raises(SchemeError, match="no quantmla block"):
        QuantMLACache.from_config(model.config)


def test_a_cache_of_another_model_is_refused(model):
    cache = scheme_cache(model)
    deeper = tiny_model(layers=3)
    with pytest.raises(CacheError, match="another model"):
        cache.as_kwargs(deeper)
    forward(model, cache, tokens(20), [20])
    twin = tiny_model()
    with pytest.raises(CacheError, match="tokens of another model"):
        cache.as_kwargs(twin)
    cache.as_kwargs(model)
    cache.reset()
    cache.as_kwargs(twin)


@pytest.mark.parametrize("setting", [{"rope_online": "foo"}, {"row_dtype": "float32"}])
def test_unknown_settings_are_refused(model, setting):
    with pytest.raises(CacheError, match="unknown setting"):
        QuantMLACache.from_scheme("c4r4", model.config, **setting)


def test_a_scheme_may_be_given_by_name(model):
    cache = QuantMLACache.from_scheme("c2r4", model.config)
    assert all(layer.store.layout.scheme.content_bits == 2 for layer in cache.layers)
