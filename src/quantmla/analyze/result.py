"""From the sums of single windows to the numbers of a layer, as JSON data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quantmla.analyze.decompose import shares
from quantmla.analyze.gauss_newton import Amplification

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.analyze.bound import RopeBound
    from quantmla.analyze.directions import Direction

PATHS = ("content", "rope")
FINITE_BOUNDS = ("plain", "centred")
FIRST_ORDER_BOUNDS = ("weighted", "weighted_centred")


@dataclass(frozen=True)
class LayerDirections:
    """Disturbances of both paths of a layer: what rounding does, and the random control."""

    rounding: dict[str, Direction]
    random: dict[str, Direction]


@dataclass(frozen=True)
class WindowSums:
    """Squared norms of one window; paths by name.

    Args:
        output: of the exact output.
        moved, random_moved: of its change under the scaled rounding error and random direction.
        terms [3, 3]: Gram matrix of the terms of the content change.
        first_order: of the change to first order, J times the scaled rounding error.
        signs [K], signed_error [K]: of J v and J (|e| o v), e not scaled.
        bound: of the RoPE change.
    """

    output: float
    moved: dict[str, float]
    random_moved: dict[str, float]
    terms: Tensor
    first_order: dict[str, float]
    signs: dict[str, Tensor]
    signed_error: dict[str, Tensor]
    bound: RopeBound


def layer_result(
    layer: int, directions: LayerDirections, windows: list[WindowSums], nmse: float
) -> dict[str, Any]:
    """Return the numbers of a layer.

    Args:
        layer: cache layer index.
        directions: of its paths.
        windows: in order.
        nmse: cache NMSE of the scaled directions.

    Returns:
        JSON data. `windows` holds the numerators and denominators that intervals are made from.

    Source: algorithms.md section 4.
    """
    output = sum(window.output for window in windows)
    result: dict[str, Any] = {"layer": layer}
    for path in PATHS:
        result[path] = _path_result(path, directions, windows, output, nmse)
    result["response_ratio"] = result["rope"]["response"] / result["content"]["response"]
    terms = torch.stack([window.terms for window in windows]).sum(0)
    moved = sum(window.moved["content"] for window in windows)
    result["content_shares"] = shares(terms, moved)
    result["content_shares_sum"] = sum(result["content_shares"].values())
    result["bound"] = _bound_result(windows)
    rope, content = (
        sum(getattr(window.bound, name) for window in windows)
        for name in ("rope_scores", "content_scores")
    )
    result["rope_share_of_scores"] = rope / (rope + content)
    result["windows"] = {"output": [window.output for window in windows]} | {
        path: {
            "moved": [window.moved[path] for window in windows],
            "cache": directions.rounding[path].cache_energy.tolist(),
            "error": directions.rounding[path].error_energy.tolist(),
        }
        for path in PATHS
    }
    return result


def _path_result(
    path: str, directions: LayerDirections, windows: list[WindowSums], output: float, nmse: float
) -> dict[str, float]:
    direction = directions.rounding[path]
    alpha = direction.factor(nmse)
    first_order = sum(window.first_order[path] for window in windows)
    amplification = Amplification(
        cache_energy=float(direction.cache_energy.sum()),
        output_energy=output,
        error_energy=float(direction.error_energy.sum()),
        coordinates=direction.error.numel(),
        along_error=first_order / alpha**2,
        signs=torch.stack([window.signs[path] for window in windows]),
        signed_error=torch.stack([window.signed_error[path] for window in windows]),
    )
    return {
        "rounding_nmse": direction.nmse,
        "alpha": alpha,
        "response": sum(window.moved[path] for window in windows) / output,
        "random_response": sum(window.random_moved[path] for window in windows) / output,
    } | amplification.numbers()


def _bound_result(windows: list[WindowSums]) -> dict[str, dict[str, float]]:
    """Return left over right side of each form: over all windows, and the largest of a window."""
    ratios = {}
    for name in FINITE_BOUNDS + FIRST_ORDER_BOUNDS:
        finite = name in FINITE_BOUNDS
        left = [
            window.moved["rope"] if finite else window.first_order["rope"] for window in windows
        ]
        right = [getattr(window.bound, name) for window in windows]
        ratios[name] = {
            "ratio": sum(left) / sum(right),
            "largest": max(a / b for a, b in zip(left, right, strict=True)),
        }
    return ratios
