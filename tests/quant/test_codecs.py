"""Codecs: known grids and errors, bytes of the published formats, write-once, refusals."""

import math

import pytest
import torch

from quantmla.errors import QuantMLAError, SchemeError
from quantmla.quant import dequantize, quantize
from quantmla.quant.codebook import Codebook, ConstantNorm, lloyd_max
from quantmla.quant.codec import Affine, Bf16
from quantmla.quant.floats import Fp8Flat, Fp8Tile, Mxfp4, Nvfp4, to_e2m1, to_e4m3
from quantmla.quant.hqq import HalfQuadratic
from quantmla.quant.kivi import PerChannel
from quantmla.quant.online import Online
from quantmla.transform.content import random_hadamard

ROWS = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
CODECS = [
    Bf16(),
    Affine(4),
    Affine(2, zero="min16", clip=0.65),
    HalfQuadratic(4),
    Fp8Flat(),
    Fp8Tile(),
    Nvfp4(),
    Mxfp4(),
    Codebook(4),
    ConstantNorm(bits=2, scale=1.0),
    Online(Affine(4), random_hadamard(64, 1)),
]


def fitted(codec):
    return codec if isinstance(codec, ConstantNorm) else codec.fitted(ROWS)


def nmse(codec, rows):
    back = codec.round_trip(rows)
    return float((back - rows).square().sum() / rows.square().sum())


def test_the_e4m3_grid():
    exact = [2.0**-9, 2.0**-6, 0.9375, 1.0, 1.125, 240.0, 448.0]
    assert to_e4m3(torch.tensor(exact)).tolist() == exact
    # ties to even, underflow, and saturation instead of NaN
    given = [1.0625, 1.1875, 2.0**-11, 449.0, 1e6, -1e6]
    assert to_e4m3(torch.tensor(given)).tolist() == [1.0, 1.25, 0.0, 448.0, 448.0, -448.0]


