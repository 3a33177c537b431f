"""Per-token asymmetric affine quantisation in groups of channels: numbers to codes and back.

A group is up to `group` neighbouring channels of one token; a short last group is allowed. All
arithmetic is fp32, codes are computed with the stored (rounded) scale and zero, and a code depends
on its own token alone, so bytes never change with batching. docs/layout.md states the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantmla.config import Zero
from quantmla.errors import QuantMLAError, SchemeError
from quantmla.quant.pack import CODE_BITS

SCALE_MIN = 2.0**-126  # smallest normal bf16
MAGNITUDE_MAX = 2.0**126  # larger inputs saturate, so that no range, product or sum overflows fp32

Clip = float | Tensor | None


@dataclass
class Quantized:
    """Codes of a tensor with the metadata that turns them back into numbers.

    Fields:
        codes [..., channels, uint8]: one code per channel, not packed.
        scale [..., G, bf16]: step of each group.
        zero [..., G, uint8 (zp8) or bf16 (min16)]: integer zero point, or the group minimum.
        nonfinite [scalar, int64]: how many inputs were NaN or Inf; None for codes read back.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    nonfinite: Tensor | None = None


def quantize(
    x: Tensor,
    bits: int,
    *,
    group: int = 64,
    zero: Zero = "zp8",
    clip: Clip = None,
    nonfinite: Literal["replace", "error", "nan"] = "replace",
) -> Quantized:
    """Quantise every group of every token.

    Args:
        x [..., channels, floating]: values.
        bits [1, 2, 3, 4 or 8]: code width.
        group [channels]: group size.
        zero: "zp8" (integer zero point, range includes 0) or "min16" (bf16 minimum).
        clip [float, or broadcastable to [..., G]]: ratio that shrinks the range, in (0, 1].
        nonfinite: "replace" (NaN to 0, Inf to the largest finite magnitude of its group, counted),
            "error", or "nan" (the group's scale becomes NaN, so that the token surfaces as NaN).
    Returns: Quantized.
    Raises: SchemeError for bad arguments; QuantMLAError for non-finite input under "error".
    Source: own; quantiser of the QuantMLA study with a stored integer zero point.
    """
    _check(x, bits, group, zero, clip)
    with torch.no_grad():
        parts, bad_total = [], torch.zeros((), dtype=torch.int64, device=x.device)
        for values, ratio in _group_blocks(x.float(), clip, group):
            values, bad, count = _make_finite(values, nonfinite)
            codes, scale, low = _encode(values, ratio, bits, zero)
            if nonfinite == "nan":
                scale = torch.where(bad, torch.nan, scale)
            parts.append((codes.flatten(-2), scale.squeeze(-1), low.squeeze(-1)))
            bad_total = bad_total + count
        codes, scale, low = (
            torch.cat(p, -1) if len(p) > 1 else p[0] for p in zip(*parts, strict=True)
        )
        zero_dtype = torch.uint8 if zero == "zp8" else torch.bfloat16
        return Quantized(
            codes.to(torch.uint8), scale.to(torch.bfloat16), low.to(zero_dtype), bad_total
        )


