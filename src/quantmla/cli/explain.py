"""Which kernel would run, how it would be launched, and why not another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import Json, Verbose, emit, print_fields


def explain(
    scheme: Annotated[str, typer.Option("--scheme", help="As c4r4.")] = "c4r4",
    model: Annotated[
        Path | None, typer.Option("--model", help="Checkpoint that gives sizes and heads.")
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Query heads of a rank.")] = 16,
    queries: Annotated[int, typer.Option("--queries", min=1, help="New tokens of a request.")] = 1,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests.")] = 8,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of a request.")] = 16384,
    device: Annotated[str | None, typer.Option("--device", help="Torch device.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say which attention kernel would run for a cache, how, and what speaks against others."""
    import torch

    from quantmla.checkpoint.header import read_json
    from quantmla.config import KVScheme
    from quantmla.dims import MLADims
    from quantmla.kernels.explain import explain_decode
    from quantmla.loading import check_device

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    rank, rope = 512, 64
    if model is not None:
        dims = MLADims.from_config(read_json(model / "config.json"))
        rank, rope, heads = dims.kv_lora_rank, dims.qk_rope_head_dim, dims.num_heads
    parsed = KVScheme.parse(scheme)
    emit(
        explain_decode(parsed, rank, rope, heads, queries, batch, context, device),
        as_json,
        print_fields,
    )
