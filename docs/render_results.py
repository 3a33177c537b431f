"""Fill the result tables of README.md and docs/ from committed JSON files.

Run `python docs/render_results.py` after `metrics.json` of `make results` was copied to
benchmarks/results/cpu/demo.json, or `quantmla bench decode|write --out` wrote decode.json and
write.json in benchmarks/results/h200, or `quantmla analyze --out` wrote cpu/analyze.json, or
results.json of `quantmla ablate` was copied to benchmarks/results/cpu/ablation.json, or
benchmarks/plus.py wrote cpu/plus.json. Only the standard library is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
METRICS = RESULTS / "cpu" / "demo.json"
ABLATION = RESULTS / "cpu" / "ablation.json"
NAMES = {
    "rtn": "RTN",
    "smoothquant_tuned": "SmoothQuant† tuned",
    "quarot_angles": "QuaRot†, random angles",
    "flatquant": "FlatQuant ceiling",
    "smoothquant": "SmoothQuant†",
    "quarot_offline": "QuaRot† offline",
    "quarot_online": "QuaRot† online",
    "quantmla": "**QuantMLA**",
    "quantmla_plus": "**QuantMLA+**",
}


def readme_part(metrics: dict) -> str:
    """The longest window and the columns that a first reader compares."""
    return _part(metrics, _windows(metrics)[-1:], packed_rows=False)


def results_part(metrics: dict) -> str:
    """Every window, and how many packed rows each score rests on."""
    return _part(metrics, _windows(metrics), packed_rows=True)


def plus_part(result: dict) -> str:
    """One row a scheme or byte budget of QuantMLA+, beside BF16."""
    head = ["cache", "page bytes/token/layer", "perplexity", "above BF16", "mean token KL"]
    reference, *rest = result["rows"]
    rows = [["BF16", f"{reference['bytes_per_token']:,}", f"{reference['ppl']:.2f}", "", "", ""]]
    for row in rest:
        budget = row["method"].removeprefix("quantmla_plus").strip()
        rows.append(
            [
                f"by layer, {budget}" if budget else row["scheme"].upper(),
                f"{row['bytes_per_token']:,}",
                f"{row['ppl']:.2f}",
                f"{100 * (row['ppl'] / reference['ppl'] - 1):+.1f} %",
                f"{row['kl']:.4f}",
                f"{100 * row['top1_flips']:.1f} %",
            ]
        )
    table = _table([*head, "top-1 flips"], rows, left=1)
    return table + "\n\n" + _measured_with(result["manifest"])


def decode_part(result: dict) -> str:
    """One row a point: our time, the BF16 kernels' times, and the ratio to the faster library."""
    names = list(result["rows"][0]["bf16_us"])
    head = ["scheme", "heads", "queries", "batch x context", "ours us"]
    head += [f"{name} us" for name in names] + ["ratio", "error"]
    rows = [
        [
            row["scheme"].upper(),
            str(row["h"]),
            str(row["s_q"]),
            f"{row['batch']} x {row['context']:,}",
            *(_number(row[name], ".1f") for name in ("ours_us",)),
            *(_number(row["bf16_us"][name], ".1f") for name in names),
            _number(row["ratio"], ".2f"),
            _number(row["error"], ".1e"),
        ]
        for row in result["rows"]
    ]
    return _table(head, rows, left=1) + "\n\n" + _measured_with(result["manifest"])


def write_part(result: dict) -> str:
    """One row a size: time, bytes a second, and those of a copy in the same run."""
    head = ["scheme", "tokens", "us", "TB/s", "copy TB/s", "share of the copy"]
    rows = [
        [
            row["scheme"].upper(),
            f"{row['tokens']:,}",
            _number(row["us"], ".1f"),
            _number(row["tb_s"], ".2f"),
            _number(row["copy_tb_s"], ".2f"),
            f"{100 * row['tb_s'] / row['copy_tb_s']:.0f} %",
        ]
        for row in result["rows"]
    ]
    return _table(head, rows, left=1) + "\n\n" + _measured_with(result["manifest"])


def memory_part(result: dict) -> str:
    """One row a scheme and context: bytes taken, accounted, in BF16, and the ratio."""
    names = ("allocated_bytes", "accounted_bytes", "bf16_bytes")
    head = ["scheme", "tokens of a request", "allocated", "accounted", "BF16", "ratio"]
    rows = [
        [
            row["scheme"].upper(),
            f"{row['context']:,}",
            *(f"{row[name]:,}" for name in names),
            _number(row["ratio"], ".2f"),
        ]
        for row in result["rows"]
    ]
    return _table(head, rows, left=1) + "\n\n" + _measured_with(result["manifest"])


def response_part(result: dict) -> str:
    """The figures of a model, with their intervals."""
    figures = result["sensitivity"]["model"]["response"]
    names = {
        "content": "content path, mean of layers",
        "rope": "RoPE path, mean of layers",
        "ratio_of_means": "RoPE / content, ratio of means",
        "mean_of_ratios": "RoPE / content, mean of ratios",
        "ratio_of_mean_roots": "RoPE / content, ratio of mean square roots",
    }
    rows = [
        [
            label,
            _number(figures[name]["value"], ".4g"),
            " to ".join(format(end, ".4g") for end in figures[name]["ci95"] or [])
            or "too few windows",
        ]
        for name, label in names.items()
    ]
    table = _table(["response of the output", "value", "95 % interval"], rows, left=1)
    return table + "\n\n" + _measured_with(result["manifest"])


