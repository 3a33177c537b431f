"""A GPU gives the same cache bytes, logits and learned transforms as a CPU, and saves memory."""

import pytest
import torch

from exact import forward, tiny_model, tokens
from quantmla.cache.latent import LatentLayer
from quantmla.cache.layout import PageLayout
from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.train import train_layer
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.config import KVScheme, Recipe, TrainConfig
from quantmla.engine import kernel_path
from quantmla.engine.hf import QuantMLACache
from tiny import write_tiny

pytestmark = pytest.mark.gpu
CALLS = [70, 25] + [1] * 5  # prefill, a chunk, decode


def run(model, ids, **settings):
    scheme = KVScheme.parse("c4r4", sink_tokens=4, window_tokens=8)
    clips = (torch.tensor([0.8]), 0.9)
    cache = QuantMLACache.from_scheme(scheme, model.config, clips=clips, **settings)
    return forward(model, cache, ids, CALLS), cache


@pytest.mark.parametrize("prefill", ["strict", "fast"])
@pytest.mark.parametrize(
    ("dtype", "limit", "equal_bytes"), [(torch.float32, 1e-2, 0.995), (torch.bfloat16, 0.1, 0.9)]
)
def test_the_model_reads_the_same_cache(dtype, limit, equal_bytes, prefill):
    # products of the GPU differ in their last bits, which moves a value over a code border at times
    model, ids = tiny_model(dtype=dtype), tokens(sum(CALLS), batch=2)
    expected, cpu = run(model, ids, prefill=prefill)
    logits, gpu = run(model.cuda(), ids.cuda(), prefill=prefill)
    assert gpu.packed_rows_read == cpu.packed_rows_read > 0
    assert gpu.resident_bytes() == cpu.resident_bytes()
    assert gpu.nonfinite_values == 0
    for layer, other in zip(gpu.layers, cpu.layers, strict=True):
        assert layer.store.pages.is_cuda
        same = layer.store.pages.cpu() == other.store.pages
        assert same.float().mean() >= equal_bytes
    error = (logits.float().cpu() - expected.float()).norm() / expected.float().norm()
    assert error < limit


@pytest.mark.parametrize("name", ["c4r4", "c2r4", "c3r8", "c4r16", "c8r1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rows_give_equal_bytes_and_numbers(name, dtype):
    rows = torch.randn(2, 300, 512 + 64).to(dtype)
    rows[0, :, 5] *= 30
    stores = []
    for device in ("cpu", "cuda"):
        layout = PageLayout(512, 64, KVScheme.parse(name))
        store = LatentLayer(layout, content_clip=torch.full((8,), 0.7), rope_clip=0.9)
        for part in rows.to(device).split([200, 99, 1], 1):
            visible = store.append(*part.split([512, 64], -1))
        stores.append((store, visible))
    (cpu, expected), (gpu, visible) = stores
    pages = -(-300 // 64)
    assert torch.equal(gpu.pages.cpu()[:, :pages], cpu.pages[:, :pages])
    for part in ("sink", "packed", "band"):
        assert torch.equal(getattr(visible, part).cpu(), getattr(expected, part))


def test_learning_gives_the_same_transform(tmp_path):
    windows = torch.randint(0, 96, (6, 40))
    folder = write_tiny(tmp_path, layers=1, kv_lora_rank=64, qk_rope_head_dim=16, hidden_size=64)
    capture = next(capture_layers(folder, windows))
    recipe = Recipe(
        scheme=KVScheme.parse("c4r4", group=16, sink_tokens=2, window_tokens=8),
        sequences=4,
        heldout_sequences=2,
        sequence_tokens=40,
        steps=8,
        eval_every=4,
        train=TrainConfig(curvature_steps=8, curvature_batch_tokens=64),
    )
    cpu, gpu = (
        train_layer(LayerWorkspace(capture, "half", 5, device), recipe)
        for device in ("cpu", "cuda")
    )
    for name in ("content_rotation", "content_scale", "rope_angle", "rope_scale"):
        mine, other = getattr(gpu, name), getattr(cpu, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert (mine.cpu() - other).norm() < 2e-2 * other.norm().clamp(min=1.0)


def test_the_history_is_never_unpacked():
    tokens_in_all, call, layers, heads = 16384, 2048, 4, 16
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    sizes |= {"v_head_dim": 128, "heads": heads, "hidden_size": 256, "layers": layers}
    model = tiny_model(dtype=torch.bfloat16, **sizes).cuda()
    ids = tokens(tokens_in_all + 2).cuda()
    kwargs = {"scheme": "c4r4", "model": model.config, "kernels": "require"}
    calls = [call] * (tokens_in_all // call)
    warm = QuantMLACache.from_scheme(**kwargs)
    forward(model, warm, ids[:, : call + 1], [call, 1])  # kernels, workspaces
    del warm
    before, asked = torch.cuda.memory_allocated(), requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    cache = QuantMLACache.from_scheme(**kwargs)
    forward(model, cache, ids[:, :-1], [*calls, 1])
    peak = torch.cuda.max_memory_allocated() - before
    expanded = 2 * tokens_in_all * layers * heads * (128 + 64 + 128)  # K and V of a stock cache
    assert peak < expanded / 2
    held = requested_bytes() - asked
    assert abs(held - cache.resident_bytes()) < 0.01 * held
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    forward(model, cache, ids[:, -1:])
    one_history = 2 * tokens_in_all * (512 + 64)  # BF16 rows of one layer
    assert torch.cuda.max_memory_allocated() - base < one_history
    assert cache.attention_kernel == "triton"
    assert cache.nonfinite_values == 0


def requested_bytes():
    """Bytes of all tensors on the GPU, without what the allocator adds."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_a_call_without_a_mask_never_waits_for_the_gpu():
    layout = PageLayout(512, 64, KVScheme.parse("c4r4"))
    store = LatentLayer(layout, content_clip=0.9, slack_tokens=1)
    weight = torch.randn(16, 128 + 128, 512, device="cuda", dtype=torch.bfloat16)

    def call(count, batch=3):
        query = torch.randn(batch, 16, count, 128 + 64, device="cuda", dtype=torch.bfloat16)
        latent, k_rope = (
            torch.randn(batch, count, c, device="cuda", dtype=torch.bfloat16) for c in (512, 64)
        )
        return kernel_path.attend(weight, query, store, latent, k_rope, None, 0.1)

    for count in (150, 1, 2):  # compiles the kernels
        call(count)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [call(count) for count in (150, 1, 2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(output.isfinite().all() for output in outputs)
