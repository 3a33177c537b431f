"""The registered attention and mask functions, and what they refuse."""

import threading

import pytest
import torch
from transformers import DynamicCache

from quantmla.config import KVScheme
from quantmla.engine.attention import HandOff, offer, packed_attention, packed_mask
from quantmla.engine.hf import QuantMLACache, use_packed_attention
from quantmla.errors import CacheError
from tiny import model_class, randomise, tiny_config


@pytest.fixture
def model():
    model = model_class("deepseek_v3")(tiny_config("deepseek_v3"))
    randomise(model, 0)
    return model.eval()


@pytest.fixture
def packed(model):
    """The keyword that passes a new packed cache to the model."""
    cache = QuantMLACache.from_scheme(KVScheme.parse("c4r4"), model.config)
    return cache.as_kwargs(model)


IDS = torch.randint(3, 96, (2, 10))


def test_no_cache_is_refused(model):
    use_packed_attention(model)
    with pytest.raises(CacheError, match="without rows from a packed cache"):
        model(IDS, use_cache=False)


def test_another_cache_is_refused(model, packed):
    (name,) = packed
    with pytest.raises(CacheError, match="without rows from a packed cache"):
        model(IDS, **{name: DynamicCache(config=model.config)})
    with pytest.raises(CacheError, match="without rows from a packed cache"):
        model.generate(IDS, max_new_tokens=2)


def test_rows_of_another_layer_are_refused(model, packed):
    (cache,) = packed.values()
    module = model.model.layers[1].self_attn
    cache.update(torch.zeros(2, 1, 3, 32), torch.zeros(2, 1, 3, 16), 0)
    with pytest.raises(CacheError, match="rows of cache layer 0"):
        packed_attention(module, torch.zeros(2, 3, 3, 28), None, None, None, 1.0)


def test_rows_stay_in_their_thread(packed):
    (cache,) = packed.values()
    cache.update(torch.zeros(2, 1, 3, 32), torch.zeros(2, 1, 3, 16), 0)
    failures = []

    def other_thread():
        try:
            offer(HandOff(cache.layers[0].store, torch.zeros(1), torch.zeros(1), None, None))
        except CacheError as error:
            failures.append(error)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert not failures
    with pytest.raises(CacheError, match="no packed attention read them"):
        cache.layers[0].update(torch.zeros(2, 1, 3, 32), torch.zeros(2, 1, 3, 16))


def test_training_is_refused(model, packed):
    with pytest.raises(CacheError, match="eval"):
        model.train()(IDS, **packed)
    (cache,) = packed.values()
    assert cache.get_seq_length() == 0


def test_a_prepared_4d_mask_is_refused(model, packed):
    with pytest.raises(CacheError, match="4-D mask"):
        model(IDS, attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.bool), **packed)


def test_a_mask_of_the_new_tokens_only_is_refused(model, packed):
    with torch.no_grad():
        model(IDS, attention_mask=torch.ones_like(IDS), **packed)
        with pytest.raises(CacheError, match="10 columns for 20 tokens"):
            model(IDS, attention_mask=torch.ones_like(IDS), **packed)


def test_padding_that_changes_its_mind_is_refused(model, packed):
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        model(IDS, attention_mask=mask, **packed)
        with pytest.raises(CacheError, match="changed for tokens"):
            model(IDS[:, :1], attention_mask=torch.ones(2, 11, dtype=torch.long), **packed)


def test_padding_is_remembered_where_no_mask_follows(model, packed):
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    other = QuantMLACache.from_scheme(KVScheme.parse("c4r4"), model.config)
    with torch.no_grad():
        for kwargs, later in (
            (packed, {}),
            (other.as_kwargs(model), {"attention_mask": torch.cat([mask, mask[:, -1:]], 1)}),
        ):
            model(IDS, attention_mask=mask, **kwargs)
            logits = model(IDS[:, :1], **later, **kwargs).logits
    first = next(iter(packed.values()))
    assert first.layers[0].store.lengths == other.layers[0].store.lengths == [8, 11]
    assert logits.isfinite().all()


def test_other_mask_patterns_are_refused():
    with pytest.raises(CacheError, match="plain causal"):
        packed_mask(8, mask_function=lambda *index: True)
    assert packed_mask(8) is None
    mask = torch.zeros(1, 8, dtype=torch.bool)
    assert packed_mask(8, mask) is mask


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 16}, "sliding window"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "packed in one row"),
    ],
)
def test_calls_that_it_cannot_do_are_refused(model, packed, kwargs, reason):
    (cache,) = packed.values()
    module = model.model.layers[0].self_attn
    cache.update(torch.zeros(2, 1, 3, 32), torch.zeros(2, 1, 3, 16), 0)
    with pytest.raises(CacheError, match=reason):
        packed_attention(module, torch.zeros(2, 3, 3, 28), None, None, None, 1.0, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_kv_b_proj_is_refused(model, packed, dtype):
    for layer in model.model.layers:
        weight = layer.self_attn.kv_b_proj.weight
        layer.self_attn.kv_b_proj.weight = torch.nn.Parameter(weight.to(dtype), False)
        layer.self_attn.expand_kv = lambda latent, k_rope: (latent, latent)
    with pytest.raises(CacheError, match="cannot be absorbed"), torch.no_grad():
        model(IDS, **packed)


def test_bf16_models_run_and_stay_close_to_stock(model, packed):
    model.to(torch.bfloat16)
    with torch.no_grad():
        logits = model(IDS, **packed).logits
        model.set_attn_implementation("eager")
        expected = model(IDS, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected.float(), atol=0.15, rtol=0.05)


def test_the_history_is_never_expanded(model, packed):
    # update returns only the new rows, so kv_b_proj sees no more than those
    seen = []
    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(
        lambda module, args, out: seen.append(args[0].shape[-2])
    )
    with torch.no_grad():
        for count in (10, 1, 3):
            model(IDS[:, :count], **packed)
    assert seen == [10, 1, 3]
