"""The one table of an ablation: bytes, distortion, verdict and scores of every cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import torch

from quantmla.ablate.bootstrap import Resampler, interval
from quantmla.ablate.cells import Cell
from quantmla.ablate.folder import ShardScores
from quantmla.ablate.gate import Verdict
from quantmla.cache.layout import PageLayout
from quantmla.dims import MLADims

LARGE = (512, 64)  # kv_lora_rank and qk_rope_head_dim of the DeepSeek models
OURS = "quantmla"


def build_rows(
    cells: dict[Cell, Verdict],
    layers: dict[Cell, list[dict]],
    packed: dict[Cell, bool],
    scores_of: Callable[[Cell], ShardScores],
    reference: ShardScores,
    dims: MLADims,
    resampler: Resampler,
) -> list[dict]:
    """Return one row a cell, ready for JSON.

    Args:
        cells: with their verdicts.
        layers: what the first rung measured on every layer.
        packed: whether pages hold a cell.
        scores_of: gives the scores of a promoted cell.
        reference: scores of BF16 on the same tokens.
        dims: sizes of the model.
        resampler: of the intervals, the same for all cells.
    Returns: rows in the order of the cells.
    Source: algorithms.md sections 10.1 and 10.3.
    """
    scores = {cell: scores_of(cell) for cell, verdict in cells.items() if verdict.promoted}
    kl = {cell: resampler.means(part.tokens.kl) for cell, part in scores.items()}
    rows = []
    for cell, verdict in cells.items():
        row = _describe(cell, verdict, layers[cell], packed[cell], dims)
        if cell in scores:
            row |= _scored(scores[cell], reference, kl[cell], resampler)
            ours = Cell(cell.form, OURS, OURS if cell.format.rope_bits < 16 else "rtn", cell.policy)
            row |= _beside(scores, kl, cell, ours)
        rows.append(row)
    return rows


def _describe(
    cell: Cell, verdict: Verdict, layers: list[dict], packed: bool, dims: MLADims
) -> dict:
    form, sizes = cell.format, (dims.kv_lora_rank, dims.qk_rope_head_dim)
    page = PageLayout(*sizes, form.scheme(policy=cell.policy)).token_bytes if packed else None
    return {
        "cell": cell.name,
        "format": cell.form,
        "content": cell.content,
        "rope": cell.rope,
        "policy": cell.policy,
        "storage": "packed" if packed else "simulated",
        "bytes_per_token": form.logical_bytes(*sizes),
        "page_bytes_per_token": page,
        "bytes_at_512_64": form.logical_bytes(*LARGE),
        "content_distortion": fmean(layer["content"] for layer in layers),
        "rope_distortion": fmean(layer["rope"] for layer in layers),
        "layer_distortion": verdict.distortion,
        "promoted": verdict.promoted,
        "reason": verdict.reason,
    }


def _scored(
    scores: ShardScores, reference: ShardScores, kl: torch.Tensor, resampler: Resampler
) -> dict:
    loss = scores.tokens.nll - reference.tokens.nll  # paired, token by token
    read, expected = scores.packed_rows_read, scores.packed_rows_expected
    reason = None
    if read == 0:
        reason = "no packed row was read: the windows are no longer than sink + window"
    elif read != expected:
        reason = f"{read} packed rows were read, {expected} expected"
    return {
        "ppl": math.exp(scores.tokens.nll.double().mean()),
        "ppl_ratio": math.exp(loss.double().mean()),
        "ppl_ratio_ci95": interval(resampler.means(loss).exp()),
        "kl": float(scores.tokens.kl.double().mean()),
        "kl_ci95": interval(kl),
        "top1_flips": float(scores.tokens.flips.double().mean()),
        "packed_rows_read": read,
        "packed_rows_expected": expected,
        "valid": reason is None,
        "invalid_reason": reason,
    }


def _beside(
    scores: dict[Cell, ShardScores], kl: dict[Cell, torch.Tensor], cell: Cell, ours: Cell
) -> dict:
    """KL of a cell over that of QuantMLA in the same format and policy, on the same blocks."""
    if ours not in scores or ours == cell:
        return {"kl_over_quantmla": None, "kl_over_quantmla_ci95": None}
    means = [scores[one].tokens.kl.double().mean().item() for one in (cell, ours)]
    return {
        "kl_over_quantmla": means[0] / means[1] if means[1] else None,
        "kl_over_quantmla_ci95": interval(kl[cell] / kl[ours]),
    }
