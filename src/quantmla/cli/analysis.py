"""The verb that says why equal cache error gives unequal output error: analyze."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quantmla.cli.common import DryRun, Json, Quiet, Seed, Verbose, emit, print_fields, table

BOTH_PATHS = (("content", "content"), ("rope", "RoPE"))


def analyze(
    model: Annotated[
        Path, typer.Argument(help="MLA checkpoint folder; a fused one in its own coordinates.")
    ],
    text: Annotated[
        str, typer.Option("--text", help="A UTF-8 file or a shipped slice.")
    ] = "wikitext2-train",
    windows: Annotated[
        int, typer.Option("--windows", min=1, help="Windows from its start; 6 for intervals.")
    ] = 8,
    sequence_tokens: Annotated[
        int, typer.Option("--sequence-tokens", min=2, help="Tokens of a window.")
    ] = 1024,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Cache layers, as 0-3,7; all by default.")
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme", help="Bits whose error is followed; the folder's own, or c4r4 by default."
        ),
    ] = None,
    nmse: Annotated[
        float, typer.Option("--nmse", min=1e-12, max=1.0, help="Cache NMSE of either path.")
    ] = 0.01,
    probes: Annotated[
        int, typer.Option("--probes", min=2, help="Random sign vectors a window and path.")
    ] = 4,
    device: Annotated[str, typer.Option("--device", help="Torch device.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON file to write; must be new.")
    ] = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """How an error of either cached path reaches the attention output, layer by layer.

    Both paths are disturbed along their rounding error to the same NMSE. Exits with 3 if the parts
    of the content error do not add up, or a bound is broken.
    """
    import torch

    from quantmla.analyze.run import Plan, estimate_analysis, run_analysis
    from quantmla.analyze.summary import require_sound
    from quantmla.cli.progress import progress
    from quantmla.config import KVScheme
    from quantmla.evaluate.run import refuse_existing
    from quantmla.files import atomic_write, storage_errors
    from quantmla.loading import check_device

    check_device(device)
    plan = Plan(
        model=model,
        text=text,
        windows=windows,
        sequence_tokens=sequence_tokens,
        layers=None if layers is None else parse_layers(layers),
        scheme=KVScheme.parse(scheme) if scheme else None,
        nmse=nmse,
        probes=probes,
        seed=seed,
        device=device,
    )
    if out is not None:
        refuse_existing(out)  # now, not after the analysis
    with torch.no_grad(), progress("analyze") as tell:
        result = estimate_analysis(plan) if dry_run else run_analysis(plan, tell)
    if dry_run:
        emit(result, as_json, print_fields)
        return
    if out is not None:
        with storage_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(out, json.dumps(result, indent=1) + "\n")
    emit(result, as_json, print_analysis)
    require_sound(result["sensitivity"]["model"])


def parse_layers(text: str) -> tuple[int, ...]:
    """Read layer numbers and ranges, both ends included.

    Args: text [as 0-3,7].
    Raises: typer.BadParameter.
    Source: own.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 1 << 16):
            raise typer.BadParameter(f"{text!r} is not a list of layers, as 0-3,7")
        numbers += range(int(first), int(last) + 1)
    return tuple(numbers)


def print_analysis(result: dict[str, Any]) -> None:
    """Print the figures of the model and one row a layer and path.

    Args: result [of run_analysis].
    Source: own.
    """
    from quantmla.report.sensitivity import FIGURES

    sensitivity = result["sensitivity"]
    settings, model, layers = (sensitivity[part] for part in ("settings", "model", "layers"))
    print(
        f"{settings['model']}: {settings['scheme']} error, {settings['coordinates']} coordinates, "
        f"cache NMSE {settings['nmse']:g}, {settings['windows']} windows of "
        f"{settings['sequence_tokens']} tokens"
    )
    rows = [
        [label, model["response"][name]["value"], _interval(model["response"][name]["ci95"])]
        for name, label in FIGURES.items()
    ]
    table("Response of the output", ["figure", "value", "95% interval"], rows)
    columns = ["layer", "path", "response", "random", "G", "T", "+-", "A", "+-", "O", "+-"]
    names = ["response", "random_response", "g", "t", "t_se", "a", "a_se", "o", "o_se"]
    rows = [
        [layer["layer"], label, *(layer[path][name] for name in names)]
        for layer in layers
        for path, label in BOTH_PATHS
    ]
    table("Amplification G = T A + O; +- is the standard error of the probes", columns, rows)
    columns = ["layer", "matching", "aggregation", "interaction", "M x G", "M x I", "G x I"]
    rows = [[layer["layer"], *layer["content_shares"].values()] for layer in layers]
    table("Shares of the content error", columns, rows)
    forms = ["plain", "centred", "weighted", "weighted_centred"]
    columns = ["layer", "plain", "centred", "first order", "first order, centred"]
    rows = [
        [layer["layer"], *(f"{layer['bound'][form]['ratio']:.2e}" for form in forms)]
        for layer in layers
    ]
    table("Proposition 2: left over right side", columns, rows)
    share = model["rope_share_of_scores"]
    print(f"the RoPE path holds {100 * share:.1f} % of the squared scores (mean of layers)")


def _interval(ci95: list[float] | None) -> str:
    return "too few windows" if ci95 is None else f"{ci95[0]:.4g} to {ci95[1]:.4g}"
