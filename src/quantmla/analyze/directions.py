"""In which direction a path is disturbed, and how far: all paths to the same cache NMSE."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantmla.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Direction:
    """A disturbance of one cached path over all windows of a layer.

    Args:
        error [n, T, channels, float32]: the direction, not scaled.
        cache_energy [n, float64]: squared norm of the cached rows of each window.
        error_energy [n, float64]: squared norm of the direction in each window.
    """

    error: Tensor
    cache_energy: Tensor
    error_energy: Tensor

    @classmethod
    def of(cls, rows: list[Tensor], errors: list[Tensor], where: str) -> Direction:
        """Measure a direction on every window.

        Args:
            rows: cached rows [T, channels, float32] of each window.
            errors: their disturbance.
            where: layer and path, for the message.

        Returns:
            Direction.

        Raises:
            CalibrationError: there is nothing to scale, or it is not finite.
        """
        cache_energy, error_energy = (
            torch.stack([one.double().square().sum() for one in part]) for part in (rows, errors)
        )
        for what, energy in (("cached rows", cache_energy), ("their error", error_energy)):
            total = float(energy.sum())
            if not (math.isfinite(total) and total > 0):
                raise CalibrationError(
                    "a path cannot be disturbed to a given NMSE",
                    where=where,
                    expected="cached rows and an error that are finite and not zero",
                    got=f"{what} have the squared norm {total:g}",
                    next_step="leave the layer out with --layers, or use fewer bits",
                )
        return cls(torch.stack(errors), cache_energy, error_energy)

    def factor(self, nmse: float) -> float:
        """Return alpha: alpha * error has this NMSE over all windows together.

        Source: algorithms.md section 4.1.
        """
        return math.sqrt(nmse * float(self.cache_energy.sum() / self.error_energy.sum()))

    @property
    def nmse(self) -> float:
        """NMSE of the direction as it is, over all windows."""
        return float(self.error_energy.sum() / self.cache_energy.sum())


def seeded(*parts: object) -> torch.Generator:
    """Return a CPU generator that is a function of these words and numbers alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return Rademacher numbers: -1.0 or 1.0 with equal chance, float32."""
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float32) * 2 - 1