def dequantize(
    q: Quantized, *, group: int = 64, zero: Zero = "zp8", dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Turn codes back into numbers: scale * (code - zero) for zp8, zero + scale * code for min16.

    Args:
        q: codes [..., channels], scale and zero [..., G].
        group [channels]: group size used to quantise.
        zero: mode used to quantise.
        dtype: result type; the arithmetic is fp32.
    Returns: values [..., channels, dtype].
    Raises: SchemeError if the number of groups does not fit the channels.
    """
    channels, groups = q.codes.shape[-1], q.scale.shape[-1]
    if groups != group_count(channels, group):
        raise SchemeError(
            "scale has the wrong number of groups",
            where="dequantize",
            expected=f"{group_count(channels, group)} for {channels} channels in groups of {group}",
            got=groups,
        )
    scale, low = q.scale.float().unsqueeze(-1), q.zero.float().unsqueeze(-1)
    out = []
    for codes, part in _split_groups(q.codes, group):
        values = _decode(codes.float(), scale[..., part, :], low[..., part, :], zero)
        out.append(values.flatten(-2))
    return (torch.cat(out, -1) if len(out) > 1 else out[0]).to(dtype)


def fake_quantize(
    x: Tensor,
    bits: int,
    *,
    group: int = 64,
    zero: Zero = "zp8",
    clip: Clip = None,
) -> Tensor:
    """Return dequantize(quantize(x)) with straight-through gradients, for |x| up to 2**126.

    Gradients: identity through every rounding and through the integer zero; a clipped element
    passes none of its own; the extreme elements of a group and `clip` receive theirs through the
    range. NaN and Inf are not replaced, so that they surface.

    Args:
        x [..., channels, floating]: values.
        bits: code width; 16 returns x unchanged.
        group, zero, clip: as in quantize.
    Returns: values [..., channels], dtype of x.
    Raises: SchemeError for bad arguments.
    Source: straight-through estimator; own treatment of the zero point.
    """
    if bits == 16:
        return x
    _check(x, bits, group, zero, clip)
    out = []
    for values, ratio in _group_blocks(x.float(), clip, group):
        codes, scale, low = _encode(values, ratio, bits, zero)
        out.append(_decode(codes, scale, low, zero).flatten(-2))
    result = torch.cat(out, -1) if len(out) > 1 else out[0]
    return result.to(x.dtype)


def group_count(channels: int, group: int) -> int:
    """Return the number of groups of `channels` channels, a short last one included."""
    return -(-channels // group)


def usable_clip(clip: Clip, groups: int) -> bool:
    """Tell whether clip ratios are in (0, 1] and fit the groups of a path.

    `quantize` looks at the shape of a tensor only, since its values may live on a GPU: who keeps
    clip ratios asks this once.

    Args:
        clip [float, or tensor of 1 or G ratios]: ratios; None stands for no clipping.
        groups: G.
    Returns: True if `quantize` may be given them.
    Source: own.
    """
    if clip is None:
        return True
    if not isinstance(clip, Tensor):
        number = isinstance(clip, int | float) and not isinstance(clip, bool)
        return number and 0 < clip <= 1
    fits = clip.is_floating_point() and clip.dim() <= 1 and clip.numel() in (1, groups)
    return fits and bool(((clip > 0) & (clip <= 1)).all())


def _check(x: Tensor, bits: int, group: int, zero: str, clip: Clip) -> None:
    if bits not in CODE_BITS:
        raise SchemeError(
            "no codes of this width", where="quantize", expected=f"bits in {CODE_BITS}", got=bits
        )
    if zero not in ("zp8", "min16"):
        raise SchemeError(
            "unknown zero mode", where="quantize", expected="'zp8' or 'min16'", got=repr(zero)
        )
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] == 0 or group < 1:
        raise SchemeError(
            "cannot quantise this tensor",
            where="quantize",
            expected="floating values [..., channels] with channels >= 1 and group >= 1",
            got=f"{x.dtype} {list(x.shape)}, group {group}",
        )
    if isinstance(clip, Tensor):
        groups = group_count(x.shape[-1], group)
        if clip.dim() > 0 and clip.shape[-1] not in (1, groups):
            raise SchemeError(
                "clip does not fit the groups",
                where="quantize",
                expected=f"last dimension 1 or {groups}",
                got=list(clip.shape),
            )
    elif not usable_clip(clip, 1):
        raise SchemeError(
            "clip ratio out of range", where="quantize", expected="0 < clip <= 1", got=clip
        )


def _split_groups(x: Tensor, group: int) -> list[tuple[Tensor, slice]]:
    """Cut [..., channels] into views [..., G, n] of one group size, with the groups they cover."""
    channels = x.shape[-1]
    full = channels // group
    blocks = []
    if full:
        blocks.append((x[..., : full * group].unflatten(-1, (full, group)), slice(0, full)))
    if channels % group:
        blocks.append((x[..., full * group :].unsqueeze(-2), slice(full, full + 1)))
    return blocks


def _group_blocks(x: Tensor, clip: Clip, group: int) -> list[tuple[Tensor, Clip]]:
    """Pair the blocks of x with their clip ratios, [..., G, 1] to broadcast against a group."""
    blocks = []
    for values, part in _split_groups(x, group):
        ratio = clip
        if isinstance(clip, float | int):
            ratio = torch.tensor(clip, dtype=torch.float32)  # so that 1 - clip is fp32 as well
        elif isinstance(clip, Tensor):
            ratio = (clip if clip.dim() else clip.reshape(1)).float().unsqueeze(-1)
            ratio = ratio if ratio.shape[-2] == 1 else ratio[..., part, :]
        blocks.append((values, ratio))
    return blocks


def _make_finite(x: Tensor, nonfinite: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return finite values, which groups had others [..., G, 1, bool], and how many there were."""
    peak = x.abs().amax(-1, keepdim=True)  # NaN and Inf both survive amax
    bad_group = ~peak.isfinite()
    if not bool((~(peak <= MAGNITUDE_MAX)).any()):
        return x, bad_group, torch.zeros((), dtype=torch.int64, device=x.device)
    finite = x.isfinite()
    count = (~finite).sum()
    if nonfinite == "error" and int(count):
        raise QuantMLAError(
            "non-finite values cannot be quantised",
            where="quantize",
            expected="finite values",
            got=f"{int(count)} NaN or Inf of {x.numel()}",
            next_step="find the layer that produced them, or count them with nonfinite='replace'",
        )
    bound = torch.where(finite, x.abs(), 0).amax(-1, keepdim=True).clamp(max=MAGNITUDE_MAX)
    return torch.where(x.isnan(), 0, x).clamp(-bound, bound), bad_group, count


def _encode(x: Tensor, clip: Clip, bits: int, zero: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [..., G, n], scale and zero [..., G, 1] in fp32, with gradients."""
    levels = 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if zero == "zp8":
        low, high = low.clamp(max=0), high.clamp(min=0)
        constant = high == low
        if clip is not None:
            low, high = low * clip, high * clip
        scale = _round_scale(high - low, levels, constant)
        # the bf16 scale may have been rounded down: -low / scale can round to 256
        point = _round_ste(-low / scale).clamp(0, levels)
        return (_round_ste(x / scale) + point).clamp(0, levels), scale, point
    constant = high == low
    if clip is not None:
        shrink = (high - low) * ((1 - clip) * 0.5)
        low, high = low + shrink, high - shrink
    # + 0.0 turns -0 into 0: which of both amin returns depends on the order of channels
    low = _bf16_ste(low) + 0.0
    scale = _round_scale(high - low, levels, constant)
    codes = _round_ste((x - low) / scale).clamp(0, levels)
    return codes.masked_fill(constant, 0), scale, low


def _decode(codes: Tensor, scale: Tensor, low: Tensor, zero: str) -> Tensor:
    return scale * (codes - low) if zero == "zp8" else low + scale * codes


def _round_scale(extent: Tensor, levels: int, constant: Tensor) -> Tensor:
    """Return the step as a bf16 number: 1 for a constant group, never below the smallest normal."""
    # a tensor: on a GPU torch multiplies by the rounded reciprocal of a Python number instead
    levels = torch.full((), levels, dtype=extent.dtype, device=extent.device)
    return _bf16_ste((extent / levels).clamp(min=SCALE_MIN).masked_fill(constant, 1.0))


def _round_ste(x: Tensor) -> Tensor:
    return _straight_through(x, torch.round(x))  # half to even


def _bf16_ste(x: Tensor) -> Tensor:
    return _straight_through(x, x.to(torch.bfloat16).float())


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return the value of rounded with the gradient of x; the sum is exact as both are close."""
    return x + (rounded - x).detach() if x.requires_grad else rounded
