"""What an ablation is, what it reads before it computes, and what it would cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quantmla.ablate.bootstrap import Resampler
from quantmla.ablate.cells import Cell
from quantmla.ablate.gate import rule
from quantmla.ablate.table import LARGE
from quantmla.ablate.transforms import Calibrations
from quantmla.calibrate.data import load_windows
from quantmla.calibrate.estimate import estimate_run
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import Recipe
from quantmla.dims import MLADims
from quantmla.errors import EvaluationError
from quantmla.evaluate.manifest import checkpoint_sha256
from quantmla.evaluate.model import Settings, tokenizer_sha256
from quantmla.loading import load_tokenizer
from quantmla.text import Windows, cut_windows, open_text

GROUP, ZERO = 64, "zp8"  # of every affine format here


@dataclass(frozen=True)
class Ablation:
    """What to compare, on which text.

    Args:
        model: MLA checkpoint folder, not fused.
        out: folder of everything.
        cells: Cell of `cells.select`.
        base: recipe of every calibration; method, bits and clips are those of the cells.
        calibration_text: slice or file of the calibration windows.
        text: slice or file that is scored.
        window_tokens, tokens [tokens]: of the scored windows, and of the scored text.
        shard_tokens [tokens]: how much text one finished piece covers.
        gate: factor of the promotion rule.
        block_tokens [tokens]: of the block bootstrap.
        resamples: of the block bootstrap.
        workers: layers calibrated at a time.
    """

    model: Path
    out: Path
    cells: tuple[Cell, ...]
    base: Recipe
    calibration_text: str = "wikitext2-train"
    text: str = "wikitext2-test"
    window_tokens: int = 2048
    tokens: int = 8192
    shard_tokens: int = 8192
    gate: float = 8.0
    block_tokens: int = 256
    resamples: int = 2000
    workers: int = 1

    @property
    def policy(self) -> tuple[int, int]:
        """Sink and window of the cells that have them."""
        return self.base.scheme.sink_tokens, self.base.scheme.window_tokens

    def shards(self, windows: Windows) -> list[torch.Tensor]:
        """Return the windows of each shard."""
        return list(windows.ids.split(max(1, self.shard_tokens // self.window_tokens)))


@dataclass(frozen=True)
class Material:
    """What an ablation reads before it computes: sizes, texts in tokens, calibrations."""

    dims: MLADims
    windows: Windows
    calibration: torch.Tensor
    calibrations: Calibrations
    texts: dict[str, str]
    tokenizer_sha256: str


def open_material(ablation: Ablation, settings: Settings) -> Material:
    """Open and tokenise everything, so that bad input stops early.

    Args: ablation; settings.
    Returns: Material.
    Raises: TextError, CheckpointError, or EvaluationError for settings that no ablation has.
    Source: own.
    """
    reader = CheckpointReader(ablation.model)
    reader.refuse_fused()
    scheme = ablation.base.scheme
    if (scheme.group, scheme.zero, settings.prefill) != (GROUP, ZERO, "strict"):
        raise EvaluationError(
            "these settings are not those of an ablation",
            where="recipe: scheme.group, scheme.zero; prefill",
            expected=f"{GROUP}, {ZERO}, strict",
            got=f"{scheme.group}, {scheme.zero}, {settings.prefill}",
        )
    tokenizer = load_tokenizer(ablation.model)
    texts = {name: open_text(name) for name in (ablation.calibration_text, ablation.text)}
    windows = cut_windows(
        tokenizer,
        texts[ablation.text],
        window_tokens=ablation.window_tokens,
        tokens=ablation.tokens,
    )
    calibration = load_windows(texts[ablation.calibration_text], tokenizer, ablation.base)
    dims = MLADims.from_config(reader.config)
    shape = (len(windows.ids), ablation.window_tokens - 1)
    Resampler.of(shape, ablation.block_tokens, 1, 0)  # is there enough text for an interval
    return Material(
        dims,
        windows,
        calibration.windows.ids,
        Calibrations(ablation.out / "calibration", ablation.base, dims.num_cache_layers),
        {name: text.sha256 for name, text in texts.items()},
        tokenizer_sha256(tokenizer),
    )


def identity_of(ablation: Ablation, settings: Settings, material: Material) -> dict:
    """Return what decides every score of an ablation, apart from its cells.

    Source: own.
    """
    return {
        "model": checkpoint_sha256(ablation.model),
        "recipe": ablation.base.model_dump(mode="json"),
        "texts": material.texts,
        "tokens": material.windows.tokens_sha256,
        "window_tokens": ablation.window_tokens,
        "shard_tokens": ablation.shard_tokens,
        "settings": vars(settings),
    }


def estimate(ablation: Ablation, settings: Settings) -> dict:
    """Say what an ablation would cost; no weight of it is read but for a short trial.

    Args: ablation; settings.
    Returns: cells, recipes still to calibrate with what `estimate_run` says of them, tokens fed to
        the model, and the memory of the reference.
    Raises: as run_ablation for unusable input.
    Source: own.
    """
    material = open_material(ablation, settings)
    sizes = (material.dims.kv_lora_rank, material.dims.qk_rope_head_dim)
    missing = material.calibrations.missing(list(ablation.cells))
    vocab = CheckpointReader(ablation.model).config["vocab_size"]
    shard = min(material.windows.tokens, max(ablation.shard_tokens, ablation.window_tokens))
    return {
        "cells": {
            cell.name: {
                "bytes_per_token": cell.format.logical_bytes(*sizes),
                "bytes_at_512_64": cell.format.logical_bytes(*LARGE),
            }
            for cell in ablation.cells
        },
        "recipes_to_calibrate": [f"{r.method} {r.scheme.name}" for r in missing],
        "calibration": estimate_run(
            ablation.model, missing, workers=ablation.workers, device=settings.device
        )
        if missing
        else None,
        "tokens_fed_at_most": (len(ablation.cells) + 1) * material.windows.tokens,
        "reference_bytes": 4 * vocab * shard,
        "rule": rule(ablation.gate),
    }
