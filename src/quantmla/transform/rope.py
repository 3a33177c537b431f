"""RoPE transform: per-pair rotation and scale, the linear maps that commute with RoPE."""

from __future__ import annotations

import torch

from quantmla.errors import SchemeError
from quantmla.strict import Pairing


def pair_indices(qk_rope_head_dim: int, pairing: Pairing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the channels that RoPE rotates together.

    Args:
        qk_rope_head_dim: P, even.
        pairing: "interleaved" pairs (2p, 2p+1), "half" pairs (p, p + P/2).

    Returns:
        (a [P/2, int64], b [P/2, int64]): first and second channel of each pair.

    Raises:
        SchemeError: P is odd or the pairing is unknown.

    Source: DeepSeek-V2 and RoFormer layouts.
    """
    if qk_rope_head_dim % 2:
        raise SchemeError(
            "RoPE pairs need an even channel count", expected="even", got=qk_rope_head_dim
        )
    channels = torch.arange(qk_rope_head_dim)
    if pairing == "interleaved":
        return channels[0::2], channels[1::2]
    if pairing == "half":
        half = qk_rope_head_dim // 2
        return channels[:half], channels[half:]
    raise SchemeError("unknown RoPE pairing", expected="interleaved or half", got=repr(pairing))


def apply_pairs(
    x: torch.Tensor,
    angle: torch.Tensor | None,
    scale: torch.Tensor | None,
    pairing: Pairing,
    inverse_scale: bool = False,
) -> torch.Tensor:
    """Rotate and scale each RoPE pair: k' = s e^{i phi} k, and q' = s^-1 e^{i phi} q for queries.

    Differentiable in all three tensors. To act on weight rows, pass the transposed weight.

    Args:
        x [.., P]: keys or queries.
        angle [P/2, rad]: phi, None for zero.
        scale [P/2]: s > 0, None for one.
        pairing: channel pairing of `x`.
        inverse_scale: divide by the scale instead (queries).

    Returns:
        [.., P] in the dtype of `x`.

    Source: QuantMLA study, RoPE transform; one scalar a pair is the commutant of SO(2).
    """
    first, second = _split(x, pairing)
    if angle is not None:
        cos, sin = angle.to(x).cos(), angle.to(x).sin()
        first, second = first * cos - second * sin, first * sin + second * cos
    if scale is not None:
        factor = 1 / scale.to(x) if inverse_scale else scale.to(x)
        first, second = first * factor, second * factor
    return _join(first, second, pairing)


def _split(x: torch.Tensor, pairing: Pairing) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = pair_indices(x.shape[-1], pairing)
    return x[..., a.to(x.device)], x[..., b.to(x.device)]


def _join(first: torch.Tensor, second: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    if pairing == "interleaved":
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
