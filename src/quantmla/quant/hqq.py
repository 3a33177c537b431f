"""Half-quadratic quantisation: the zero of each group minimises a sparse norm of its error."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantmla.quant.affine import SCALE_MIN, group_count
from quantmla.quant.codec import SCALE_BYTES, Dynamic, checked
from quantmla.quant.pack import packed_bytes

STEPS = 20
NORM = 0.7  # p: errors are taken as sparse
BETA = 10.0
KAPPA = 1.01  # growth of beta a step


@dataclass(frozen=True, eq=False)
class HalfQuadratic(Dynamic):
    """Grouped codes with a float zero, found by half-quadratic steps from the min/max start.

    The published loop stops when the mean error of the whole tensor grows; here each group keeps
    its own best step, measured with the stored (BF16) scale and zero, so that codes do not depend
    on other tokens.

    Args:
        bits: code width.
        group [channels]: neighbouring channels with one scale and zero.
    Source: HQQ (mobiusml/hqq), proximal solver.
    """

    bits: int
    group: int = 64
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"hqq{self.bits}")

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return what rows [.., tokens, channels] come back as."""
        rows = checked(rows, self.name)
        parts = rows.split(self.group, dim=-1)
        return torch.cat([self._group(part) for part in parts], dim=-1)

    def logical_bytes(self, channels: int) -> float:
        """Return codes, and a BF16 scale and zero for every group."""
        return float(
            packed_bytes(channels, self.bits) + group_count(channels, self.group) * 2 * SCALE_BYTES
        )

    def _group(self, x: Tensor) -> Tensor:
        levels = 2**self.bits - 1
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = ((high - low) / levels).clamp(min=SCALE_MIN)
        scale = torch.where(high == low, torch.ones_like(scale), scale).bfloat16().float()
        zero = (-low / scale).bfloat16().float()
        best, smallest, beta = None, None, BETA
        for _ in range(STEPS + 1):
            codes = (x / scale + zero).round().clamp(0, levels)
            back = (codes - zero) * scale
            error = sparse_error(x - back)
            if best is None:
                best, smallest = back, error
            else:
                better = error < smallest
                best = torch.where(better, back, best)
                smallest = torch.where(better, error, smallest)
            sparse = _shrink(x - back, beta)
            zero = (codes - (x - sparse) / scale).mean(-1, keepdim=True).bfloat16().float()
            beta *= KAPPA
        return best


def sparse_error(error: Tensor) -> Tensor:
    """Return the norm that the steps minimise, sum |e|^p over a group, [.., 1]."""
    return error.abs().pow(NORM).sum(-1, keepdim=True)


def _shrink(x: Tensor, beta: float) -> Tensor:
    """The generalised soft threshold of the p-norm."""
    size = x.abs()
    return x.sign() * (size - size.pow(NORM - 1) / beta).clamp(min=0)
