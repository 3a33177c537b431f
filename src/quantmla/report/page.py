"""Lay result rows, per-layer errors and the manifest out as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from quantmla.errors import QuantMLAError
from quantmla.files import atomic_write, storage_errors
from quantmla.report.ablation import show_ablation
from quantmla.report.plots import bars, lines, method_name
from quantmla.report.sensitivity import sensitivity_section

TEMPLATES = Path(__file__).parent / "templates"


def write_report(results: dict, path: str | Path, *, title: str = "quantmla report") -> Path:
    """Write one self-contained HTML page; no script, no network, light and dark.

    Args:
        results: {"rows": fidelity rows, "tasks": task rows, "layers": per-layer errors of each
            method and
            scheme, "sensitivity": those of `quantmla analyze`, "ablation": table of `quantmla
            ablate` or a list of them, "manifest": dict}; all but "rows" may be missing.
        path: file to write.
        title: of the page.
    Returns: the path.
    Raises: QuantMLAError if matplotlib or jinja2 is not installed; CheckpointError if the disk
        refuses.
    Source: own.
    """
    require_packages()
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = [_display(row, results["rows"]) for row in results["rows"]]
    page = environment.get_template("report.html.j2").render(
        title=title,
        groups=_by_window(rows),
        quality_plots=_quality_plots(rows),
        layer_plots=_layer_plots(results.get("layers") or []),
        layer_windows=_layer_windows(results.get("layers") or []),
        bytes_plot=_bytes_plot(rows),
        tasks=[_display_task(row) for row in results.get("tasks") or []],
        analyses=[sensitivity_section(one) for one in results.get("sensitivity") or []],
        ablations=[show_ablation(part) for part in _ablations(results)],
        notes=results.get("notes") or [],
        manifest=json.dumps(results.get("manifest") or {}, indent=2, ensure_ascii=False),
    )
    with storage_errors(path):
        atomic_write(path, page)
    return Path(path)


def _ablations(results: dict) -> list[dict]:
    found = results.get("ablation") or []
    return [found] if isinstance(found, dict) else found


def require_packages() -> None:
    """Refuse to begin where no report can be written in the end.

    Raises: QuantMLAError naming what is missing.
    Source: own.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise QuantMLAError(
            "the report needs packages that are not installed",
            where="this Python environment",
            expected="matplotlib and jinja2",
            got=f"missing: {', '.join(missing)}",
            next_step="pip install 'quantmla[report]'",
        )


def _display(row: dict, rows: list[dict]) -> dict:
    """A row with what its neighbours say: the change against its own BF16 reference."""
    base = _reference(row, rows)
    change = 100 * (row["ppl"] / base["ppl"] - 1) if base and base is not row else None
    ratio = base["bytes_per_token"] / row["bytes_per_token"] if base else None
    return {**row, "name": method_name(row["method"]), "change_percent": change, "ratio": ratio}


def _reference(row: dict, rows: Iterable[dict]) -> dict | None:
    def measured_on(one: dict) -> tuple:
        return one["window"], one.get("tokens_sha256"), one.get("reference_sha256")

    bf16 = (r for r in rows if r["attention"] == "absorbed BF16")
    return next((r for r in bf16 if measured_on(r) == measured_on(row)), None)


def _by_window(rows: list[dict]) -> list[dict]:
    windows = sorted({row["window"] for row in rows}, reverse=True)
    return [{"window": w, "rows": [row for row in rows if row["window"] == w]} for w in windows]


def _packed(rows: list[dict]) -> list[dict]:
    """Rows of the longest window that measured a packed cache."""
    longest = max((row["window"] for row in rows), default=0)
    return [r for r in rows if r["window"] == longest and r["attention"] == "absorbed quantised"]


def _grouped(rows: list[dict], field: str) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row[field] is not None:
            groups.setdefault(row["scheme"].upper(), {})[row["method"]] = row[field]
    return groups


def _quality_plots(rows: list[dict]) -> list[str]:
    packed = _packed(rows)
    plots = []
    for title, unit, field, log in (
        ("Token KL to BF16 (lower is better)", "nats", "kl", True),
        ("Perplexity above BF16", "percent", "change_percent", False),
    ):
        groups = _grouped(packed, field)
        if groups:
            plots.append(bars(title, unit, groups, log=log))
    return plots


def _bytes_plot(rows: list[dict]) -> str | None:
    longest = max((row["window"] for row in rows), default=0)
    sizes = {
        row["scheme"].upper(): {"bytes": row["bytes_per_token"]}
        for row in rows
        if row["window"] == longest and row["attention"] != "expanded BF16"
    }
    return bars("Bytes of a cached token in one layer", "bytes", sizes) if sizes else None


def _layer_plots(layers: list[dict]) -> list[dict]:
    """One pair of plots a scheme: the error of the content path and that of the RoPE path."""
    plots = []
    for scheme in dict.fromkeys(entry["scheme"] for entry in layers):
        pair = []
        for path, name in (("content", "content"), ("rope", "RoPE")):
            series: dict[str, list[float | None]] = {}
            for entry in sorted(layers, key=lambda entry: entry["layer"]):
                if entry["scheme"] == scheme:
                    value = entry.get(f"{path}_error")
                    series.setdefault(entry["method"], []).append(value)
            title = f"{scheme.upper()}, only the {name} path quantised"
            pair.append(lines(title, "relative attention output error", series))
        plots.append({"scheme": scheme.upper(), "plots": pair})
    return plots


def _layer_windows(layers: list[dict]) -> str:
    """How many held-out windows the errors of the layers come from."""
    counts = sorted({entry["heldout_windows"] for entry in layers if "heldout_windows" in entry})
    return " or ".join(map(str, counts)) or "some"


def _display_task(row: dict) -> dict:
    return {**row, "name": method_name(row["method"])}
