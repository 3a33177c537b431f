"""Verbs that measure kernels and caches: bench decode, bench write, bench memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmla.cli.common import Json, Quiet, Seed, Verbose, emit, table

app = typer.Typer(help="Time the kernels on this GPU, beside BF16 kernels in the same run.")

Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Interleaved bursts of each kernel.")]
Result = Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")]


@app.command("decode")
def decode(
    scheme: Annotated[list[str] | None, typer.Option("--scheme", help="As c4r4; repeat.")] = None,
    heads: Annotated[list[int] | None, typer.Option("--heads", min=1, help="Repeat.")] = None,
    point: Annotated[
        list[str] | None, typer.Option("--point", help="BATCHxCONTEXT, as 8x16384; repeat.")
    ] = None,
    queries: Annotated[
        list[int] | None, typer.Option("--queries", min=1, max=8, help="New tokens; repeat.")
    ] = None,
    suite: Annotated[
        bool, typer.Option("--suite", help="The points of docs/performance.md.")
    ] = False,
    flashmla: Annotated[
        Path | None, typer.Option("--flashmla", help="Library of FlashMLA to measure against.")
    ] = None,
    fa3: Annotated[
        Path | None, typer.Option("--fa3", help="Library of FlashAttention-3 (MLA).")
    ] = None,
    rounds: Rounds = 7,
    out: Result = None,
    seed: Seed = 0,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Decode over packed pages against BF16 kernels; medians of one interleaved run.

    The ratio is the time of the faster library (FlashMLA or FlashAttention-3) over ours.
    """
    from quantmla.bench.decode import SUITE, Point, run_decode
    from quantmla.bench.result import finish
    from quantmla.cli.progress import progress

    sizes = [_point(text) for text in point or ("8x16384", "32x16384", "128x16384")]
    points = [
        Point(name, h, s_q, batch, context)
        for name in scheme or ["c4r4"]
        for h in heads or [16]
        for s_q in queries or [1]
        for batch, context in sizes
    ]
    if suite:
        if scheme or heads or point or queries:
            raise typer.BadParameter("--suite has points of its own: leave the others out")
        points = SUITE
    with progress("decode") as tell:
        rows = run_decode(points, flashmla=flashmla, fa3=fa3, rounds=rounds, seed=seed, tell=tell)
    emit(finish(rows, seed, out), as_json, _print_decode)


@app.command("write")
def write(
    scheme: Annotated[list[str] | None, typer.Option("--scheme", help="As c4r4; repeat.")] = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Repeat.")] = None,
    rounds: Rounds = 9,
    out: Result = None,
    seed: Seed = 0,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """The writer: quantise, pack and store new tokens, in one launch."""
    from quantmla.bench.result import finish
    from quantmla.bench.write import run_write

    rows = run_write(
        scheme or ["c4r4", "c2r4"], tokens or [128, 8192, 131072], rounds=rounds, seed=seed
    )
    emit(finish(rows, seed, out), as_json, _print_write)


@app.command("memory")
def memory(
    scheme: Annotated[list[str] | None, typer.Option("--scheme", help="As c4r4; repeat.")] = None,
    context: Annotated[list[int] | None, typer.Option("--context", min=1, help="Repeat.")] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Cache layers.")] = 27,
    requests: Annotated[int, typer.Option("--requests", min=1, help="That fit at once.")] = 4,
    device: Annotated[str, typer.Option("--device", help="Torch device.")] = "cuda",
    out: Result = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """What a paged cache takes on the device, beside its accounting and beside BF16."""
    from quantmla.bench.memory import run_memory
    from quantmla.bench.result import finish
    from quantmla.loading import check_device

    check_device(device)
    rows = run_memory(
        scheme or ["c4r4", "c2r4"],
        context or [4096, 131072],
        layers=layers,
        requests=requests,
        device=device,
    )
    emit(finish(rows, 0, out, device), as_json, _print_memory)


def _point(text: str) -> tuple[int, int]:
    batch, cross, context = text.partition("x")
    if not (cross and batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise typer.BadParameter(f"{text!r} is not BATCHxCONTEXT, as 8x16384")
    return int(batch), int(context)


def _print_decode(result: dict) -> None:
    names = list(result["rows"][0]["bf16_us"])
    rows = [
        [
            f"{row['scheme']} h={row['h']} s_q={row['s_q']}",
            f"{row['batch']} x {row['context']}",
            row["ours_us"],
            *row["bf16_us"].values(),
            row["ratio"],
            row["error"],
        ]
        for row in result["rows"]
    ]
    columns = ["kernel", "batch x context", "ours us", *(f"{n} us" for n in names)]
    table("Decode, median of interleaved bursts", [*columns, "ratio", "error"], rows)


def _print_write(result: dict) -> None:
    columns = ["scheme", "tokens", "us", "moved_bytes", "tb_s", "copy_tb_s"]
    rows = [[row[name] for name in columns] for row in result["rows"]]
    table("Writer, median of interleaved bursts", columns, rows)


def _print_memory(result: dict) -> None:
    columns = ["scheme", "context", "allocated_bytes", "accounted_bytes", "bf16_bytes", "ratio"]
    rows = [[row[name] for name in columns] for row in result["rows"]]
    table("Paged cache", columns, rows)
