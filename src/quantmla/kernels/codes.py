"""Numbers to codes and back inside Triton kernels: quantiser, packing, unpacking.

The arithmetic is that of docs/layout.md, section 3, bit for bit; a kernel that quantises must be
launched with enable_fp_fusion=False, since a fused multiply-add could change a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantmla.kernels.common import INTERPRET, bf16_bits, bf16_numbers
from quantmla.quant.affine import MAGNITUDE_MAX, SCALE_MIN

_SCALE_MIN = tl.constexpr(SCALE_MIN)
_MAGNITUDE_MAX = tl.constexpr(MAGNITUDE_MAX)
_INF = tl.constexpr(float("inf"))
# Adding 1.5 * 2**23 rounds to an integer, half to even, and leaves it in the low mantissa bits.
_TO_INTEGER = tl.constexpr(12582912.0)
INTEGER_BITS = tl.constexpr(0x4B400000)
_TWO_23, _TWO_23_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
# Adding 1.5 * 2**12 rounds to multiples of 2**-11.
_TO_GRID = tl.constexpr(6144.0)
_FROM_GRID = tl.constexpr(12582912.0 - 6144.0)  # and this then rounds the product to an integer


@triton.jit
def saturate(x):
    """Make groups [T, G, n] finite, with magnitudes up to 2**126."""
    x = replace(x, tl.max(finite(x), 2)[:, :, None])
    return tl.minimum(tl.maximum(x, -_MAGNITUDE_MAX), _MAGNITUDE_MAX)


@triton.jit
def replace(x, bound):
    """Make x finite: NaN becomes 0 and an infinity the bound with its own sign."""
    sign = (x.to(tl.int32, bitcast=True) >> 31) << 31
    limit = (bound.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < _INF, x, tl.where(x == x, limit, 0.0))


@triton.jit
def finite(x):
    """Magnitudes, 0 in place of NaN and Inf."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < _INF, magnitude, 0.0)


