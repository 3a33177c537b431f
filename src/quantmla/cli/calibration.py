"""The verb that learns and fuses: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import (
    DryRun,
    Json,
    Out,
    Quiet,
    Resume,
    Verbose,
    Workers,
    emit,
    print_fields,
    resumable,
    say,
)


def calibrate(
    model: Annotated[Path, typer.Argument(help="MLA checkpoint folder.")],
    out: Out,
    text: Annotated[
        str, typer.Option("--text", help="Calibration text: a UTF-8 file or a shipped slice.")
    ] = "wikitext2-train",
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Bits of both paths, as c4r4 (default) or c2r4.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="quantmla, quantmla_plus, rtn, smoothquant, smoothquant_tuned, quarot_offline, "
            "quarot_online or quarot_angles.",
        ),
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe file (YAML).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Recipe field, as steps=100 or train.lr_angle=0.02; repeat."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="Folder of finished layers; OUT.run by default.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Torch device.")] = "cpu",
    workers: Workers = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the recipe.")] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Learn the transforms of every layer and write the fused checkpoint.

    The result is an ordinary Hugging Face folder. After a kill, the same command with --resume goes
    on with the layer that was in work and gives the same bytes.
    """
    from quantmla.calibrate.data import load_windows
    from quantmla.calibrate.estimate import estimate_run
    from quantmla.calibrate.methods import refuse_unfoldable
    from quantmla.calibrate.run import run_calibration
    from quantmla.checkpoint.fusedir import refuse_out
    from quantmla.cli.progress import progress
    from quantmla.cli.recipes import build_recipe
    from quantmla.loading import check_device, load_tokenizer
    from quantmla.text import open_text

    check_device(device)
    workers = workers or 1
    built = build_recipe(recipe, settings or [], scheme=scheme, method=method, seed=seed)
    refuse_unfoldable(built)
    run_dir = run_dir or out.with_name(f"{out.name}.run")
    if dry_run:
        load_windows(open_text(text), load_tokenizer(model), built)  # is the text long enough
        emit(estimate_run(model, [built], workers=workers, device=device), as_json, print_fields)
        return
    refuse_out(model, out)  # now, not after the calibration
    refuse_run(model, out, run_dir)
    with resumable():
        with progress("calibrate") as tell:
            run = run_calibration(
                model,
                text,
                [built],
                run_dir,
                resume=resume,
                workers=workers,
                progress=tell,
                device=device,
            )
        say("fusing")
        run.fuse(built, out)
    stats = run.stats(built)
    flagged = run.flagged_layers(built)
    result = {
        "checkpoint": str(out),
        "method": built.method,
        "scheme": built.scheme.name,
        "cache_layers": len(stats),
        "mean_output_error_content": _mean(stats, "output_error_content"),
        "mean_output_error_rope": _mean(stats, "output_error_rope"),
        "mean_output_error_both": _mean(stats, "output_error_both"),
        "layers_that_fail_the_joint_check": flagged,
        "recipe_sha256": built.sha256(),
        "run": str(run_dir),
        "next": f"quantmla eval {out} --reference {model}",
    }
    emit(result, as_json, print_fields)


def refuse_run(model: Path, out: Path, run_dir: Path) -> None:
    """Refuse a run folder that is the result, or lies in the result or in the source."""
    from quantmla.errors import CalibrationError

    inside = run_dir.resolve()
    for name, folder in (("--out", out.resolve()), ("the source", model.resolve())):
        if folder == inside or folder in inside.parents:
            raise CalibrationError(
                f"the run folder lies in {name}",
                where=run_dir,
                expected="a folder of its own",
                next_step="choose another --run, or leave it out",
            )


def _mean(stats: list[dict], name: str) -> float:
    return sum(layer[name] for layer in stats) / len(stats)
