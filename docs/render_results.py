"""Fill the result tables of README.md and docs/results.md from a committed metrics.json.

Run `python docs/render_results.py` after `metrics.json` of `make results` was copied to
benchmarks/results/cpu/demo.json. Only the standard library is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METRICS = ROOT / "benchmarks" / "results" / "cpu" / "demo.json"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NAMES = {
    "rtn": "RTN",
    "smoothquant": "SmoothQuant†",
    "quarot_offline": "QuaRot† offline",
    "quarot_online": "QuaRot† online",
    "quantmla": "**QuantMLA**",
}


def readme_part(metrics: dict) -> str:
    """The longest window and the columns that a first reader compares."""
    return _part(metrics, _windows(metrics)[-1:], packed_rows=False)


def results_part(metrics: dict) -> str:
    """Every window, and how many packed rows each score rests on."""
    return _part(metrics, _windows(metrics), packed_rows=True)


FILES: dict[str, Callable[[dict], str]] = {
    "README.md": readme_part,
    "docs/results.md": results_part,
}


def filled(text: str, part: str) -> str:
    """Put a part between the two markers of a page.

    Raises: ValueError unless each marker stands there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and then {END}, once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{part}\n{END}{rest.split(END)[1]}"


def _windows(metrics: dict) -> list[str]:
    return sorted(metrics["bf16"]["ppl"], key=int)


def _part(metrics: dict, windows: list[str], *, packed_rows: bool) -> str:
    last = windows[-1]
    bf16 = metrics["bf16"]["ppl"]
    head = ["cache", "method", "bytes/token/layer", *(f"perplexity, window {w}" for w in windows)]
    head += ["above BF16", "mean token KL", "top-1 flips"] + ["packed rows read"] * packed_rows
    rows = [["BF16", "", "", *(f"{bf16[w]:.2f}" for w in windows), "", "", ""] + [""] * packed_rows]
    for entry in metrics["methods"]:
        row = [entry["scheme"].upper(), NAMES[entry["method"]], f"{entry['bytes_per_token']:,}"]
        row += [f"{entry['ppl'][w]:.2f}" for w in windows]
        row += [f"{100 * (entry['ppl'][last] / bf16[last] - 1):+.1f} %", f"{entry['kl']:.4f}"]
        row += [f"{100 * entry['top1_flips']:.1f} %"]
        rows.append(row + [f"{entry['packed_rows_read']:,}"] * packed_rows)
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    lines = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    return "\n".join([*lines, "", _measured_with(metrics["manifest"])])


def _measured_with(manifest: dict) -> str:
    commit, _, changed = (manifest.get("revision") or "").partition("+")
    source = f" at {commit[:12]}" + (" with local changes" if changed else "") if commit else ""
    return (
        f"Measured with quantmla {manifest['quantmla']}{source}, torch {manifest['torch']}, "
        f"transformers {manifest['transformers']}, on {manifest['device']}, "
        f"seed {manifest['seed']}, {manifest['created'][:10]}."
    )


def main() -> None:
    """Rewrite both pages."""
    metrics = json.loads(METRICS.read_text(encoding="utf-8"))
    for name, part in FILES.items():
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), part(metrics)), encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