@triton.jit
def quantise(x, clip_ptr, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Codes [T, G, n] + INTEGER_BITS, BF16 bits of the scale [T, G] and zero point [T, G]."""
    LEVELS: tl.constexpr = 2.0**BITS - 1
    low, high = tl.minimum(tl.min(x, 2), 0.0), tl.maximum(tl.max(x, 2), 0.0)
    constant = high == low
    if clip_ptr is not None:
        group = tl.arange(0, x.shape[1])
        clip = tl.load(clip_ptr + group, mask=group < GROUPS, other=1.0)[None, :]
        low, high = low * clip, high * clip
    step = tl.maximum(_over(high - low, LEVELS), _SCALE_MIN)
    scale_bits = bf16_bits(tl.where(constant, 1.0, step))
    scale = bf16_numbers(scale_bits)
    # Division by s without dividing each element: x and s have 8 significant bits each, so x / s
    # is a half-integer or at least 1/1020 away from all of them. x * (1 / s) is off by less than
    # 2**-13 wherever the code is not clamped; the grid of 2**-11 then restores half-integers and
    # moves nothing else across one.
    inverse = 1.0 / scale
    if clip_ptr is None:
        zero = snap(-low, inverse) + _FROM_GRID
    else:
        # a clipped minimum has more than 8 significant bits
        zero = tl.div_rn(-low, scale) + _TO_INTEGER
    zero = tl.minimum(tl.maximum(zero, _TO_INTEGER), _TO_INTEGER + LEVELS)
    code = snap(x, inverse[:, :, None]) + _FROM_GRID + (zero - _TO_INTEGER)[:, :, None]
    code = tl.minimum(tl.maximum(code, _TO_INTEGER), _TO_INTEGER + LEVELS)
    zero = zero.to(tl.int32, bitcast=True) - INTEGER_BITS
    return code.to(tl.int32, bitcast=True), scale_bits, zero


@triton.jit
def _over(x, LEVELS: tl.constexpr):
    """x / LEVELS, correctly rounded wherever that is a normal number: one step of refinement with
    an exact remainder, since the division of the GPU branches."""
    if INTERPRET:  # its fma rounds twice
        return tl.div_rn(x, LEVELS)
    else:
        inverse = tl.full(x.shape, 1.0 / LEVELS, tl.float32)
        quotient = x * inverse
        rest = tl.fma(quotient, tl.full(x.shape, -LEVELS, tl.float32), x)
        return tl.fma(rest, inverse, quotient)


@triton.jit
def snap(x, inverse):
    """x * inverse + 1.5 * 2**12, on a grid of 2**-11, for products up to 2**11."""
    return tl.fma(x, inverse, tl.full(x.shape, _TO_GRID, tl.float32))


@triton.jit
def feed_back(
    x, codes, scale_bits, zero, order_ptr, matrix_ptr, CHANNELS: tl.constexpr, BITS: tl.constexpr
):
    """Choose the codes [T, G, n] + INTEGER_BITS again, with error feedback (docs/layout.md).

    Args:
        x [T, G, n, fp32]: finite numbers.
        codes, scale_bits, zero: of `quantise`; the scale and zero point stay.
        order_ptr [CHANNELS, int32], matrix_ptr [CHANNELS, CHANNELS, fp32]: as in `ops.write`.
    """
    LEVELS: tl.constexpr = 2.0**BITS - 1
    GROUPS: tl.constexpr = x.shape[1]
    GROUP: tl.constexpr = x.shape[2]
    group = tl.arange(0, GROUPS)
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [G, n]
    scale = bf16_numbers(scale_bits)
    low = (zero + INTEGER_BITS).to(tl.float32, bitcast=True) - _TO_INTEGER
    rest = x
    for n in range(CHANNELS):
        coded = tl.load(order_ptr + n)
        share = tl.load(matrix_ptr + n * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        here = (channel == coded)[None, :, :]
        in_group = (group == coded // GROUP)[None, :]
        s = tl.sum(tl.where(in_group, scale, 0.0), 1)  # [T]
        z = tl.sum(tl.where(in_group, low, 0.0), 1)
        target = tl.sum(tl.sum(tl.where(here, rest, 0.0), 2), 1)
        exact = tl.sum(tl.sum(tl.where(here, x, 0.0), 2), 1)
        # codes end at LEVELS; the bound keeps the quotient where it can be rounded
        level = tl.minimum(tl.maximum(tl.div_rn(target, s), -4096.0), 4096.0)
        code = tl.minimum(tl.maximum(level + _TO_INTEGER + z, _TO_INTEGER), _TO_INTEGER + LEVELS)
        error = s * ((code - _TO_INTEGER) - z) - exact
        rest = rest - share[None, :, :] * error[:, None, None]
        codes = tl.where(here, code.to(tl.int32, bitcast=True)[:, None, None], codes)
    return codes


@triton.jit
def pack(codes, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Join COUNT neighbouring codes to one number, the first in the lowest bits."""
    CHANNELS: tl.constexpr = codes.shape[1] * codes.shape[2]
    units = tl.reshape(codes, (codes.shape[0], CHANNELS // COUNT, COUNT))
    return tl.sum(units << (tl.arange(0, COUNT) * BITS)[None, None, :], 2)


@triton.jit
def unpack(word, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Split words [T, W, int32] into codes [T, W * COUNT]; the inverse of `pack`."""
    shift = (tl.arange(0, COUNT) * BITS)[None, None, :]
    codes = (word[:, :, None] >> shift) & (2**BITS - 1)
    return tl.reshape(codes, (word.shape[0], word.shape[1] * COUNT))


@triton.jit
def dequantise(codes, scale, zero):
    """Numbers [T, G, n, fp32] of codes [T, G, n, int32], scales and zero points [T, G]."""
    # 2**23 + code by its bits, since a conversion from integers is slow
    shifted = (codes | _TWO_23_BITS).to(tl.float32, bitcast=True)
    return scale[:, :, None] * (shifted - (zero.to(tl.float32) + _TWO_23)[:, :, None])
