"""The verb that compares every method in every format: ablate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import (
    DryRun,
    Json,
    Quiet,
    Resume,
    Verbose,
    Workers,
    emit,
    print_fields,
    resumable,
    say,
    table,
)


def ablate(
    model: Annotated[Path, typer.Argument(help="MLA checkpoint folder, not fused.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of everything.")],
    cells: Annotated[
        list[str] | None,
        typer.Option(
            "--cells",
            help="format/method/policy or format/method/bare, with * for anything; repeat. All of "
            "them by default; --dry-run lists them.",
        ),
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe file (YAML).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Recipe field of all calibrations, as steps=100; repeat."),
    ] = None,
    calibration_text: Annotated[
        str, typer.Option("--calibration-text", help="Text to calibrate on.")
    ] = "wikitext2-train",
    text: Annotated[str, typer.Option("--text", help="Text to score.")] = "wikitext2-test",
    window: Annotated[int, typer.Option("--window", min=2, help="Window length in tokens.")] = 2048,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens to score.")] = 8192,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", min=2, help="Tokens of one finished piece.")
    ] = 8192,
    gate: Annotated[
        float, typer.Option("--gate", min=1.0, help="Factor of the promotion rule.")
    ] = 8.0,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=1, help="Block of the bootstrap.")
    ] = 256,
    resamples: Annotated[
        int, typer.Option("--resamples", min=100, max=100_000, help="Of the bootstrap.")
    ] = 2000,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1)] = 512,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows at once.")] = 1,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32 (CPU default) or bfloat16 (GPU default).")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Torch device.")] = None,
    workers: Workers = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of everything.")] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods, formats and policies on one model, layer by layer first.

    Cells that lose on the attention output of single layers are not scored by the whole model. The
    result is one table with intervals, and a report. A stopped run goes on with --resume, also
    with more --cells.
    """
    from quantmla.ablate.cells import select
    from quantmla.ablate.plan import Ablation, estimate
    from quantmla.ablate.run import require_valid_cells, run_ablation
    from quantmla.cli.progress import progress
    from quantmla.cli.recipes import build_recipe
    from quantmla.evaluate.model import default_settings
    from quantmla.report import require_packages, write_report

    _refuse_what_cells_decide(settings or [])
    scoring = default_settings(device, dtype, "strict", chunk_tokens, batch)
    ablation = Ablation(
        model=model,
        out=out,
        cells=tuple(select(cells or [])),
        base=build_recipe(recipe, settings or [], seed=seed),
        calibration_text=calibration_text,
        text=text,
        window_tokens=window,
        tokens=tokens,
        shard_tokens=shard_tokens,
        gate=gate,
        block_tokens=block_tokens,
        resamples=resamples,
        workers=workers or 1,
    )
    if dry_run:
        emit(estimate(ablation, scoring), as_json, print_plan)
        return
    require_packages()
    with resumable():
        result = run_ablation(ablation, scoring, resume=resume, say=say, progress=progress)
    report = write_report(result, out / "report.html", title="quantmla ablation")
    say(f"wrote {report}")
    emit(result, as_json, print_ablation)
    require_valid_cells(result)


def print_plan(plan: dict) -> None:
    """Print what an ablation would do: its cells, then what they cost.

    Args: plan [of estimate].
    Source: own.
    """
    rows = [[name, *sizes.values()] for name, sizes in plan["cells"].items()]
    table("Cells", ["cell", "bytes a token and layer", "at 512+64"], rows)
    print_fields({name: value for name, value in plan.items() if name != "cells"})


def print_ablation(result: dict) -> None:
    """Print the table of an ablation.

    Args: result [of run_ablation].
    Source: own.
    """
    ablation = result["ablation"]
    columns = ["cell", "storage", "bytes", "at 512+64", "layer distortion", "perplexity", "/ BF16"]
    columns += ["95%", "KL", "95% interval", "KL / QuantMLA", "scored"]
    rows = [
        [
            row["cell"],
            row["storage"],
            row["bytes_per_token"],
            row["bytes_at_512_64"],
            row["layer_distortion"],
            row.get("ppl"),
            row.get("ppl_ratio"),
            _interval(row.get("ppl_ratio_ci95")),
            row.get("kl"),
            _interval(row.get("kl_ci95")),
            row.get("kl_over_quantmla"),
            "NOT VALID" if not row.get("valid", True) else "yes" if row["promoted"] else "no",
        ]
        for row in ablation["rows"]
    ]
    table(f"Ablation; BF16 perplexity {ablation['bf16']['ppl']:.3f}", columns, rows)
    print(ablation["rule"])


def _interval(pair: list[float] | None) -> str | None:
    return None if pair is None else "{:.3g} to {:.3g}".format(*pair)


def _refuse_what_cells_decide(settings: list[str]) -> None:
    """Refuse recipe fields that every cell sets for itself."""
    from quantmla.cli.recipes import parse_setting
    from quantmla.config import method_defaults
    from quantmla.errors import SchemeError

    bits = ("scheme", "scheme.content_bits", "scheme.rope_bits")
    decided = {"method", *bits, *method_defaults("quantmla")}
    for text in settings:
        if parse_setting(text)[0] in decided:
            raise SchemeError(
                "the cells of an ablation decide this field",
                where=f"--set {text}",
                expected=f"a field other than {', '.join(sorted(decided))}",
                got=text,
                next_step="choose cells with --cells",
            )
