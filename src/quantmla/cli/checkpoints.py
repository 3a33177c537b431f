"""Verbs about a checkpoint folder: inspect, convert, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import (
    DryRun,
    Json,
    Out,
    Quiet,
    Seed,
    Verbose,
    emit,
    print_fields,
)

Folder = Annotated[Path, typer.Argument(help="Checkpoint folder.")]


def inspect(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder, or a config.json.")],
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", help="Scheme to tabulate; may be repeated.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Is it MLA, what does a cached token cost now and by scheme, what would fusing change."""
    from quantmla.cli.inspection import inspect_checkpoint, print_inspection

    result = inspect_checkpoint(model, scheme)
    emit(result, as_json, print_inspection)


def convert(
    model: Annotated[Path, typer.Argument(help="Folder or GGUF file of a Llama-style model.")],
    out: Out,
    text: Annotated[
        str, typer.Option("--text", help="Calibration text: a UTF-8 file or a shipped slice.")
    ] = "wikitext2-valid",
    kv_lora_rank: Annotated[
        int, typer.Option("--kv-lora-rank", min=1, help="Latent channels of the result.")
    ] = 256,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Turn a grouped-query checkpoint, as SmolLM2, into a native MLA one, without training."""
    from quantmla.cli.progress import progress
    from quantmla.convert.run import convert_model, plan_conversion

    if dry_run:
        emit(plan_conversion(model, out, kv_lora_rank), as_json, print_fields)
        return
    with progress("convert") as tell:
        report = convert_model(model, out, text=text, kv_lora_rank=kv_lora_rank, progress=tell)
    emit({"checkpoint": str(out), **report}, as_json, _print_conversion)


def _print_conversion(report: dict) -> None:
    print(f"{report['checkpoint']}: native MLA checkpoint, converted from {report['source']}")
    print(
        f"numbers cached a token and layer: {report['cached_numbers_before']} before, "
        f"{report['cached_numbers_after']} now"
    )


def verify(
    model: Folder,
    source: Annotated[
        Path | None, typer.Option("--source", help="The checkpoint it was fused from.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check a fused checkpoint: hashes, the identity of every layer, the fingerprint."""
    from quantmla.checkpoint.verify import verify as verify_checkpoint
    from quantmla.errors import GateError

    report = verify_checkpoint(model, source, seed=seed)
    emit(report.to_json(), as_json, _print_verification)
    if not report.ok:
        raise GateError(
            "the checkpoint does not pass",
            where=str(model),
            got="; ".join(report.failures),
            next_step="fuse the checkpoint again from its source",
        )


def _print_verification(report: dict) -> None:
    print(f"{report['path']}: {'ok' if report['ok'] else 'FAILED'}, {report['files']} files hashed")
    print(f"fingerprint {report['fingerprint']}")
    if report["layer_errors"]:
        worst = max(report["layer_errors"])
        print(
            f"{report['tensors']} untouched tensors equal; largest relative error of a layer "
            f"{worst:.2e} (tolerance {report['tolerance']:.0e})"
        )
