"""The section of one sensitivity analysis: figures of the model, and plots over its layers."""

from __future__ import annotations

from typing import Any

from quantmla.report.plots import lines, stacks

FIGURES = {
    "content": "content, mean of layers",
    "rope": "RoPE key, mean of layers",
    "ratio_of_means": "RoPE / content, ratio of means",
    "mean_of_ratios": "RoPE / content, mean of ratios",
    "ratio_of_mean_roots": "RoPE / content, ratio of mean square roots",
}
PATHS = {"content": "content", "rope": "RoPE key"}
TERMS = ("matching", "aggregation", "interaction")
BOUNDS = ("plain", "centred", "weighted", "weighted_centred")


def sensitivity_section(analysis: dict[str, Any]) -> dict[str, Any]:
    """Bring one analysis into the form of the page.

    Args: analysis ["sensitivity" of a result of `quantmla analyze`].
    Returns: settings, figures and plots for the template.
    Source: own.
    """
    settings, model, layers = (analysis[part] for part in ("settings", "model", "layers"))
    numbers = [layer["layer"] for layer in layers]
    return {
        **settings,
        "rope_share_percent": 100 * model["rope_share_of_scores"],
        "sound": model["decomposition_closes"] and model["bound_holds"],
        "figures": [{"name": FIGURES[key], **model["response"][key]} for key in FIGURES],
        "plots": [
            _response_plot(layers, numbers, settings["nmse"]),
            _shares_plot(layers, numbers),
            *(_amplification_plot(layers, numbers, path) for path in PATHS),
            _bound_plot(layers, numbers),
        ],
    }


def _response_plot(layers: list[dict], numbers: list[int], nmse: float) -> str:
    series = {
        f"{path}{suffix}": [layer[path][name] for layer in layers]
        for suffix, name in (("", "response"), ("_random", "random_response"))
        for path in PATHS
    }
    title = f"Response to a cache NMSE of {nmse:g}"
    return lines(title, "squared output change, relative", series, numbers)


def _shares_plot(layers: list[dict], numbers: list[int]) -> str:
    shares = [layer["content_shares"] for layer in layers]
    parts = {term: [one[term] for one in shares] for term in TERMS}
    crossed = [sum(value for name, value in one.items() if name not in TERMS) for one in shares]
    return stacks("Content error by its way", "share", parts | {"crossed": crossed}, numbers)


def _amplification_plot(layers: list[dict], numbers: list[int], path: str) -> str:
    parts, line = (
        {name: [layer[path][name] for layer in layers] for name in names}
        for names in (("ta", "o"), ("t",))
    )
    title = f"G = T A + O, {PATHS[path]}"
    return stacks(title, "output NMSE / cache NMSE, first order", parts, numbers, line)


def _bound_plot(layers: list[dict], numbers: list[int]) -> str:
    series = {form: [layer["bound"][form]["ratio"] for layer in layers] for form in BOUNDS}
    return lines("Proposition 2, left over right side", "ratio, at most 1", series, numbers)
