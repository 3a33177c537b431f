"""Verbs that measure and show: eval and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import (
    DryRun,
    Json,
    Quiet,
    Seed,
    Verbose,
    emit,
    print_fields,
    say,
    table,
)


def evaluate(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder under test.")],
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            help="Checkpoint whose BF16 rows are the reference; the model itself by default.",
        ),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Scheme instead of the folder's own, as c4r4.")
    ] = None,
    text: Annotated[
        str, typer.Option("--text", help="UTF-8 file or shipped slice for perplexity.")
    ] = "wikitext2-test",
    window: Annotated[
        list[int] | None, typer.Option("--window", min=2, help="Window length in tokens; repeat.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens to score.")] = 4096,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="JSONL file or shipped slice; repeat.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items a task.")] = None,
    shots: Annotated[
        int, typer.Option("--shots", min=0, help="Solved items before each context.")
    ] = 0,
    needle: Annotated[
        list[int] | None, typer.Option("--needle", min=1, help="Needle context in tokens; repeat.")
    ] = None,
    needle_items: Annotated[int, typer.Option("--needle-items", min=1)] = 10,
    haystack: Annotated[
        str, typer.Option("--haystack", help="Text to hide needles in.")
    ] = "haystack",
    expanded: Annotated[
        bool, typer.Option("--expanded", help="Score the stock expanded attention as well.")
    ] = False,
    prefill: Annotated[str, typer.Option("--prefill", help="strict or fast.")] = "strict",
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1)] = 512,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 1,
    sink_tokens: Annotated[int | None, typer.Option("--sink-tokens", min=0)] = None,
    window_tokens: Annotated[
        int | None, typer.Option("--window-tokens", min=0, help="Recent tokens kept in BF16.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32 (CPU default) or bfloat16 (GPU default).")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Torch device.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for results.json (never overwritten), scratch."),
    ] = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity, KL, flips and task accuracy, measured through the packed cache.

    Without --task and --needle, the text is scored in windows of 2048.
    """
    from quantmla.config import KVScheme
    from quantmla.evaluate.model import default_settings
    from quantmla.evaluate.row import require_valid
    from quantmla.evaluate.run import Plan, estimate, run_plan

    settings = default_settings(device, dtype, prefill, chunk_tokens, batch)
    only_tasks = (task or needle) and not window
    plan = Plan(
        model=model,
        reference=reference,
        scheme=KVScheme.parse(scheme) if scheme else None,
        sink_tokens=sink_tokens,
        window_tokens=window_tokens,
        text=text,
        windows=() if only_tasks else tuple(window or (2048,)),
        tokens=tokens,
        expanded=expanded,
        tasks=tuple(task or ()),
        limit=limit,
        shots=shots,
        needle_contexts=tuple(needle or ()),
        needle_items=needle_items,
        haystack=haystack,
        seed=seed,
    )
    if reference is None:
        say("no --reference: the BF16 rows of the model under test itself are the reference")
    if dry_run:
        emit(estimate(plan), as_json, print_fields)
        return
    results = run_plan(plan, settings, out=out, progress=say)
    emit(results, as_json, print_results)
    require_valid([*results["rows"], *results["tasks"]])


def print_results(results: dict) -> None:
    """Print fidelity and task rows as tables.

    Args: results [rows, tasks].
    Source: own.
    """
    columns = ["method", "scheme", "attention", "window", "perplexity", "KL", "flips %"]
    columns += ["bytes/token/layer", "packed rows read", "valid"]
    rows = [
        [
            row["method"],
            row["scheme"],
            row["attention"],
            row["window"],
            row["ppl"],
            row["kl"],
            None if row["top1_flips"] is None else 100 * row["top1_flips"],
            row["bytes_per_token"],
            row["packed_rows_read"],
            "yes" if row["valid"] else "NO",
        ]
        for row in results["rows"]
    ]
    if rows:
        table("Fidelity", columns, rows)
    columns = ["task", "method", "scheme", "attention", "accuracy", "95% interval", "per char"]
    columns += ["guessing", "items", "with packed rows", "valid"]
    rows = [
        [
            row["task"],
            row["method"],
            row["scheme"],
            row["attention"],
            row["accuracy"],
            "{:.3f} to {:.3f}".format(*row["ci95"]),
            row.get("accuracy_per_char"),
            row["floor"],
            row["items"],
            row["items_with_packed_rows"],
            "yes" if row["valid"] else "NO",
        ]
        for row in results["tasks"]
    ]
    if rows:
        table("Tasks", columns, rows)


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="results.json files, folders that hold one, files of analyze."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="HTML file to write; must be new.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option("--title")] = "quantmla report",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse rows that were not measured alike.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Put results beside each other in one self-contained HTML page.

    Rows whose text, tokenizer, reference, window, policy, mode or dtype differ are marked.
    """
    from quantmla.checkpoint.lock import folder_lock
    from quantmla.cli.merging import merge_results
    from quantmla.evaluate.run import refuse_existing
    from quantmla.report import write_report

    with folder_lock(out):
        refuse_existing(out)
        merged = merge_results(results, strict=strict)
        write_report(merged, out, title=title)
    marked = [row for row in [*merged["rows"], *merged["tasks"]] if row["differs"]]
    summary = {
        "report": str(out),
        "rows": len(merged["rows"]),
        "task_rows": len(merged["tasks"]),
        "sensitivity_analyses": len(merged["sensitivity"]),
        "not_measured_alike": [f"{row['method']} {row['scheme']}" for row in marked],
    }
    emit(summary, as_json, print_fields)