def test_the_e2m1_grid():
    exact = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert to_e2m1(torch.tensor(exact + [-x for x in exact])).abs().tolist() == exact * 2
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]
    assert to_e2m1(torch.tensor(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    x = torch.linspace(-7, 7, 4001)
    distance = (x[:, None] - torch.tensor(exact + [-e for e in exact])).abs().amin(1)
    torch.testing.assert_close((to_e2m1(x) - x).abs(), distance)


@pytest.mark.parametrize(
    ("bits", "min16", "zp8", "ratio", "clipped", "constant"),
    [
        (4, 0.00805, 0.00830, 0.95, 0.00767, 0.00945),
        (3, 0.03705, 0.03820, 0.85, 0.03095, 0.03447),
        (2, 0.20274, 0.20925, 0.65, 0.11495, 0.11758),
    ],
)
def test_errors_of_a_gaussian_group_are_those_of_the_table(
    bits, min16, zp8, ratio, clipped, constant
):
    rows = torch.randn(8000, 64, generator=torch.Generator().manual_seed(0))
    measured = [
        nmse(codec, rows)
        for codec in (
            Affine(bits, zero="min16"),
            Affine(bits),
            Affine(bits, zero="min16", clip=ratio),
            ConstantNorm(bits=bits, scale=1.0),
        )
    ]
    assert measured == pytest.approx([min16, zp8, clipped, constant], rel=0.02)


def test_lloyd_max_levels():
    assert lloyd_max(1) == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    assert lloyd_max(2)[2:] == pytest.approx([0.4528, 1.5104], abs=1e-4)
    assert lloyd_max(4)[-1] == pytest.approx(2.7326, abs=1e-4)
    assert len(lloyd_max(4)) == 16


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_half_quadratic_zeros_are_not_worse_than_rounding_in_their_own_norm(bits):
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    rows[::3, 5] *= 9  # heavy tails are what the method is for
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).bfloat16().float()
    zero = (-low / scale).bfloat16().float()
    rounded = ((rows / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale
    plain = (rows - rounded).abs().pow(0.7).sum(-1)
    ours = (rows - HalfQuadratic(bits).round_trip(rows)).abs().pow(0.7).sum(-1)
    assert bool((ours <= plain * (1 + 1e-6)).all())
    assert float(ours.mean()) < 0.99 * float(plain.mean())


def published_steps(x):
    """The published loop on one group, in plain Python: every (p-norm, values) that it meets."""

    def bf16(value):
        return float(torch.tensor(value).bfloat16())

    scale = bf16((max(x) - min(x)) / 15)
    zero, beta, met = bf16(-min(x) / scale), 10.0, []
    for _ in range(21):
        codes = [min(max(round(v / scale + zero), 0), 15) for v in x]
        back = [(code - zero) * scale for code in codes]
        errors = [v - b for v, b in zip(x, back, strict=True)]
        met.append((sum(abs(e) ** 0.7 for e in errors), back))
        shrunk = [
            math.copysign(max(abs(e) - abs(e) ** -0.3 / beta, 0), e) if e else 0.0 for e in errors
        ]
        terms = [c - (v - e) / scale for c, v, e in zip(codes, x, shrunk, strict=True)]
        zero, beta = bf16(sum(terms) / len(x)), beta * 1.01
    return met


def test_half_quadratic_steps_are_the_published_ones():
    rows = 4 * torch.randn(12, 64, generator=torch.Generator().manual_seed(8))
    start = best = 0.0
    for row in rows:
        met = published_steps(row.tolist())
        error, back = min(met, key=lambda entry: entry[0])
        start, best = start + met[0][0], best + error
        ours = HalfQuadratic(4).round_trip(row[None])[0]
        torch.testing.assert_close(ours, torch.tensor(back), rtol=1e-4, atol=1e-4)
    assert best < 0.995 * start


@pytest.mark.parametrize(
    ("content", "rope", "expected"),
    [
        (Affine(4, zero="min16"), Affine(4, zero="min16"), 324),
        (Affine(4), Affine(4), 315),
        (Affine(2), Affine(4), 187),
        (Affine(3), Affine(4), 251),
        (Affine(4), Affine(8), 347),
        (Affine(4), Bf16(), 256 + 128 + 24),
        (Fp8Flat(), Fp8Flat(), 576),
        (Fp8Tile(), Bf16(), 656),
        (Nvfp4(), Nvfp4(), 324),
        (Mxfp4(), Mxfp4(), 306),
        (Nvfp4(), Bf16(), 416),
        (ConstantNorm(bits=4), Affine(4), 291),
        (ConstantNorm(bits=2), Affine(4), 163),
        (Codebook(4), Codebook(4), 292),
        (HalfQuadratic(4), HalfQuadratic(4), 324),
        (Affine(4), PerChannel(4, zero="zp8"), 315),
        (Affine(4), PerChannel(4), 316),
    ],
)
def test_bytes_of_a_token_at_512_and_64_channels(content, rope, expected):
    assert content.logical_bytes(512) + rope.logical_bytes(64) == expected


def test_the_affine_codec_is_the_quantiser_of_the_pages():
    clip = torch.tensor([0.9, 0.7])
    rows = ROWS.reshape(48, 128)
    codes = quantize(rows, 4, clip=clip)
    back = Affine(4, clip=clip).round_trip(rows)
    assert torch.equal(back.bfloat16(), dequantize(codes))
    assert back.dtype == torch.float32


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_token_comes_back_the_same_beside_any_other(codec):
    codec = fitted(codec)
    together = codec.round_trip(ROWS)
    assert codec.group_tokens == 1
    for token in (0, 17, 95):
        alone = codec.round_trip(ROWS[token : token + 1])
        torch.testing.assert_close(alone[0], together[token], rtol=1e-5, atol=1e-6)
    mixed = torch.cat([ROWS[40:41], 50 * ROWS[:3]])
    torch.testing.assert_close(codec.round_trip(mixed)[0], together[40], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_errors_are_small_and_zero_rows_stay_zero(codec):
    codec = fitted(codec)
    assert nmse(codec, ROWS) < 0.15
    assert torch.isfinite(codec.round_trip(torch.zeros(2, 64))).all()
    if not isinstance(codec, ConstantNorm):  # which has no level at 0
        assert torch.equal(codec.round_trip(torch.zeros(2, 64)), torch.zeros(2, 64))


@pytest.mark.parametrize("codec", [*CODECS, PerChannel(4)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_refused(codec, bad):
    codec = fitted(codec)
    rows = ROWS.clone()
    rows[3, 7] = bad
    with pytest.raises(QuantMLAError, match="non-finite"):
        codec.round_trip(rows)


def test_kivi_codes_whole_groups_by_channel_and_leaves_the_rest():
    codec = PerChannel(4)
    back = codec.round_trip(ROWS)
    assert torch.equal(back[64:], ROWS[64:].bfloat16().float())
    for channel in (0, 33):
        codes = quantize(ROWS[:64, channel], 4, zero="min16")
        expected = dequantize(codes, zero="min16", dtype=torch.float32)
        torch.testing.assert_close(back[:64, channel], expected)
    assert torch.equal(codec.round_trip(ROWS[:63]), ROWS[:63].bfloat16().float())


def test_kivi_is_the_exception_to_write_once():
    codec, other = PerChannel(4), ROWS.clone()
    assert codec.group_tokens == 64
    other[60] *= 8
    changed = codec.round_trip(other)[:60] != codec.round_trip(ROWS)[:60]
    assert bool(changed.any(-1).all())


def test_kivi_keeps_a_channel_of_large_constant_mean_apart():
    rows = ROWS.clone()
    rows[:, 11] += 30
    per_token, per_channel = (codec.round_trip(rows)[:64] for codec in (Affine(4), PerChannel(4)))
    others = torch.arange(64) != 11
    error = [(back - rows[:64])[:, others].square().mean() for back in (per_token, per_channel)]
    assert error[1] < 0.1 * error[0]


@pytest.mark.parametrize("codec", [Fp8Flat(), Nvfp4(), ConstantNorm(bits=4)])
def test_static_numbers_must_be_fitted(codec):
    assert codec.static() is None
    with pytest.raises(SchemeError, match="never set"):
        codec.round_trip(ROWS)
    rows = torch.nn.functional.normalize(ROWS, dim=-1) * 8
    assert codec.fitted(rows).static() > 0
    with pytest.raises(QuantMLAError, match="all zero"):
        codec.fitted(torch.zeros(4, 64))


def test_static_scales_use_the_whole_range_and_saturate_beyond_it():
    rows = ROWS / ROWS.abs().max()
    for codec in (Fp8Flat().fitted(rows), Nvfp4().fitted(rows)):
        peak = codec.round_trip(rows).abs().max()
        assert float(peak) == pytest.approx(1.0)
        assert float(codec.round_trip(10 * rows).abs().max()) == pytest.approx(1.0)


def test_mxfp4_scales_are_powers_of_two():
    rows = torch.zeros(1, 32)
    rows[0, :3] = torch.tensor([5.0, 1.2, -0.3])
    # peak 5 = 1.25 * 2^2: scale 1, 5 is a tie between 4 and 6
    assert Mxfp4().round_trip(rows)[0, :3].tolist() == [4.0, 1.0, -0.5]


def test_constant_norm_refuses_rows_of_different_norms():
    rows = ROWS * torch.linspace(0.5, 2, 96)[:, None]
    with pytest.raises(SchemeError, match="different norms"):
        ConstantNorm(bits=4).fitted(rows)


def test_an_online_rotation_helps_rows_with_an_outlier_channel():
    rows = ROWS.clone()
    rows[:, 9] *= 30
    assert nmse(Online(Affine(4), random_hadamard(64, 1)), rows) < 0.5 * nmse(Affine(4), rows)
    rows[:, 9] /= 30
    dense = torch.eye(64, dtype=torch.float64) + 0.1 * torch.randn(64, 64, dtype=torch.float64)
    assert nmse(Online(Affine(8), dense), rows) < 1e-3
