"""The ops as torch sees them: schemas, fake tensors, refusals, and which implementation runs."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paged import random_tokens, same_bits
from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme
from quantmla.errors import CacheError, KernelUnavailableError
from quantmla.kernels import ops, paged_reference, support


def small(device="cpu", **settings):
    return random_tokens(6, rank=64, rope=32, bits=(4, 4), **settings).fresh(device)


def gather_args(tokens):
    device = tokens.pages.device
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=device)
    starts, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5], [3, 9]))
    return tokens.pages, table, starts, ends, 4, 64, 64, 32, 4, 4


def test_opcheck(device):
    tokens = small(device, clip=True)
    for pool in (tokens.pages, tokens.rows):
        pool.zero_()  # opcheck compares outputs, and NaN equals nothing
    torch.library.opcheck(torch.ops.quantmla.write.default, tokens.args())
    without = replace(tokens, content_clip=None, rope_clip=None)
    torch.library.opcheck(torch.ops.quantmla.write.default, without.args())
    torch.library.opcheck(torch.ops.quantmla.gather.default, gather_args(tokens))


def test_schemas_say_what_changes():
    schema = torch.ops.quantmla.write.default._schema
    changed = [a.name for a in schema.arguments if a.alias_info is not None]
    assert changed == ["pages", "rows", "nonfinite"]
    assert schema.returns == []
    assert not torch.ops.quantmla.gather.default._schema.is_mutable


def test_fake_tensors_have_the_shape_of_real_ones():
    tokens = small()
    real = ops.gather(*gather_args(tokens))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in tokens.args()]
        assert ops.write(*fake) is None
        args = gather_args(tokens)
        rows = ops.gather(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args)
        )
    assert (rows.shape, rows.dtype) == (real.shape, real.dtype)


@pytest.mark.gpu
def test_a_graph_replays_with_new_numbers():
    tokens = random_tokens(9, rank=256, bits=(4, 4)).fresh("cuda")
    ops.write(*tokens.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.write(*tokens.args())
    tokens.latent.copy_(torch.randn_like(tokens.latent))
    tokens.slot_mapping.copy_(tokens.slot_mapping.roll(1))
    tokens.nonfinite.zero_()
    tokens.pages.fill_(0xFF)
    tokens.rows.fill_(torch.nan)
    graph.replay()
    want = random_tokens(9, rank=256, bits=(4, 4))
    want = replace(want, latent=tokens.latent.cpu(), k_rope=tokens.k_rope.cpu())
    want.slot_mapping = tokens.slot_mapping.cpu()
    paged_reference.write(*want.args())
    assert same_bits(tokens.pages.cpu(), want.pages)
    assert same_bits(tokens.rows.cpu(), want.rows)


@pytest.mark.gpu
def test_tensors_of_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = small("cpu").fresh("cuda:0"), small("cpu")
    second = replace(second, latent=first.latent.cpu(), k_rope=first.k_rope.cpu()).fresh("cuda:1")
    second.slot_mapping = first.slot_mapping.to("cuda:1")
    for tokens in (first, second):
        ops.write(*tokens.args())
    assert same_bits(first.pages.cpu(), second.pages.cpu())


def wrong_write(**changes):
    tokens = small()
    with pytest.raises(CacheError) as error:
        ops.write(*replace(tokens, **changes).args())
    assert error.value.where == "quantmla::write"
    return error.value.got


def test_every_wrong_argument_is_named_at_once():
    tokens = small()
    got = wrong_write(
        latent=tokens.latent.double(),
        k_rope=tokens.k_rope[:5],
        pages=tokens.pages[:, :-1],
        rows=tokens.rows.float(),
        slot_mapping=tokens.slot_mapping.int(),
        positions=tokens.positions[:-1],
        row_slots=tokens.row_slots.repeat_interleave(2)[::2],
        seq_ends=tokens.seq_ends.long(),
        nonfinite=torch.zeros((), dtype=torch.int64),
        content_clip=torch.ones(2),
        sink_tokens=29,
    )
    for part in (
        "latent is torch.float64",
        "k_rope has the shape [5, 32], not [6, 32]",
        "latent is torch.float64 and k_rope torch.bfloat16",
        "pages has the shape",
        "rows is torch.float32, not torch.bfloat16",
        "sink_tokens is 29, rows has 28 rows a slot",
        "slot_mapping is torch.int32, not torch.int64",
        "positions has the shape [5], not [6]",
        "row_slots has gaps in its last dimension (stride 2)",
        "seq_ends is torch.int64, not torch.int32",
        "nonfinite has the shape [], not [1]",
        "content_clip has the shape [2], not [1]",
    ):
        assert part in got
    assert got.count(";") == 11


def test_pools_that_a_kernel_would_misread():
    tokens = small()
    layout = tokens.layout
    pool = torch.zeros(3 * (layout.page_bytes + 64) + 16, dtype=torch.uint8)
    uneven = pool.as_strided((3, layout.page_bytes), (layout.page_bytes + 64, 1))
    assert "not a multiple of 128" in wrong_write(pages=uneven)
    overlapping = pool.as_strided((3, layout.page_bytes), (128, 1))
    assert "pages are 128 bytes apart" in wrong_write(pages=overlapping)
    assert "16 bytes" in wrong_write(pages=pool[1 : layout.page_bytes + 1][None])
    turned = tokens.latent.T.contiguous().T
    assert "latent has gaps" in wrong_write(latent=turned)
    assert "not [S, channels]" in wrong_write(latent=tokens.latent[None])
    assert "16 bits" in wrong_write(
        **vars(random_tokens(6, rank=64, rope=32, bits=(4, 16))) | {"rope_clip": torch.ones(1)}
    )


def test_gather_refuses_what_it_would_misread():
    pages, table, starts, ends, *sizes = gather_args(small())
    with pytest.raises(CacheError) as error:
        ops.gather(pages, table.long(), starts[:1], ends, -1, 96, *sizes[2:])
    for part in ("block_table is torch.int64", "starts has the shape [1]", "n_tokens is -1", "96"):
        assert part in error.value.got


def test_formats_without_a_kernel_are_refused_with_every_reason():
    tokens = random_tokens(2, rank=64, rope=32)
    bad = replace(tokens, latent=tokens.latent[:, :40], content_bits=5, rope_bits=1)
    with pytest.raises(KernelUnavailableError) as error:
        ops.write(*bad.args())
    for part in ("kv_lora_rank is 40", "content_bits is 5", "rope_bits is 1"):
        assert part in error.value.got

    scheme = KVScheme.parse("c1r4", group=32, zero="min16")
    reasons = support.unsupported(PageLayout(64, 40, scheme))
    assert len(reasons) == 4
    for part in ("32 channels", "min16", "qk_rope_head_dim is 40", "content_bits is 1"):
        assert part in "; ".join(reasons)
    assert support.unsupported(PageLayout(512, 64, KVScheme.parse("c4r4"))) == []


def test_the_reference_runs_where_triton_does_not(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    name, reasons = support.implementation("cpu")
    assert name == "reference"
    assert "TRITON_INTERPRET is not set" in reasons[0]
    calls = []
    monkeypatch.setattr(paged_reference, "write", lambda *args: calls.append(args))
    ops.write(*small().args())
    assert len(calls) == 1

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert support.implementation("cpu")[0] == "interpreter"
    monkeypatch.setattr(support, "_triton_installed", lambda: False)
    assert support.implementation("cpu")[0] == "reference"
    assert "triton is not installed" in support.implementation("cpu")[1]
    assert "not for xpu" in support.implementation("xpu")[1][1]


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "reference"), ((8, 0), "triton")])
def test_old_gpus_get_the_reference(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    support._too_old.cache_clear()
    got, reasons = support.implementation("cuda:0")
    support._too_old.cache_clear()
    assert got == name
    assert (["compute capability 7.5" in r for r in reasons] == [True]) == (name == "reference")
