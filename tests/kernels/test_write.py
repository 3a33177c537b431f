"""The writer kernel against its reference, to the bit, and the reference against the layout."""

from dataclasses import replace

import pytest
import torch

from paged import PAGE, random_tokens, same_bits
from quantmla.cache.latent import LatentLayer
from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme
from quantmla.kernels import ops, paged_reference
from quantmla.quant import quantize
from quantmla.quant.feedback import Feedback

BITS = (2, 3, 4, 8, 16)
# numpy, which runs the interpreter, speaks of what a GPU does in silence
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def check(tokens, device, write=ops.write):
    """Write with the kernel and with the reference; return what the reference left behind."""
    want, have = tokens.fresh("cpu"), tokens.fresh(device)
    paged_reference.write(*want.args())
    write(*have.args())
    assert same_bits(have.pages.cpu(), want.pages)
    assert same_bits(have.rows.cpu(), want.rows)
    assert have.nonfinite.cpu() == want.nonfinite
    return want


@pytest.mark.parametrize("rope_bits", BITS)
@pytest.mark.parametrize("content_bits", BITS)
def test_every_pair_of_bits(device, content_bits, rope_bits):
    clip = (content_bits + rope_bits) % 3 == 0
    check(random_tokens(16, rank=128, rope=32, bits=(content_bits, rope_bits), clip=clip), device)


@pytest.mark.parametrize("rope", [32, 64])
@pytest.mark.parametrize("rank", [256, 512])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
def test_sizes(device, count, rank, rope):
    bits = (4, 4) if count % 2 else (2, 4)
    check(random_tokens(count, rank=rank, rope=rope, bits=bits), device)


@pytest.mark.parametrize(("rank", "rope"), [(16, 16), (96, 48), (160, 80), (320, 176)])
def test_short_groups_and_sizes_that_are_no_power_of_two(device, rank, rope):
    for bits in ((4, 2), (3, 8)):
        check(random_tokens(16, rank=rank, rope=rope, bits=bits, clip=True), device)


@pytest.mark.parametrize(
    ("rope", "bits"), [(64, (4, 4)), (32, (2, 2)), (48, (16, 3)), (80, (4, 8))]
)
@pytest.mark.parametrize("clip", [False, True])
def test_error_feedback(device, rope, bits, clip):
    tokens = random_tokens(20, rank=128, rope=rope, bits=bits, clip=clip)
    plain = check(tokens, device).pages
    order, matrix = feedback_of(rope)
    tokens = replace(tokens, rope_order=order, rope_feedback=matrix)
    assert not same_bits(check(tokens, device).pages, plain)
    tokens.k_rope[3, 5], tokens.k_rope[4, 6] = torch.inf, torch.nan
    tokens.k_rope[5], tokens.k_rope[6, 7] = 0.0, 3e38
    check(tokens, device)


def feedback_of(rope):
    mix = torch.randn(rope, 4 * rope) * torch.rand(rope, 1)
    return Feedback.of(mix @ mix.T).by_channel("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_of_any_type_are_rounded_to_bf16_first(device, dtype):
    tokens = random_tokens(16, rank=256, dtype=dtype, bits=(4, 8))
    tokens.latent[:4] *= torch.tensor([1e-3, 1e-6, 1e3, 30.0])[:, None].to(dtype)
    rounded = replace(tokens, latent=tokens.latent.bfloat16(), k_rope=tokens.k_rope.bfloat16())
    written = check(tokens, device)
    assert same_bits(written.pages, check(rounded, device).pages)


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        ((4, 4), torch.bfloat16),
        ((16, 8), torch.bfloat16),
        ((2, 16), torch.float32),
        ((8, 3), torch.float16),
    ],
)
def test_hostile_numbers(device, bits, dtype):
    tokens = random_tokens(24, rank=128, dtype=dtype, bits=bits)
    nan, inf, huge = torch.nan, torch.inf, torch.finfo(dtype).max
    latent, k_rope = tokens.latent, tokens.k_rope
    latent[0, 3], latent[1, 70], k_rope[2, 7] = nan, inf, -inf
    latent[3], latent[4], k_rope[4] = inf, nan, -inf
    latent[5, :64], latent[6] = 0.0, -0.0
    latent[7], latent[8], latent[9, 1:] = 1.5, -3.0, 0.0
    latent[10, 5], latent[10, 70], k_rope[11] = huge, -huge, huge
    latent[12] *= 1e-38
    latent[13] *= torch.finfo(dtype).smallest_normal
    latent[14, 64:], latent[14, 64] = -inf, 2.0
    latent[15, 0], latent[15, 1:64] = 6e4, 1e-4
    tokens.slot_mapping[16] = -1
    latent[16] = nan  # not written, so not counted
    written = check(tokens, device)
    nonfinite = ~torch.cat([latent, k_rope], -1).bfloat16().isfinite()
    assert written.nonfinite == nonfinite[torch.arange(24) != 16].sum() > 0
    check(replace(tokens, latent=torch.where(latent.isfinite(), latent, 0)), device)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_exact_halves_round_to_even_at_any_scale(device, bits):
    levels = 2**bits - 1
    mantissas = [m for m in range(1, 256, 2) if m * levels < 256]
    rows = []
    for exponent in (-132, -126, -100, -1, 0, 7, 100):
        for mantissa in mantissas:
            step = mantissa * 2.0**exponent
            halves = torch.arange(2 * levels + 1).double() * step / 2
            shift = step * torch.randint(0, levels + 1, ()).item()
            row = torch.zeros(128, dtype=torch.float64)
            row[:64] = (halves - shift)[torch.randint(0, len(halves), (64,))]
            row[0], row[1] = -shift, levels * step - shift
            row[64:] = row[:64].flip(0)
            rows.append(row)
    latent = torch.stack(rows).bfloat16()
    latent = latent[torch.randperm(len(latent))[:80]]
    tokens = random_tokens(len(latent), rank=128, rope=16, bits=(bits, 16))
    check(replace(tokens, latent=latent), device)


