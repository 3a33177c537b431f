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
    table,
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
    from quantmla.cli.inspection import inspect_checkpoint

    result = inspect_checkpoint(model, scheme)
    emit(result, as_json, _print_inspection)


def _print_inspection(result: dict) -> None:
    if not result["mla"]:
        print(f"{result['path']}: not usable. {result['reason']}")
        return
    dims = result["dims"]
    print(f"{result['path']}: {result['model_type']}, multi-head latent attention")
    print(
        f"latent {dims['kv_lora_rank']} + rope {dims['qk_rope_head_dim']} channels, "
        f"{dims['num_heads']} heads, {dims['num_cache_layers']} cache layers, "
        f"query rank {dims['q_lora_rank'] or 'full'}, "
        f"rope pairs {result['rope_pairing']} in the weights, "
        f"{result['rope_pairing_cache']} in the cache"
    )
    now = result["bytes_per_token"]
    print(
        f"BF16 latent: {now['layer']:,} bytes a token and layer, {now['model']:,} in the model; "
        f"expanded keys and values would take {now['expanded_layer']:,} a layer"
    )
    columns = ["scheme", "bytes/token/layer", "bytes/token", "BF16 / packed", "resident 4K", "128K"]
    rows = [
        [
            row["scheme"],
            row["bytes_per_token"],
            row["model_bytes_per_token"],
            row["ratio"],
            row["resident_ratio"]["4096"],
            row["resident_ratio"]["131072"],
        ]
        for row in result["schemes"]
    ]
    table("Packed cache by scheme", columns, rows)
    for path, names in result["changes"].items():
        print(f"the {path} path changes, in every layer: {', '.join(names)}")
    if result["quantmla"]:
        block = result["quantmla"]
        print(f"already fused: {block['method']}, fingerprint {block['fingerprint']}")


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
    from quantmla.cli.conversion import convert_model, plan_conversion
    from quantmla.cli.progress import progress

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
