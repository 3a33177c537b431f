"""The quantiser against a scalar reference, its edge cases and its gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmla.errors import QuantMLAError, SchemeError
from quantmla.quant.affine import dequantize, fake_quantize, quantize

torch.set_num_threads(1)
MODES = ("zp8", "min16")
WIDTHS = (1, 2, 3, 4, 8)
INF, NAN = math.inf, math.nan
f32 = np.float32


def to_bf16(value):
    """Round one fp32 number to bf16, half to even, by bit arithmetic."""
    bits = int(np.array(value, f32).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.array(bits, np.uint32).view(f32)[()]


def reference_group(x, bits, zero, clip=None):
    """Codes, scale, zero and values of one group, one fp32 operation at a time."""
    levels = f32(2**bits - 1)
    low, high = f32(min(x)), f32(max(x))
    if zero == "zp8":
        low, high = min(low, f32(0)), max(high, f32(0))
        if clip is not None:
            low, high = f32(low * f32(clip)), f32(high * f32(clip))
        if high == low:
            scale = f32(1)
        else:
            scale = to_bf16(max(f32((high - low) / levels), f32(2.0**-126)))
        point = min(max(np.rint(f32(-low / scale)), 0), levels)
        codes = [min(max(np.rint(f32(v / scale)) + point, 0), levels) for v in x]
        return codes, scale, point, [f32(scale * f32(k - point)) for k in codes]
    constant = high == low
    if clip is not None:
        shrink = f32(f32(high - low) * f32(f32(1 - f32(clip)) * f32(0.5)))
        low, high = f32(low + shrink), f32(high - shrink)
    low = to_bf16(low)
    if constant:
        return [0] * len(x), f32(1), low, [low] * len(x)
    scale = to_bf16(max(f32((high - low) / levels), f32(2.0**-126)))
    codes = [min(max(np.rint(f32(f32(v - low) / scale)), 0), levels) for v in x]
    return codes, scale, low, [f32(low + f32(scale * f32(k))) for k in codes]


def sample(channels, tokens=6, seed=0):
    """Tokens of very different size and offset."""
    g = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.linspace(-4, 3, tokens).unsqueeze(-1)
    offset = torch.randn(tokens, 1, generator=g) * torch.tensor([0.0, 3.0]).repeat(tokens)[
        :tokens
    ].unsqueeze(-1)
    return size * (torch.randn(tokens, channels, generator=g) + offset)


@pytest.mark.parametrize("clip", [None, 0.65])
@pytest.mark.parametrize("zero", MODES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_equals_the_scalar_reference(bits, zero, clip):
    for channels, group in ((64, 64), (128, 64), (70, 64), (16, 64), (40, 16)):
        for x in (sample(channels), sample(channels, seed=1).bfloat16()):
            q = quantize(x, bits, group=group, zero=zero, clip=clip)
            values = dequantize(q, group=group, zero=zero, dtype=torch.float32)
            assert q.scale.shape[-1] == -(-channels // group)
            for t, token in enumerate(x.float().numpy()):
                for g, start in enumerate(range(0, channels, group)):
                    part = slice(start, start + group)
                    codes, scale, low, back = reference_group(token[part], bits, zero, clip)
                    assert q.codes[t, part].tolist() == [int(k) for k in codes]
                    assert float(q.scale[t, g]) == scale
                    assert float(q.zero[t, g]) == low
                    assert values[t, part].tolist() == [float(v) for v in back]


def test_storage_types():
    x = sample(128)
    zp8, min16 = quantize(x, 4), quantize(x, 4, zero="min16")
    assert zp8.codes.dtype == min16.codes.dtype == torch.uint8
    assert zp8.scale.dtype == min16.scale.dtype == torch.bfloat16
    assert (zp8.zero.dtype, min16.zero.dtype) == (torch.uint8, torch.bfloat16)
    assert dequantize(zp8).dtype == torch.bfloat16
    assert int(zp8.nonfinite) == 0


def test_rounds_half_to_even():
    x = torch.tensor([0.0, 15.0, 0.5, 1.5, 2.5, 3.5, 14.5])  # scale 1, zero 0
    assert quantize(x, 4).codes.tolist() == [0, 15, 0, 2, 2, 4, 14]
    assert quantize(x, 4, zero="min16").codes.tolist() == [0, 15, 0, 2, 2, 4, 14]


def test_codes_use_the_rounded_scale_and_minimum():
    tie = 1 + 2**-8  # rounds to 1.0 in bf16
    x = torch.tensor([0.0, 15 * tie, 7.52])  # 7.52 / tie rounds to 7, 7.52 / 1.0 to 8
    q = quantize(x, 4)
    assert float(q.scale) == 1.0
    assert q.codes.tolist() == [0, 15, 8]
    low = 256.9  # rounds to 256 in bf16
    q = quantize(torch.tensor([low, low + 15.0]), 4, zero="min16")
    assert float(q.zero) == 256.0
    assert q.codes[0] == 1  # (256.9 - 256) / 1.0625, not 0


def test_zero_point_never_leaves_its_range():
    x = torch.tensor([-255 * (1 + 2**-8), -1.0])  # bf16 scale 1.0, so -low / scale rounds to 256
    q = quantize(x, 8)
    assert float(q.scale) == 1.0
    assert q.zero.tolist() == [255]
    assert q.codes.tolist() == [0, 254]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("zero", MODES)
def test_degenerate_groups(bits, zero):
    for x in (torch.zeros(64), torch.full((64,), -0.0), torch.tensor([-0.0, 0.0] * 32)):
        q = quantize(x, bits, zero=zero)
        assert float(q.scale) == 1.0
        assert q.codes.max() == 0
        assert q.zero.view(torch.uint8).max() == 0  # no sign bit: -0 is stored as 0
        values = dequantize(q, zero=zero)
        assert values.view(torch.int16).abs().max() == 0
    for constant in (3.0, -3.0, 1001.0, 1003.0, 1e-3):
        q = quantize(torch.full((64,), constant), bits, zero=zero)
        values = dequantize(q, zero=zero, dtype=torch.float32)
        assert values.unique().numel() == 1
        assert abs(float(values[0]) / constant - 1) <= 2**-8
        if zero == "min16":
            assert float(q.scale) == 1.0
            assert q.codes.max() == 0
            assert float(values[0]) == float(torch.tensor(constant).bfloat16())


@pytest.mark.parametrize("zero", MODES)
def test_scale_underflow_stops_at_the_smallest_normal(zero):
    x = torch.linspace(0, 2.0**-126, 64)
    q = quantize(x, 4, zero=zero)
    assert float(q.scale) == 2.0**-126
    assert dequantize(q, zero=zero, dtype=torch.float32).max() <= 2.0**-126
    below_min16_step = torch.tensor([1.0, 1.0 + 2**-23])  # bf16 minimum 1.0
    q = quantize(below_min16_step, 4, zero="min16")
    assert float(q.scale) > 0
    assert dequantize(q, zero="min16").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("zero", MODES)
def test_huge_values_stay_finite(bits, zero):
    x = sample(64)
    x[0, 0], x[1, 1], x[2, :2] = 3.3e38, -3.3e38, torch.tensor([3.4e38, -3.4e38])
    x[3, 5] = 1e6
    q = quantize(x, bits, zero=zero)
    assert int(q.nonfinite) == 0
    values = dequantize(q, zero=zero)
    assert values.isfinite().all()
    assert float(values[0, 0]) > 5e37
    assert abs(float(values[3, 5]) / 1e6 - 1) < 0.01


def test_an_outlier_takes_the_resolution_of_its_group_only():
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 1e4
    q = quantize(x, 4)
    assert q.codes[0, :64].unique().numel() == 2
    assert torch.equal(q.codes[0, 64:], quantize(x[:, 64:], 4).codes[0])


@pytest.mark.parametrize("zero", MODES)
def test_nonfinite_values_are_replaced_and_counted(zero):
    x = torch.tensor([[NAN, 2.0, -3.0, 1.0], [INF, 2.0, -3.0, 1.0], [-INF, NAN, INF, NAN]])
    clean = torch.tensor([[0.0, 2.0, -3.0, 1.0], [3.0, 2.0, -3.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    q, expected = quantize(x, 4, zero=zero), quantize(clean, 4, zero=zero)
    assert int(q.nonfinite) == 6
    assert torch.equal(q.codes, expected.codes)
    assert torch.equal(q.scale, expected.scale)
    assert torch.equal(q.zero, expected.zero)


@pytest.mark.parametrize("zero", MODES)
def test_nonfinite_values_surface_on_request(zero):
    x = torch.ones(2, 128)
    x[1, 70] = NAN
    with pytest.raises(QuantMLAError, match="1 NaN or Inf of 256"):
        quantize(x, 4, zero=zero, nonfinite="error")
    quantize(x[:1], 4, zero=zero, nonfinite="error")
    values = dequantize(quantize(x, 4, zero=zero, nonfinite="nan"), zero=zero)
    assert values[1, 64:].isnan().all()
    assert values[0].isfinite().all()
    assert values[1, :64].isfinite().all()


@pytest.mark.parametrize("zero", MODES)
def test_a_token_does_not_depend_on_its_batch_mates(zero):
    x = sample(576, tokens=12).reshape(3, 4, 576)
    x[1, 2, 7] = NAN  # a bad neighbour changes nobody else
    whole = quantize(x, 4, zero=zero)
    for b in range(3):
        for t in range(4):
            alone = quantize(x[b, t], 4, zero=zero)
            assert torch.equal(whole.codes[b, t], alone.codes)
            assert torch.equal(whole.scale[b, t], alone.scale)
            assert torch.equal(whole.zero[b, t], alone.zero)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(quantize(strided, 4, zero=zero).codes, whole.codes)


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("zero", MODES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_fake_quantize_has_the_value_of_the_round_trip(bits, zero, clip):
    x = sample(70)
    x[2] = 0.0
    for values in (x, x.clone().requires_grad_()):
        q = quantize(values, bits, zero=zero, clip=clip)
        fake = fake_quantize(values, bits, zero=zero, clip=clip)
        assert fake.dtype == x.dtype
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(fake.to(dtype), dequantize(q, zero=zero, dtype=dtype))
    assert fake_quantize(x.double(), bits, zero=zero).dtype == torch.float64


def test_sixteen_bits_pass_through_and_bad_values_surface():
    x = sample(70)
    assert fake_quantize(x, 16) is x
    for bad in (NAN, INF):
        x[0, 3] = bad
        for zero in MODES:
            assert fake_quantize(x, 4, zero=zero)[0].isnan().any()


def expected_gradients(x, weight, bits, zero, clip):
    """Hand-written straight-through gradients of sum(weight * x_hat) for one group."""
    levels = 2**bits - 1
    codes, scale, low, _ = reference_group(x, bits, zero, clip)
    scale, low = float(scale), float(low)
    n, i_min, i_max = (
        len(x),
        min(range(len(x)), key=x.__getitem__),
        max(range(len(x)), key=x.__getitem__),
    )
    # each quantity carries its derivative with respect to (x_0 .. x_n-1, clip)
    unit = np.eye(n + 1)
    d_min, d_max = unit[i_min], unit[i_max]
    if zero == "zp8":
        d_low = (d_min * clip + unit[n] * x[i_min]) * (x[i_min] < 0)
        d_high = (d_max * clip + unit[n] * x[i_max]) * (x[i_max] > 0)
        true_low = min(x[i_min], 0) * clip
        d_scale = (d_high - d_low) / levels
        d_point = -d_low / scale + true_low / scale**2 * d_scale
    else:
        d_shrink = (d_max - d_min) * (1 - clip) / 2 - unit[n] * (x[i_max] - x[i_min]) / 2
        d_low = d_min + d_shrink
        d_scale = (d_max - d_shrink - d_low) / levels
    total = np.zeros(n + 1)
    for i, (value, code) in enumerate(zip(x, codes, strict=True)):
        if zero == "zp8":
            raw = np.rint(f32(value) / f32(scale)) + low
            if 0 <= raw <= levels:
                d_out = unit[i] + d_scale * (code - low - value / scale)
            else:
                d_out = d_scale * (code - low) - scale * d_point
        else:
            raw = np.rint((f32(value) - f32(low)) / f32(scale))
            if 0 <= raw <= levels:
                d_out = unit[i] + d_scale * (code - (value - low) / scale)
            else:
                d_out = d_low + d_scale * code
        total += weight[i] * d_out
    return total[:n], total[n]


@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
@pytest.mark.parametrize("clip", [1.0, 0.6])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("zero", MODES)
def test_straight_through_gradients(zero, bits, clip, shift):
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(16, generator=g) + shift).requires_grad_()
    weight = torch.randn(16, generator=g)
    ratio = torch.tensor([clip], requires_grad=True)
    (fake_quantize(x, bits, zero=zero, clip=ratio) * weight).sum().backward()
    d_x, d_clip = expected_gradients(x.tolist(), weight.tolist(), bits, zero, clip)
    assert np.allclose(x.grad.numpy(), d_x, atol=2e-4)
    assert np.allclose(ratio.grad.item(), d_clip, rtol=1e-3, atol=2e-4)


def test_a_clipped_element_gives_its_gradient_to_the_range():
    x = torch.tensor([0.0, 10.0, 4.0, 1.0], requires_grad=True)
    clip = torch.tensor(0.5, requires_grad=True)
    fake_quantize(x, 4, clip=clip)[1].backward()  # x_hat = clip * 10
    assert x.grad.tolist() == pytest.approx([0.0, 0.5, 0.0, 0.0], abs=1e-6)
    assert clip.grad.item() == pytest.approx(10.0, rel=1e-6)


def test_clip_per_group_broadcasts_and_learns():
    x = sample(200, tokens=8).reshape(2, 4, 200)  # groups of 64, 64, 64 and 8
    clip = torch.tensor([0.5, 0.7, 0.9, 1.0], requires_grad=True)
    for zero in MODES:
        q = quantize(x, 2, zero=zero, clip=clip)
        for g, ratio in enumerate(clip.tolist()):
            part = slice(64 * g, 64 * (g + 1))
            alone = quantize(x[..., part], 2, zero=zero, clip=ratio)
            assert torch.equal(q.codes[..., part], alone.codes)
            assert torch.equal(q.scale[..., g : g + 1], alone.scale)
        one = quantize(x, 2, zero=zero, clip=torch.tensor(0.5))
        assert torch.equal(one.codes, quantize(x, 2, zero=zero, clip=0.5).codes)
        fake_quantize(x, 2, zero=zero, clip=clip).square().sum().backward()
        assert clip.grad.shape == (4,)
        assert (clip.grad != 0).all()
        clip.grad = None
    per_token = torch.rand(2, 4, 4) * 0.5 + 0.5
    q = quantize(x, 2, clip=per_token)
    assert torch.equal(q.codes[1, 2], quantize(x[1, 2], 2, clip=per_token[1, 2]).codes)


def test_clip_of_one_changes_nothing():
    x = sample(128)
    for zero in MODES:
        plain, clipped = quantize(x, 4, zero=zero), quantize(x, 4, zero=zero, clip=1.0)
        assert torch.equal(plain.codes, clipped.codes)
        assert torch.equal(plain.scale, clipped.scale)
        assert torch.equal(plain.zero, clipped.zero)


# NMSE of a Gaussian group of 64; the clipped column of the study's table is min16.
@pytest.mark.parametrize(
    ("bits", "zero", "clip", "expected"),
    [
        (4, "min16", None, 0.00805),
        (3, "min16", None, 0.03705),
        (2, "min16", None, 0.20274),
        (4, "zp8", None, 0.00830),
        (3, "zp8", None, 0.03820),
        (2, "zp8", None, 0.20925),
        (4, "min16", 0.95, 0.00767),
        (3, "min16", 0.85, 0.03095),
        (2, "min16", 0.65, 0.11495),
        (4, "zp8", 0.95, 0.00797),
        (3, "zp8", 0.85, 0.03237),
        (2, "zp8", 0.65, 0.13065),
    ],
)
def test_error_of_gaussian_groups(bits, zero, clip, expected):
    x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
    q = quantize(x, bits, zero=zero, clip=clip)
    error = dequantize(q, zero=zero, dtype=torch.float32) - x
    assert float(error.square().sum() / x.square().sum()) == pytest.approx(expected, rel=0.02)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=24),
    bits=st.sampled_from(WIDTHS),
    zero=st.sampled_from(MODES),
)
def test_error_stays_within_a_step(values, bits, zero):
    x = torch.tensor(values)
    q = quantize(x, bits, group=8, zero=zero)
    assert int(q.codes.max()) < 2**bits
    step = q.scale.float().repeat_interleave(8)[: len(values)]
    error = (dequantize(q, group=8, zero=zero, dtype=torch.float32) - x).abs()
    # half a step and the rounding of scale, minimum and zero point
    slack = 0.5 if zero == "min16" else 1.0
    assert (error <= step * slack + x.abs().max() * 2**-7 + 2.0**-126).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize(x, 5), "no codes of this width"),
        (lambda x: quantize(x, 16), "no codes of this width"),
        (lambda x: quantize(x, 4, zero="zp4"), "unknown zero mode"),
        (lambda x: quantize(x, 4, clip=0.0), "clip ratio out of range"),
        (lambda x: quantize(x, 4, clip=1.5), "clip ratio out of range"),
        (lambda x: quantize(x, 4, clip=torch.ones(3)), "clip does not fit the groups"),
        (lambda x: quantize(x.int(), 4), "cannot quantise this tensor"),
        (lambda x: quantize(x[:, :0], 4), "cannot quantise this tensor"),
        (lambda x: fake_quantize(x, 7), "no codes of this width"),
        (lambda x: dequantize(quantize(x, 4), group=32), "wrong number of groups"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(SchemeError, match=message):
        call(torch.ones(2, 128))
