"""95 % intervals of ratio estimators, by drawing the windows of the text again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from quantmla.analyze.directions import seeded

if TYPE_CHECKING:
    from torch import Tensor

LEAST_WINDOWS = 6
LEAST_DISTINCT = 3  # windows of a draw: a spread of two says nothing
RESAMPLES = 2000
TAILS = (0.975, 0.025)

Statistic = Callable[["Tensor"], "Tensor"]  # counts of each window [draws, n] -> values [draws]


def window_interval(statistic: Statistic, windows: int, seed: int) -> list[float] | None:
    """Return the 95 % interval of a positive statistic over windows of a text.

    Whole windows are drawn with replacement, and the statistic, sums of numerators and denominators
    included, is computed anew: a ratio estimator keeps its bias and the correlation of its parts.
    Plain percentiles of few windows are too narrow, so each draw is measured in its own standard
    error, which is that of the delete-one jackknife, on a logarithmic scale.

    Args:
        statistic: vectorised over draws.
        windows: n.
        seed: of the draws.

    Returns:
        [low, high], or None for fewer than LEAST_WINDOWS windows.

    Source: studentised bootstrap (Efron and Tibshirani 1993, section 12.5).
    """
    if windows < LEAST_WINDOWS:
        return None
    draws = torch.randint(0, windows, (RESAMPLES, windows), generator=seeded("windows", seed))
    counts = torch.zeros(RESAMPLES, windows, dtype=torch.float64)
    counts.scatter_add_(1, draws, torch.ones_like(counts))
    counts = counts[(counts > 0).sum(1) >= LEAST_DISTINCT]
    value, error = _log_and_error(statistic, torch.ones(1, windows, dtype=torch.float64))
    drawn, drawn_error = _log_and_error(statistic, counts)
    distance = (drawn - value) / drawn_error.clamp_min(1e-300)
    tails = torch.quantile(distance, torch.tensor(TAILS, dtype=torch.float64))
    return (value - tails * error).exp().tolist()


def _log_and_error(statistic: Statistic, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of a statistic and its jackknife standard error, both [draws]."""
    windows = counts.shape[1]
    without = []  # one copy of each window
    for window in range(windows):
        fewer = counts.clone()
        fewer[:, window] = (fewer[:, window] - 1).clamp_min(0)
        without.append(statistic(fewer).log())
    left_out = torch.stack(without, 1)  # [draws, n], of no weight where there was no copy
    mean = (counts * left_out).sum(1, keepdim=True) / windows
    spread = (counts * (left_out - mean).square()).sum(1)
    return statistic(counts).log(), (spread * (windows - 1) / windows).sqrt()
