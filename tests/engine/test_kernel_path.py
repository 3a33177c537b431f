"""The packed attention through kernels against the same attention in plain torch."""

import pytest
import torch

from exact import forward, tiny_model, tokens
from quantmla.config import KVScheme
from quantmla.engine import kernel_path
from quantmla.engine.attention import packed_attention
from quantmla.engine.clips import Writer
from quantmla.engine.hf import QuantMLACache
from quantmla.errors import CacheError, KernelUnavailableError

SINK, WINDOW = 4, 8
# The interpreter cuts BF16 where a GPU rounds.
LIMIT = {"cpu": 2e-2, "cuda": 5e-3}
SHIFTS = [Writer(content_shift=torch.linspace(-1, 2, 128), rope_shift=torch.linspace(-2, 1, 16))]
NAME = {"cpu": "interpreter", "cuda": "triton"}


def small_model(device, rope=16, **settings):
    """One layer, so that both caches see the same rows: bytes are equal and not just close."""
    settings = {"kv_lora_rank": 128, "qk_rope_head_dim": rope, "heads": 2, "layers": 1} | settings
    return tiny_model(**settings).to(device)


def new_cache(model, kernels="require", name="c4r4", window=WINDOW, **settings):
    scheme = KVScheme.parse(name, sink_tokens=SINK, window_tokens=window)
    return QuantMLACache.from_scheme(scheme, model.config, kernels=kernels, **settings)


def assert_close(have, want, device):
    have, want = have.float(), want.float()
    assert have.isfinite().all()
    assert (have - want).norm() <= LIMIT[device] * want.norm()


def assert_same(cache, plain, device):
    """Both caches hold the same bytes and counted the same."""
    assert (cache.attention_kernel, plain.attention_kernel) == (NAME[device], "torch")
    assert cache.packed_rows_read == plain.packed_rows_read > 0
    assert cache.resident_bytes() == plain.resident_bytes() > 0
    store, other = cache.layers[0].store, plain.layers[0].store
    assert (store.lengths, store.columns) == (other.lengths, other.columns)
    assert store.recent.first == other.recent.first
    assert torch.equal(store.pages, other.pages)
    assert torch.equal(store.recent.rows, other.recent.rows)


@pytest.mark.parametrize(
    ("name", "rope", "calls", "padding", "settings"),
    [
        pytest.param("c4r4", 16, [66], (0, 0), {}, id="one shot"),
        pytest.param("c2r4", 32, [30, 11, 1, 1, 4], None, {"slack_tokens": 3}, id="calls"),
        pytest.param("c3r16", 16, [24, 9, 1], (0, 23, 26), {}, id="left padding"),
        pytest.param("c8r8", 32, [20, 1], None, {"clips": (0.9, torch.tensor([0.8]))}, id="clips"),
        pytest.param("c4r4", 16, [14, 2, 1], None, {"window": 0}, id="no window"),
        pytest.param("c4r4", 16, [20, 1], None, {"writers": SHIFTS}, id="shifts"),
    ],
)
def test_logits_and_bytes_are_those_of_plain_torch(
    device, poison_empty, name, rope, calls, padding, settings
):
    model = small_model(device, rope)
    ids, mask = tokens(sum(calls), batch=len(padding or [0])).to(device), None
    live = torch.ones_like(ids, dtype=torch.bool)
    if padding is not None:
        for row, columns in enumerate(padding):
            live[row, :columns] = False
        mask = live.long()
    plain, cache = (new_cache(model, kernels, name, **settings) for kernels in ("never", "require"))
    want = forward(model, plain, ids, calls, mask)
    assert_close(forward(model, cache, ids, calls, mask)[live], want[live], device)
    assert_same(cache, plain, device)


