"""Bits of each layer under a byte budget: which of several calibrated recipes a layer takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantmla.cache.accounting import TokenFormat
from quantmla.checkpoint.block import new_block
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import LayerBits, Recipe
from quantmla.dims import MLADims
from quantmla.errors import CalibrationError

if TYPE_CHECKING:
    from quantmla.calibrate.run import CalibrationRun


def choose(errors: Sequence[Sequence[float]], sizes: Sequence[float], budget: float) -> list[int]:
    """Pick one candidate a layer so that the errors are small and the mean size is in the budget.

    Every layer starts with the smallest candidate; the change that saves most error a byte is made
    until none fits.

    Args:
        errors: of each layer, the error of each candidate.
        sizes [bytes]: of each candidate.
        budget [bytes]: largest mean size.

    Returns:
        Candidate of each layer.

    Raises:
        CalibrationError: even the smallest candidate is over the budget.

    Source: algorithms.md section 10.4, E9.
    """
    cheapest = min(range(len(sizes)), key=lambda candidate: sizes[candidate])
    if sizes[cheapest] > budget:
        raise CalibrationError(
            "no candidate fits the byte budget",
            where="budget_bytes",
            expected=f"at least {sizes[cheapest]:g}, the smallest candidate",
            got=f"{budget:g}",
            next_step="calibrate a smaller scheme as well, or allow more bytes",
        )
    picked = [cheapest] * len(errors)
    left = (budget - sizes[cheapest]) * len(errors)
    while True:
        changes = []  # (error saved a byte, layer, candidate)
        for layer, own in enumerate(errors):
            for other, size in enumerate(sizes):
                more, saved = size - sizes[picked[layer]], own[picked[layer]] - own[other]
                if 0 < more <= left and saved > 0:
                    changes.append((saved / more, layer, other))
        if not changes:
            return picked
        _, layer, other = max(changes, key=lambda change: (change[0], -change[1]))
        left -= sizes[other] - sizes[picked[layer]]
        picked[layer] = other


def fuse_within(
    run: CalibrationRun,
    recipes: Sequence[Recipe],
    budget_bytes: float,
    weights: Sequence[float],
    out: str | Path,
) -> Path:
    """Fuse a checkpoint whose layers have the bits that their measured errors ask for.

    Args:
        run: finished run with all of the recipes.
        recipes: candidates; they may differ in bits and in what was learned for them.
        budget_bytes: largest mean of code and metadata bytes a token and layer.
        weights: what an error of each layer costs, from `layer_weights`. Without them layers whose
            output matters most are rounded like all others.
        out: folder to write.

    Returns:
        The path of `out`.

    Raises:
        CalibrationError: nothing fits, or the recipes differ in more than bits.
        CheckpointError: as `fuse_checkpoint`.

    Source: own; the error is that of the attention output with both paths rounded.
    """
    config = CheckpointReader(run.source).config
    dims = MLADims.from_config(config)
    _check(recipes)
    widths = dims.kv_lora_rank, dims.qk_rope_head_dim
    sizes = [TokenFormat.from_scheme(r.scheme).logical_bytes(*widths) for r in recipes]
    learned = [run.transforms(recipe) for recipe in recipes]
    layers = list(zip(*learned, strict=True))
    errors = [
        [weight * transform.stats["output_error_both"] for transform in own]
        for weight, own in zip(weights, layers, strict=True)
    ]
    picked = choose(errors, sizes, budget_bytes)
    most = max(set(picked), key=picked.count)  # the block's own bits; the others are overrides
    scheme = recipes[most].scheme
    per_layer = {
        str(layer): LayerBits(
            content_bits=recipes[own].scheme.content_bits, rope_bits=recipes[own].scheme.rope_bits
        )
        for layer, own in enumerate(picked)
        if recipes[own].scheme != scheme
    }
    block = new_block(recipes[most].method, scheme, family_of(config), config)
    block = block.model_copy(update={"per_layer": per_layer})
    transforms = [own[candidate] for own, candidate in zip(layers, picked, strict=True)]
    return fuse_checkpoint(run.source, out, transforms, block, recipes[most])


def _check(recipes: Sequence[Recipe]) -> None:
    fields = ("group", "zero", "sink_tokens", "window_tokens")
    rest = {(r.method, *(getattr(r.scheme, name) for name in fields)) for r in recipes}
    if len(rest) != 1:
        raise CalibrationError(
            "the layers of one checkpoint can differ in bits only",
            where="recipes",
            expected="at least one recipe, and one method, group, zero mode, sink and window",
            got=f"{len(rest)} combinations",
            next_step="give recipes that differ in content_bits and rope_bits",
        )
