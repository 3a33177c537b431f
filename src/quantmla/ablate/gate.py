"""Second rung only for cells that did not lose on the first: the ladder gate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantmla.ablate.cells import Cell


@dataclass(frozen=True)
class Verdict:
    """Whether a cell is scored by the whole model, and why.

    Args:
        distortion: mean over layers of the relative squared output error.
        promoted: the answer.
        reason: how it stands beside the best cell of its policy that is no larger.
    """

    distortion: float
    promoted: bool
    reason: str


def rule(factor: float) -> str:
    """Return the promotion rule in words.

    Source: own.
    """
    return (
        "A cell is scored by the whole model if it belongs to the square of identity and learned "
        f"transforms of a scheme, or if its layer distortion is at most {factor:g} times the "
        "smallest one among the cells with the same policy that take at most as many bytes a "
        "token. Layer distortion: mean over cache layers of the relative squared error of the "
        "attention output with both paths coded, on held-out calibration windows."
    )


def _or_inf(distortion: float) -> float:
    return math.inf if math.isnan(distortion) else distortion


def judge(
    distortions: dict[Cell, float], bytes_per_token: dict[Cell, float], factor: float
) -> dict[Cell, Verdict]:
    """Apply the promotion rule.

    Args:
        distortions: layer distortion of every cell.
        bytes_per_token: logical bytes of every cell.
        factor: how much worse than the best a cell may be.
    Returns: cell to Verdict.
    Source: algorithms.md section 10.3.
    """
    verdicts = {}
    for cell, distortion in distortions.items():
        rivals = [
            other
            for other in distortions
            if other.policy == cell.policy and bytes_per_token[other] <= bytes_per_token[cell]
        ]
        best = min(rivals, key=lambda other: _or_inf(distortions[other]))
        smallest = distortions[best]
        ratio = 1.0 if distortion == smallest else distortion / smallest if smallest else math.inf
        here = "smallest" if best == cell else f"{ratio:.3g} x {best.name}"
        promoted = cell.core or ratio <= factor  # a NaN is no number that small
        verdicts[cell] = Verdict(distortion, promoted, here)
    return verdicts
