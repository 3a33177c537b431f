"""Fixed Lloyd-Max codebooks for rows that a random rotation has made nearly Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from quantmla.errors import SchemeError
from quantmla.quant.affine import SCALE_MIN
from quantmla.quant.codec import (
    SCALE_BYTES,
    Codec,
    Dynamic,
    Static,
    checked,
    fitted_number,
    positive_number,
)
from quantmla.quant.pack import packed_bytes

LLOYD_STEPS = 20_000
LLOYD_TOLERANCE = 1e-12
NORM_SPREAD = 0.05  # standard deviation of token norms, relative, that counts as constant


@lru_cache(maxsize=8)
def lloyd_max(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels of smallest mean squared error for a standard normal number.

    Args: bits: 1 to 8.
    Returns: ascending levels, symmetric about 0.
    Source: Lloyd's and Max's conditions, iterated on the positive half.
    """
    half = 2**bits // 2
    levels = [3 * (i + 0.5) / half for i in range(half)]
    for _ in range(LLOYD_STEPS):
        inner = [(a + b) / 2 for a, b in pairwise(levels)]
        borders = [0.0, *inner, math.inf]
        new = [_mean_between(a, b) for a, b in pairwise(borders)]
        moved = max(abs(a - b) for a, b in zip(levels, new, strict=True))
        levels = new
        if moved < LLOYD_TOLERANCE:
            break
    return (*(-level for level in reversed(levels)), *levels)


def _mean_between(low: float, high: float) -> float:
    """Mean of a standard normal number given that it lies between two numbers."""

    def density(x: float) -> float:
        return 0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def above(x: float) -> float:
        return 0.0 if math.isinf(x) else math.erfc(x / math.sqrt(2)) / 2

    return (density(low) - density(high)) / (above(low) - above(high))


def nearest_level(x: Tensor, bits: int) -> Tensor:
    """Return the nearest level of `lloyd_max` for every number; x [.., float32]."""
    levels = torch.tensor(lloyd_max(bits), dtype=x.dtype, device=x.device)
    borders = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(x, borders)]


@dataclass(frozen=True, eq=False)
class Codebook(Dynamic):
    """Levels of a standard normal number, scaled by each token's own root mean square (BF16).

    Args:
        bits: code width.
    Source: TurboQuant, mean-squared-error form; a rotation is up to the method.
    """

    bits: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"codebook{self.bits}")

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return rms * level(row / rms)."""
        rows = checked(rows, self.name)
        rms = rows.square().mean(-1, keepdim=True).sqrt().bfloat16().float().clamp(min=SCALE_MIN)
        return nearest_level(rows / rms, self.bits) * torch.where(rms <= SCALE_MIN, 0.0, rms)

    def logical_bytes(self, channels: int) -> float:
        """Return codes and one BF16 number."""
        return float(packed_bytes(channels, self.bits) + SCALE_BYTES)


@dataclass(frozen=True, eq=False)
class ConstantNorm(Static):
    """Levels of a standard normal number, scaled by one static number: codes without metadata.

    A latent behind its norm has the same length for every token as long as only a rotation is
    between: no norm weight and no scales.

    Args:
        bits: code width.
        scale: root mean square of the calibration rows. None before `fitted`.
    Source: algorithms.md section 3.3, E6.
    """

    bits: int = field(kw_only=True)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"constant-norm{self.bits}")

    def fitted(self, rows: Tensor) -> Codec:
        """Return the codec with the scale of these rows.

        Raises: SchemeError if their norms differ by more than 5 % (standard deviation / mean).
        """
        norms = checked(rows, self.name).square().mean(-1).sqrt()
        scale = positive_number(float(norms.square().mean().sqrt()), self.name)
        spread = float(norms.std(correction=0) / norms.mean())
        if spread > NORM_SPREAD:
            raise SchemeError(
                "rows of different norms cannot share one scale",
                where=f"codec {self.name}",
                expected=f"norms of one size: standard deviation / mean at most {NORM_SPREAD}",
                got=f"{spread:.3f}",
                next_step="take a method without channel scales, as quarot_online, or a codebook "
                "with norms",
            )
        return replace(self, scale=scale)

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return scale * level(rows / scale)."""
        scale = fitted_number(self.scale, self.name)
        return nearest_level(checked(rows, self.name) / scale, self.bits) * scale

    def logical_bytes(self, channels: int) -> float:
        """Return the codes alone."""
        return float(packed_bytes(channels, self.bits))