@pytest.mark.parametrize("padded", [False, True])
def test_rounds_of_a_long_prompt_change_nothing(device, monkeypatch, padded):
    model, ids = small_model(device), tokens(40, batch=2).to(device)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    mask, live = (mask, mask.bool()) if padded else (None, torch.ones_like(ids).bool())
    plain, cache = new_cache(model, "never"), new_cache(model)
    want = forward(model, plain, ids, [5, 35], mask)
    monkeypatch.setattr(kernel_path, "CHUNK_TOKENS", 26)  # 13 of each sequence
    assert_close(forward(model, cache, ids, [5, 35], mask)[live], want[live], device)
    assert_same(cache, plain, device)


def test_cropping_reordering_and_changes_of_the_path(device):
    model = small_model(device)
    ids, more, last = (tokens(count, batch=2).to(device) for count in (30, 5, 2))
    plain, cache = (new_cache(model, kernels, slack_tokens=4) for kernels in ("never", "require"))

    def all_calls(used, kernels):
        """Prefill, a crop across the window, two batch changes; spare memory is poisoned."""
        outputs = []
        for step, path in enumerate(kernels):
            used.layers[0].kernels = path
            outputs.append(forward(model, used, (ids, more, more, last)[step]))
            store = used.layers[0].store
            store.pages[:, -(-store.columns // 64) :] = 0xFF
            if step == 0:
                used.crop(-4)
            elif step == 1:
                used.reorder_cache(torch.tensor([1, 0], device=device))
            elif step == 2:
                used.offload(0)
                used.prefetch(0)
                used.batch_select_indices(torch.tensor([1, 1], device=device))
        return torch.cat(outputs, 1)

    want = all_calls(plain, ["never"] * 4)
    assert_close(all_calls(cache, ["require"] * 4), want, device)
    assert_same(cache, plain, device)
    mixed = new_cache(model, slack_tokens=4)
    assert_close(all_calls(mixed, ["require", "never", "require", "require"]), want, device)
    assert_same(mixed, plain, device)
    mixed.reset()
    assert (mixed.resident_bytes(), mixed.attention_kernel) == (0, NAME[device])


GENERATE = {"greedy": {}, "beams": {"num_beams": 2}, "chunked prefill": {"prefill_chunk_size": 9}}


@pytest.mark.parametrize("mode", GENERATE)
def test_generate(device, mode):
    model, ids = small_model(device), tokens(18, batch=2).to(device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True} | GENERATE[mode]
    outs = []
    for kernels in ("never", "require"):
        cache = new_cache(model, kernels)
        out = model.generate(ids, attention_mask=mask, **settings, **cache.as_kwargs(model))
        outs.append((out.sequences, torch.stack(out.logits)))
    (expected, want), (have, logits) = outs
    assert cache.attention_kernel == NAME[device]
    assert torch.equal(have, expected)
    assert_close(logits, want, device)


def test_numbers_that_are_not_finite_are_replaced_and_counted_alike(device):
    model = small_model(device)
    outs, caches = [], []
    rows = torch.randn(1, 24, 144, generator=torch.Generator().manual_seed(3))
    rows[0, 2, 5], rows[0, 9, 135], rows[0, 20, 1] = torch.tensor([float("nan"), torch.inf, -1e39])
    query = torch.randn(1, 2, 24, 28, generator=torch.Generator().manual_seed(4))
    for kernels in ("never", "require"):
        caches.append(new_cache(model, kernels, check_finite=False))
        caches[-1].as_kwargs(model)
        module, parts = model.model.layers[0].self_attn, []
        for columns in (slice(0, 21), slice(21, 24)):
            latent, k_rope = rows[:, None, columns].to(device).split([128, 16], -1)
            caches[-1].update(latent, k_rope, 0)
            some = query[:, :, columns].to(device)
            part, _ = packed_attention(module, some, None, None, None, 0.2)
            parts.append(part)
        outs.append(torch.cat(parts, 1))
    assert_close(outs[1], outs[0], device)
    assert_same(*reversed(caches), device)
    assert [cache.nonfinite_values for cache in caches] == [3, 3]
    strict = new_cache(model, check_finite=True)
    strict.update(*rows[:, None].to(device).split([128, 16], -1), 0)
    with pytest.raises(CacheError, match="not finite"):
        packed_attention(module, query.to(device), None, None, None, 0.2)
    assert strict.get_seq_length() == 0


@pytest.mark.parametrize(
    ("sizes", "name", "settings", "reasons"),
    [
        ({"kv_lora_rank": 96}, "c4r4", {}, ["kv_lora_rank is 96"]),
        ({"qk_rope_head_dim": 24}, "c1r4", {}, ["qk_rope_head_dim is 24", "content_bits is 1"]),
        ({}, "c16r16", {}, ["the latent has 16 bits"]),
        ({}, "c4r4", {"row_dtype": torch.float32}, ["torch.float32"]),
        (
            {},
            "c4r4",
            {"prefill": "fast", "rope_online": "hadamard"},
            ["strict mode", "'hadamard'"],
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_said_in_full(device, sizes, name, settings, reasons):
    model, ids = small_model(device, **sizes), tokens(5).to(device)
    cache = new_cache(model, name=name, **settings)
    with pytest.raises(KernelUnavailableError) as error:
        forward(model, cache, ids)
    assert [reason for reason in reasons if reason not in str(error.value)] == []
    assert cache.get_seq_length() == cache.resident_bytes() == 0
    usual = new_cache(model, "auto", name=name, **settings)
    forward(model, usual, ids)
    assert usual.attention_kernel == "torch"


def test_schemes_and_double_precision_have_reasons_too(device):
    query = torch.zeros(1, 2, 1, 28, dtype=torch.float64, device=device)
    model = small_model(device)
    scheme = KVScheme(content_bits=4, rope_bits=4, group=32, zero="min16")
    store = QuantMLACache.from_scheme(scheme, model.config).layers[0].store
    name, reasons = kernel_path.choose("auto", store, query)
    assert name == "torch"
    for part in ("groups have 32", "zero mode is min16", "float64"):
        assert any(part in reason for reason in reasons)


def test_kernels_run_where_they_are_compiled_and_wanted(device):
    model, ids = small_model(device), tokens(5).to(device)
    usual = new_cache(model, "auto")
    assert usual.attention_kernel is None
    forward(model, usual, ids)
    assert usual.attention_kernel == "torch"  # float32 queries are not rounded unasked
    model, usual = model.bfloat16(), new_cache(model, "auto")
    forward(model, usual, ids)
    assert usual.attention_kernel == ("torch" if device == "cpu" else "triton")
    with pytest.raises(CacheError, match="kernels"):
        new_cache(model, "always")


def test_without_triton_the_reason_is_named(monkeypatch):
    monkeypatch.setattr("quantmla.kernels.support.interpreting", lambda: False)
    model = small_model("cpu")
    with pytest.raises(KernelUnavailableError, match="compiles for GPUs only"):
        forward(model, new_cache(model), tokens(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(device, dtype):
    model, ids = small_model(device).to(dtype), tokens(24).to(device)
    plain, cache = new_cache(model, "never"), new_cache(model)
    want = forward(model, plain, ids, [20, 3, 1])
    have = forward(model, cache, ids, [20, 3, 1])
    assert have.dtype == dtype
    # plain torch absorbs queries in fp32, the kernel path in the type of the model
    assert (have.float() - want.float()).norm() <= 2e-2 * want.float().norm()
    assert_same(cache, plain, device)


def test_layers_may_take_different_paths(device):
    model, ids = small_model(device, layers=2), tokens(20).to(device)
    schemes = [KVScheme.parse(name, sink_tokens=4, window_tokens=8) for name in ("c4r4", "c1r4")]
    cache = QuantMLACache.from_scheme(schemes, model.config)
    cache.layers[0].kernels = "require"
    forward(model, cache, ids)
    assert cache.attention_kernel == "+".join(sorted([NAME[device], "torch"]))
