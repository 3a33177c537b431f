"""Inline SVG plots that follow the page's light or dark colours and need no network."""

from __future__ import annotations

import io
import re

INK = "#010203"  # replaced by currentColor, so that text and axes follow the page
COLORS = {
    "rtn": "#d1495b",
    "smoothquant": "#edae49",
    "quarot_offline": "#8d96a3",
    "quarot_online": "#3c91e6",
    "smoothquant_tuned": "#c9831a",
    "quarot_angles": "#5c6f91",
    "flatquant": "#6a4c93",
    "mixed": "#b56576",
    "quantmla": "#2a9d8f",
    "quantmla_plus": "#1b4965",
    "bf16": "#9b72cf",
    "content": "#3c91e6",
    "content_random": "#a9cdf3",
    "rope": "#d1495b",
    "rope_random": "#eab0b8",
    "matching": "#d1495b",
    "aggregation": "#3c91e6",
    "interaction": "#2a9d8f",
    "crossed": "#8d96a3",
    "ta": "#3c91e6",
    "o": "#edae49",
    "t": "#d1495b",
    "plain": "#a9cdf3",
    "centred": "#3c91e6",
    "weighted": "#eab0b8",
    "weighted_centred": "#d1495b",
}
OTHER_COLORS = ("#c77dff", "#ff7f50", "#7cb518", "#00b4d8")
NAMES = {
    "bf16": "BF16",
    "rtn": "RTN",
    "smoothquant": "SmoothQuant",
    "quarot_offline": "QuaRot offline",
    "quarot_online": "QuaRot online",
    "smoothquant_tuned": "SmoothQuant tuned",
    "quarot_angles": "QuaRot, random angles",
    "flatquant": "FlatQuant ceiling",
    "mixed": "two methods",
    "quantmla": "QuantMLA",
    "quantmla_plus": "QuantMLA+",
    "rope": "RoPE",
    "content_random": "content, random direction",
    "rope_random": "RoPE, random direction",
    "crossed": "cross terms",
    "ta": "T A",
    "o": "O",
    "t": "T",
    "plain": "any size",
    "centred": "any size, centred values",
    "weighted": "first order, attention-weighted",
    "weighted_centred": "first order, centred values",
}


def method_name(method: str) -> str:
    """Return how a method, or another series, is written in tables and legends.

    Args: method [label of a row or series].
    Source: own.
    """
    return NAMES.get(method, method)


def bars(title: str, unit: str, values: dict[str, dict[str, float]], *, log: bool = False) -> str:
    """Draw grouped bars.

    Args:
        title, unit: of the plot and of its y axis.
        values: group on the x axis to {method: value}.
        log: logarithmic y axis.
    Returns: an <svg> element.
    Source: own.
    """
    figure, axes = _figure(title, unit, width=6.4)
    methods = list(dict.fromkeys(m for group in values.values() for m in group))
    step = 0.8 / max(1, len(methods))
    for index, method in enumerate(methods):
        x = [g + step * (index - (len(methods) - 1) / 2) for g in range(len(values))]
        heights = [group.get(method, 0.0) for group in values.values()]
        drawn = axes.bar(x, heights, step * 0.92, label=method_name(method), color=_color(method))
        axes.bar_label(drawn, [_short(h) for h in heights], fontsize=7, color=INK, padding=1)
    axes.set_xticks(range(len(values)), list(values))
    if log:
        axes.set_yscale("log")
    axes.margins(y=0.12)
    return _svg(figure, axes)


