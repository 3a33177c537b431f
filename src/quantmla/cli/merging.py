"""Read result files and bring their rows together."""

from __future__ import annotations

from pathlib import Path

from quantmla.checkpoint.header import read_json
from quantmla.errors import EvaluationError
from quantmla.evaluate.compare import mark_comparable

RESULTS_NAME = "results.json"


def merge_results(paths: list[Path], *, strict: bool = False) -> dict:
    """Merge result files; rows that were not measured like the first of their kind are marked.

    Args:
        paths: results.json files, or folders that hold one, and files of `quantmla analyze`.
        strict: refuse such rows instead.
    Returns: {"rows", "tasks", "layers", "notes", "sensitivity" and "ablation": lists, "manifest":
        by path}.
    Raises: EvaluationError for a file of another form, or in strict mode; CheckpointError if a file
        cannot be read.
    Source: field report FR-091.
    """
    parts: dict = {"rows": [], "tasks": [], "layers": [], "notes": []}
    merged: dict = {**parts, "sensitivity": [], "ablation": [], "manifest": {}}
    for path in paths:
        file = path / RESULTS_NAME if path.is_dir() else path
        results = read_json(file)
        sensitivity = results.get("sensitivity")
        if isinstance(sensitivity, dict):
            merged["sensitivity"].append(sensitivity)
        elif not isinstance(results.get("rows"), list):
            raise EvaluationError(
                "this is not a result file",
                where=str(file),
                expected=f"{RESULTS_NAME} of `quantmla eval` or `quantmla demo`, or a file of "
                "`quantmla analyze`",
                got=f"fields {', '.join(results)}",
                next_step="name the folder that --out of these commands wrote",
            )
        for part in parts:
            merged[part] += results.get(part) or []
        merged["ablation"] += [results["ablation"]] if results.get("ablation") else []
        merged["manifest"][str(path)] = results.get("manifest")
    merged["rows"] = mark_comparable(merged["rows"], strict=strict)
    merged["tasks"] = mark_comparable(merged["tasks"], strict=strict)
    return merged