def test_large_finite_numbers_saturate(device):
    tokens = random_tokens(4, rank=128, rope=16, bits=(4, 4))
    for value in (2.0**126, 1.5 * 2.0**126, -1.25 * 2.0**127):
        tokens.latent[1, 3] = value
        check(tokens, device)


def test_tiny_clip_ratios_saturate(device):
    tokens = random_tokens(16, rank=128, bits=(4, 4), clip=True)
    tokens.content_clip[:] = torch.tensor([1e-38, 1e-3])
    tokens.latent[3] *= 1e37
    tokens.latent[4] *= -1e30
    check(tokens, device)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_that_lie_between_two_bf16_numbers(device, bits):
    # range = levels * (odd number of 9 bits): a division that is off by one bit breaks the tie
    extent = (2**bits - 1) * torch.arange(257, 512, 2)
    unit = 2 ** max(0, (2**bits - 1).bit_length() + 1)
    high, low = extent // unit * unit, extent % unit
    groups = torch.zeros(128, 64)
    groups[:, 0], groups[:, 1] = high, -low
    assert same_bits(groups, groups.bfloat16().float())
    tokens = random_tokens(16, rank=512, rope=16, bits=(bits, 16))
    check(replace(tokens, latent=groups.reshape(16, 512).bfloat16()), device)


def test_zero_points_of_clipped_ranges_close_to_halves(device):
    count, levels = 1 << 20, 15
    high, low = torch.rand(2, count).bfloat16().float()
    clip = torch.rand(count) * 0.5 + 0.5
    scale = ((high * clip + low * clip) / levels).bfloat16().float()
    distance = (low * clip / scale % 1 - 0.5).abs()
    close = ((distance < 2e-4) & (distance > 0)).nonzero()[:64, 0]
    assert len(close) == 64
    groups = torch.zeros(64, 64)
    groups[:, 0], groups[:, 1] = high[close], -low[close]
    tokens = random_tokens(1, rank=4096, rope=16, bits=(4, 16))
    tokens = replace(tokens, latent=groups.reshape(1, 4096).bfloat16(), content_clip=clip[close])
    check(tokens, device)


def test_slots_that_are_not_in_the_pool_write_nothing(device):
    tokens = random_tokens(48, rank=256, bits=(4, 4))
    tokens.slot_mapping[::3] = -1
    tokens.slot_mapping[5], tokens.slot_mapping[7] = 3 * PAGE, 2**40
    tokens.row_slots[10], tokens.row_slots[11] = -1, 3
    written = check(tokens, device)
    untouched = torch.ones(3 * PAGE, dtype=torch.bool)
    inside = (tokens.slot_mapping >= 0) & (tokens.slot_mapping < 3 * PAGE)
    untouched[tokens.slot_mapping[inside]] = False
    plane = written.layout.plane("content")
    content = written.pages[:, : plane.end_bytes].reshape(3 * PAGE, plane.row_bytes)
    assert (content[untouched] == 0xFF).all()


