"""95 % intervals of ratio estimators, by drawing the windows of the text again."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from quantmla.analyze.directions import seeded

if TYPE_CHECKING:
    from torch import Tensor

LEAST_WINDOWS = 6  # the range of fewer than 6 windows misses the median in over 3 % of cases
RESAMPLES = 4000
TAIL = 0.025


def window_interval(
    statistic: Callable[[Tensor], Tensor], windows: int, seed: int
) -> list[float] | None:
    """Return the 95 % interval of a statistic over windows of a text.

    Whole windows are drawn with replacement, and the statistic, sums of numerators and denominators
    included, is computed anew for each draw: a ratio estimator keeps its bias and the correlation
    of its parts. Percentiles of few windows are too narrow; their tail probability is widened to
    that of Student's t with the spread corrected for n - 1.

    Args:
        statistic: [draws, windows] counts of each window -> [draws] values.
        windows: how many there are.
        seed: of the draws.

    Returns:
        [low, high], or None for fewer than LEAST_WINDOWS windows.

    Source: percentile bootstrap, expanded as in Hesterberg (2015), The American Statistician 69.
    """
    if windows < LEAST_WINDOWS:
        return None
    draws = torch.randint(0, windows, (RESAMPLES, windows), generator=seeded("windows", seed))
    counts = torch.zeros(RESAMPLES, windows, dtype=torch.float64)
    counts.scatter_add_(1, draws, torch.ones_like(counts))
    values = statistic(counts)
    tail = expanded_tail(windows)
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype))
    return [float(low), float(high)]


def expanded_tail(windows: int) -> float:
    """Return the tail probability to read percentiles at, for 2.5 % on each side."""
    width = math.sqrt(windows / (windows - 1)) * student_quantile(windows - 1)
    return NormalDist().cdf(-width)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for whole degrees of freedom, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 1 - 2 * TAIL else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """Return P(|T| < t): the finite series of Student's t for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