def amplification_part(result: dict) -> str:
    """Means over the layers, one row a path."""
    model = result["sensitivity"]["model"]
    head = ["path", "G", "T", "T A", "O", "A", "response of a random direction"]
    names = ("g", "t", "ta", "o", "a", "random_response")
    rows = [
        [label, *(_number(model[path][name], ".4g") for name in names)]
        for path, label in (("content", "content"), ("rope", "RoPE"))
    ]
    return _table(head, rows, left=1)


def layers_part(result: dict) -> str:
    """One row a layer: responses, A and O of both paths, shares of the content error, bounds."""
    head = [
        "layer",
        "content",
        "RoPE",
        "ratio",
        "A content",
        "A RoPE",
        "O / G content",
        "O / G RoPE",
    ]
    head += ["matching", "aggregation", "interaction", "crossed", "bound", "first order"]
    rows = []
    for layer in result["sensitivity"]["layers"]:
        content, rope, shares = layer["content"], layer["rope"], layer["content_shares"]
        terms = [shares[name] for name in ("matching", "aggregation", "interaction")]
        bounds = [layer["bound"][form]["ratio"] for form in ("centred", "weighted_centred")]
        rows.append(
            [
                str(layer["layer"]),
                *(_number(path["response"], ".4f") for path in (content, rope)),
                _number(layer["response_ratio"], ".2f"),
                *(_number(path["a"], ".2f") for path in (content, rope)),
                *(_number(path["o"] / path["g"], ".2f") for path in (content, rope)),
                *(_number(term, ".3f") for term in terms),
                _number(sum(shares.values()) - sum(terms), ".3f"),
                *(_number(bound, ".1e") for bound in bounds),
            ]
        )
    return _table(head, rows, left=1)


def ablation_part(result: dict) -> str:
    """One row a cell: bytes at both sizes, layer distortion, scores with intervals, verdict."""
    ablation = result["ablation"]
    head = ["format", "method", "policy", "storage", "bytes", "at 512+64", "layer distortion"]
    head += ["perplexity / BF16", "95 %", "KL", "95 %", "KL / QuantMLA"]
    rows = []
    for row in ablation["rows"]:
        methods = [NAMES[row["content"]], NAMES[row["rope"]]]
        name = methods[0] if methods[0] == methods[1] else f"{methods[0]} + {methods[1]}"
        cells = [row["format"], name, "yes" if row["policy"] else "no", row["storage"]]
        cells += [f"{row[n]:g}" for n in ("bytes_per_token", "bytes_at_512_64")]
        cells.append(f"{row['layer_distortion']:.2e}")
        if row["promoted"]:
            cells += [f"{row['ppl_ratio']:.4f}", _interval(row["ppl_ratio_ci95"])]
            cells += [f"{row['kl']:.4f}", _interval(row["kl_ci95"])]
            cells.append(_number(row["kl_over_quantmla"], ".2f"))
        else:
            cells += ["not scored", "", "", "", ""]
        rows.append(cells)
    blocks = ablation["bootstrap"]
    note = (
        f"{ablation['rule']} {ablation['tokens']:,} tokens in windows of "
        f"{ablation['window_tokens']:,}, {blocks['blocks']} blocks of {blocks['block_tokens']}. "
        f"Revisions that worked on it: {', '.join(r[:12] for r in ablation['revisions'])}."
    )
    measured = _measured_with(result["manifest"])
    return "\n\n".join([_table(head, rows, left=4), note, measured])


# (page, name of its markers, committed file, how it is rendered)
PARTS: list[tuple[str, str, Path, Callable[[dict], str]]] = [
    ("README.md", "results", METRICS, readme_part),
    ("docs/results.md", "results", METRICS, results_part),
    ("docs/results.md", "plus", RESULTS / "cpu" / "plus.json", plus_part),
    ("docs/baselines.md", "ablation", ABLATION, ablation_part),
    ("docs/performance.md", "decode", RESULTS / "h200" / "decode.json", decode_part),
    ("docs/performance.md", "write", RESULTS / "h200" / "write.json", write_part),
    ("docs/performance.md", "memory", RESULTS / "h200" / "memory.json", memory_part),
    ("docs/sensitivity.md", "response", RESULTS / "cpu" / "analyze.json", response_part),
    ("docs/sensitivity.md", "amplification", RESULTS / "cpu" / "analyze.json", amplification_part),
    ("docs/sensitivity.md", "layers", RESULTS / "cpu" / "analyze.json", layers_part),
]


def filled(text: str, part: str, name: str = "results") -> str:
    """Put a part between the two markers of its name on a page.

    Raises: ValueError unless each marker stands there once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and then {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"


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
    return _table(head, rows, left=2) + "\n\n" + _measured_with(metrics["manifest"])


def _table(head: list[str], rows: list[list[str]], *, left: int) -> str:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(pair: list[float]) -> str:
    return "{:.4f} to {:.4f}".format(*pair)


def _measured_with(manifest: dict) -> str:
    commit, _, changed = (manifest.get("revision") or "").partition("+")
    source = f" at {commit[:12]}" + (" with local changes" if changed else "") if commit else ""
    return (
        f"Measured with quantmla {manifest['quantmla']}{source}, torch {manifest['torch']}, "
        f"transformers {manifest['transformers']}"
        + (f", triton {manifest['triton']}" if manifest.get("triton") else "")
        + f", on {manifest['device']}, seed {manifest['seed']}, {manifest['created'][:10]}."
    )


def main() -> None:
    """Rewrite every page whose file is there."""
    for page, name, source, render in PARTS:
        if not source.is_file():
            print(f"no {source.relative_to(ROOT)}: {page} is left as it is")
            continue
        part = render(json.loads(source.read_text(encoding="utf-8")))
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8"), part, name), encoding="utf-8")
        print(f"wrote {page} ({name})")


if __name__ == "__main__":
    main()