@pytest.mark.parametrize(("sink", "ring"), [(0, 0), (4, 0), (0, 8), (4, 8), (100, 8), (4, 128)])
def test_sink_and_ring_rows(device, sink, ring):
    tokens = random_tokens(40, rank=128, bits=(4, 4), sink=sink, ring=ring)
    # the chunk of a longer sequence in one slot, a whole short one in another
    tokens.positions[:30] += 33
    tokens.seq_ends[:30] = 63
    tokens.positions[30:] -= 30
    tokens.seq_ends[30:] = 10
    tokens.row_slots[30:] = 0
    written = check(tokens, device)
    rows, row = torch.cat([tokens.latent, tokens.k_rope], -1), written.rows
    # the order of tokens does not matter
    for name in ("latent", "k_rope", "slot_mapping", "positions", "row_slots", "seq_ends"):
        setattr(tokens, name, getattr(tokens, name).flip(0))
    assert same_bits(check(tokens, device).rows, written.rows)
    for slot, first, end, source in ((2, 33, 63, rows[:30]), (0, 0, 10, rows[30:])):
        for position in range(first, end):
            value = source[position - first]
            if position < sink:
                assert same_bits(row[slot, position], value)
            elif position >= end - ring:
                assert same_bits(row[slot, sink + (position - sink) % ring], value)
    assert row[1].isnan().all()


def test_without_a_ring_no_end_of_a_sequence_leads_out_of_its_rows(device):
    tokens = random_tokens(8, rank=64, rope=16, sink=4, ring=0)
    tokens.row_slots[:] = 0
    tokens.seq_ends[:] = 0
    assert check(tokens, device).rows[1:].isnan().all()


def test_strided_inputs_and_pools(device):
    tokens = random_tokens(16, rank=256, rope=32, bits=(3, 4))
    both = torch.randn(16, 300).bfloat16()
    layout = tokens.layout
    wide = torch.full((6, layout.page_bytes + 256), 0xFF, dtype=torch.uint8)
    rows = torch.full((3, 2, 28, 300), torch.nan, dtype=torch.bfloat16)
    strided = replace(
        tokens,
        latent=both[:, 1:257],
        k_rope=both[:, 260:292],
        pages=wide[::2, : layout.page_bytes],
        rows=rows[:, 1, :, :288],
    )
    dense = replace(tokens, latent=both[:, 1:257].clone(), k_rope=both[:, 260:292].clone())
    assert same_bits(check(strided, device).pages, check(dense, device).pages)


def test_addresses_pass_2_gib(device):
    tokens = random_tokens(8, rank=128, rope=32, bits=(2, 4), blobs=2)
    far = 1 << 31
    pool = torch.empty(far + tokens.layout.page_bytes, dtype=torch.uint8, device=device)
    pool = pool.as_strided((2, tokens.layout.page_bytes), (far, 1))
    pool.fill_(0xFF)
    here = tokens.fresh(device)
    here.pages = pool
    ops.write(*here.args())
    assert same_bits(pool.cpu(), check(tokens, device).pages)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (4, 4), (16, 8)])
def test_tokens_of_a_program_do_not_change_bytes(device, shape):
    from quantmla.kernels.write import launch

    tokens = random_tokens(5, rank=256, bits=(4, 4), clip=True)
    tokens.latent[3, 3] = torch.nan
    check(tokens, device, lambda *args: launch(*args, shape=shape))


@pytest.mark.parametrize("name", ["c4r4", "c3r8", "c2r16", "c16r4"])
def test_pages_are_those_of_the_layout(name):
    layout = PageLayout(128, 32, KVScheme.parse(name))
    bits = layout.scheme.content_bits, layout.scheme.rope_bits
    tokens = random_tokens(70, rank=128, rope=32, bits=bits)
    tokens.slot_mapping = torch.arange(7, 77)
    written = tokens.fresh("cpu")
    paged_reference.write(*written.args())
    pages = tokens.pages.clone()
    paths = (tokens.latent, bits[0]), (tokens.k_rope, bits[1])
    layout.store(pages, 7, *(x if n == 16 else quantize(x, n) for x, n in paths))
    assert same_bits(written.pages, pages)


def test_rows_and_pages_are_those_of_the_rectangular_cache():
    scheme = KVScheme.parse("c4r16", window_tokens=24)
    layer = LatentLayer(PageLayout(128, 32, scheme), check_finite=False)
    tokens = random_tokens(70, rank=128, rope=32, bits=(4, 16), fill=0, blobs=2)
    tokens.latent[60, 3], tokens.k_rope[61, 4], tokens.latent[2, 5] = (
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    tokens.slot_mapping = torch.arange(70)
    layer.append(tokens.latent[None], tokens.k_rope[None])
    paged_reference.write(*tokens.args())
    assert same_bits(tokens.pages, layer.pages[0])
    assert same_bits(tokens.rows[2, :4], layer.recent.sink[0])
    assert same_bits(tokens.rows[2, 4:], layer.recent.ring[0])
    assert tokens.nonfinite == layer.nonfinite == 3