def lines(
    title: str,
    unit: str,
    values: dict[str, list[float | None]],
    layers: list[int] | None = None,
) -> str:
    """Draw one line a method over the cache layers, on a logarithmic y axis.

    Args:
        title, unit: of the plot and of its y axis.
        values: method to one value a layer, None where unknown.
        layers: cache layers of these values; all from 0 by default.
    Returns: an <svg> element.
    Source: own.
    """
    figure, axes = _figure(title, unit, width=6.4)
    for method, series in values.items():
        places = range(len(series)) if layers is None else layers
        points = [(i, v) for i, v in zip(places, series, strict=True) if v is not None and v > 0]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(
                x, y, marker="o", ms=3, lw=1.4, label=method_name(method), color=_color(method)
            )
    axes.set_yscale("log")
    axes.set_xlabel("cache layer", color=INK)
    return _svg(figure, axes)


def stacks(
    title: str,
    unit: str,
    values: dict[str, list[float]],
    layers: list[int],
    line: dict[str, list[float]] | None = None,
) -> str:
    """Draw signed parts on top of each other, one bar a cache layer; negative ones below zero.

    Args:
        title, unit: of the plot and of its y axis.
        values: part to one value a layer.
        layers: their cache layers.
        line: series drawn as a line over the bars.
    Returns: an <svg> element.
    Source: own.
    """
    figure, axes = _figure(title, unit, width=6.4)
    above, below = [0.0] * len(layers), [0.0] * len(layers)
    for part, heights in values.items():
        bottoms = [above[i] if h >= 0 else below[i] for i, h in enumerate(heights)]
        axes.bar(layers, heights, 0.8, bottom=bottoms, label=method_name(part), color=_color(part))
        above = [top + max(h, 0.0) for top, h in zip(above, heights, strict=True)]
        below = [low + min(h, 0.0) for low, h in zip(below, heights, strict=True)]
    for part, series in (line or {}).items():
        axes.plot(
            layers, series, marker="o", ms=3, lw=1.4, label=method_name(part), color=_color(part)
        )
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xlabel("cache layer", color=INK)
    return _svg(figure, axes)


def frontier(title: str, x_name: str, y_name: str, points: dict[str, list[tuple]]) -> str:
    """Draw points of several methods, and the line through those that no other point beats.

    Args:
        title, x_name, y_name: of the plot; smaller is better on both axes, y is logarithmic.
        points: method to (x, y, label) of each point.
    Returns: an <svg> element.
    Source: own.
    """
    figure, axes = _figure(title, y_name, width=8.0)
    every = sorted(point for part in points.values() for point in part)
    best = [p for i, p in enumerate(every) if all(p[1] < q[1] for q in every[:i])]
    for method, part in points.items():
        x, y, _ = zip(*part, strict=True)
        axes.scatter(x, y, s=18, label=method_name(method), color=_color(method), zorder=3)
    if best:
        x, y, labels = zip(*best, strict=True)
        axes.plot(x, y, lw=1, color=INK, alpha=0.5, zorder=2)
        for place in zip(x, y, labels, strict=True):
            axes.annotate(
                place[2],
                place[:2],
                fontsize=6,
                color=INK,
                xytext=(3, -8),
                textcoords="offset points",
            )
    axes.set_yscale("log")
    axes.set_xlabel(x_name, color=INK)
    return _svg(figure, axes)


def _figure(title: str, unit: str, width: float):
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # text as text keeps the page small; a fixed salt keeps it equal from run to run
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "quantmla", "font.size": 9})
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    axes.set_ylabel(unit, color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.grid(axis="y", color=INK, alpha=0.12)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure, axes) -> str:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, labelcolor=INK, loc="upper left", ncols=3)
        low, high = axes.get_ylim()
        above = high * (high / low) ** 0.3 if axes.get_yscale() == "log" else high * 1.25
        axes.set_ylim(low, above)  # room for the legend
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(buffer.getvalue())


def _inline(svg: str) -> str:
    """Keep the <svg> element alone: no prolog, no metadata, no name space addresses."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    return svg.replace(INK, "currentColor")


def _color(method: str) -> str:
    # not hash(): it differs from process to process
    return COLORS.get(method, OTHER_COLORS[sum(method.encode()) % len(OTHER_COLORS)])


def _short(value: float) -> str:
    return f"{value:.3g}" if value else ""
