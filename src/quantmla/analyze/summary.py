"""Numbers of a whole model, with intervals over the windows of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from quantmla.analyze.intervals import window_interval
from quantmla.analyze.result import FINITE_BOUNDS, FIRST_ORDER_BOUNDS, PATHS
from quantmla.errors import GateError

if TYPE_CHECKING:
    from torch import Tensor

# Of the responses of all layers, [draws, L] content and RoPE.
FIGURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "content": lambda content, rope: content.mean(-1),
    "rope": lambda content, rope: rope.mean(-1),
    "ratio_of_means": lambda content, rope: rope.mean(-1) / content.mean(-1),
    "mean_of_ratios": lambda content, rope: (rope / content).mean(-1),
    "ratio_of_mean_roots": lambda content, rope: rope.sqrt().mean(-1) / content.sqrt().mean(-1),
}
MEANS = ("random_response", "g", "t", "a", "ta", "o")
CLOSES_TO = 1e-6
HOLDS_TO = 1 + 1e-9  # rounding of both sides included


def model_summary(layers: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Average the layers, and say whether identities and bounds held.

    Args:
        layers: of `layer_result`.
        seed: of the intervals.

    Returns:
        JSON data. Each figure of `response` is {"value", "ci95"}, ci95 None for too few windows.
        Layers are not drawn again: a model has no others, so intervals speak of the text alone.

    Source: algorithms.md sections 4.1 and 11 (A8); intervals own.
    """
    windows = len(layers[0]["windows"]["output"])
    sums = _sums(layers)
    response = {}
    for name, figure in FIGURES.items():

        def statistic(counts: Tensor, figure=figure) -> Tensor:
            return figure(*(_responses(sums, path, counts) for path in PATHS))

        value = float(statistic(torch.ones(1, windows, dtype=torch.float64)))
        response[name] = {"value": value, "ci95": window_interval(statistic, windows, seed)}
    means = {path: {name: _mean(layers, path, name) for name in MEANS} for path in PATHS}
    largest = {
        name: max(layer["bound"][name]["largest"] for layer in layers)
        for name in FINITE_BOUNDS + FIRST_ORDER_BOUNDS
    }
    gap = max(abs(layer["content_shares_sum"] - 1) for layer in layers)
    return {
        "response": response,
        **means,
        "content_shares": {
            name: _mean(layers, "content_shares", name) for name in layers[0]["content_shares"]
        },
        "content_shares_gap": gap,
        "decomposition_closes": gap <= CLOSES_TO,
        "bound_largest": largest,
        "bound_holds": all(value <= HOLDS_TO for value in largest.values()),
        "rope_share_of_scores": sum(layer["rope_share_of_scores"] for layer in layers)
        / len(layers),
    }


def _sums(layers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return output [L, n], and moved, cache and error [L, n] by path."""
    kept = [layer["windows"] for layer in layers]
    sums = {"output": torch.tensor([one["output"] for one in kept], dtype=torch.float64)}
    for path in PATHS:
        for name in ("moved", "cache", "error"):
            rows = [one[path][name] for one in kept]
            sums[f"{path}_{name}"] = torch.tensor(rows, dtype=torch.float64)
    return sums


def _responses(sums: dict[str, Tensor], path: str, counts: Tensor) -> Tensor:
    """Return the response of each layer [draws, L] if windows counted as often as `counts` says.

    With other windows alpha is another one as well; a response grows with its square, to first
    order, which is exact where every window counts once.
    """
    moved, cache, error = (sums[f"{path}_{name}"] for name in ("moved", "cache", "error"))
    alpha_squared = (counts @ cache.T) / (counts @ error.T)
    measured_at = cache.sum(1) / error.sum(1)
    return (counts @ moved.T) / (counts @ sums["output"].T) * alpha_squared / measured_at


def _mean(layers: list[dict[str, Any]], part: str, name: str) -> float:
    return sum(layer[part][name] for layer in layers) / len(layers)


def require_sound(summary: dict[str, Any]) -> None:
    """Refuse an analysis whose exact statements failed on its own numbers.

    Args: summary [of model_summary].
    Raises: GateError, with the worst number.
    Source: own.
    """
    if not summary["decomposition_closes"]:
        raise GateError(
            "the parts of the content error do not add up to it",
            where="content_shares",
            expected=f"a sum within {CLOSES_TO:g} of 1 in every layer",
            got=f"a gap of {summary['content_shares_gap']:.3g}",
            next_step="report it with the result file",
        )
    if not summary["bound_holds"]:
        worst = max(summary["bound_largest"], key=summary["bound_largest"].get)
        raise GateError(
            "an error of the output is larger than its bound",
            where=f"bound, {worst}",
            expected="at most 1 in every window of every layer",
            got=f"{summary['bound_largest'][worst]:.6g}",
            next_step="report it with the result file",
        )
