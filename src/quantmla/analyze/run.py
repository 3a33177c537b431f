"""All that `quantmla analyze` does: capture layer after layer, measure, sum up."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantmla.analyze.formats import layer_formats
from quantmla.analyze.layer import Settings, analyse_layer
from quantmla.analyze.summary import model_summary
from quantmla.calibrate.capture import capture_layers, decoder_of
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import KVScheme
from quantmla.dims import MLADims
from quantmla.errors import SchemeError
from quantmla.evaluate.manifest import build_manifest
from quantmla.evaluate.model import tokenizer_sha256
from quantmla.loading import load_tokenizer
from quantmla.text import Text, Windows, cut_windows, open_text

Progress = Callable[[str, int, int], None]  # (what, done, total)

TRIAL_WINDOWS = 2
TRIAL_PROBES = 2
clock = time.perf_counter


@dataclass(frozen=True)
class Plan:
    """What to analyse.

    Args:
        model: MLA checkpoint folder; a fused one is analysed in its own coordinates.
        text: slice name or file.
        windows: how many are cut from its start.
        sequence_tokens [tokens]: length of each.
        layers: cache layers, None for all.
        scheme: instead of the folder's own; C4R4 where it has none.
        nmse: cache NMSE that both paths are disturbed to.
        probes: random sign vectors a window and path.
        seed: of every random choice.
        device: torch device.
    """

    model: Path
    text: str = "wikitext2-train"
    windows: int = 8
    sequence_tokens: int = 1024
    layers: tuple[int, ...] | None = None
    scheme: KVScheme | None = None
    nmse: float = 0.01
    probes: int = 4
    seed: int = 0
    device: str = "cpu"

    @property
    def settings(self) -> Settings:
        """What holds for every layer."""
        return Settings(self.nmse, self.probes, self.seed, self.device)


def run_analysis(plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """Analyse a model with one decoder layer in memory.

    Args:
        plan: what to do.
        progress: called with (what, windows done, windows in all).

    Returns:
        {"sensitivity": {"settings", "model", "layers"}, "manifest"}, JSON data.

    Raises:
        SchemeError: a layer number or a scheme that cannot be used.
        TextError: the text cannot be used.
        CheckpointError, UnsupportedModelError: the checkpoint.
        CalibrationError: a value does not fit, or a path makes no error.

    Source: algorithms.md section 4.
    """
    reader = CheckpointReader(plan.model)
    formats = layer_formats(reader, plan.scheme)
    chosen = _chosen_layers(plan, len(formats))
    text, windows, tokenizer = _windows(plan)
    total = 2 * len(chosen) * plan.windows  # capture and measurement of each

    def tell(what: str, done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    results: list[dict[str, Any]] = []
    captures = capture_layers(
        plan.model,
        windows.ids,
        device=plan.device,
        skip=set(range(len(formats))) - set(chosen),
        progress=lambda what, done, _: tell(what, 2 * len(results) * plan.windows + done),
    )
    for capture in captures:
        before = (2 * len(results) + 1) * plan.windows
        what = f"layer {capture.layer} ({len(results) + 1}/{len(chosen)})"
        results.append(
            analyse_layer(
                capture,
                formats[capture.layer],
                plan.settings,
                lambda done, what=what, before=before: tell(what, before + done),
            )
        )
        del capture  # before the next layer is recorded
    manifest = build_manifest(
        models={"model": plan.model},
        texts={text.name: text.sha256},
        seed=plan.seed,
        device=plan.device,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
    )
    return {
        "sensitivity": {
            "settings": _settings(plan, reader, formats[chosen[0]].scheme, windows),
            "model": model_summary(results, plan.seed),
            "layers": results,
        },
        "manifest": manifest,
    }


def _chosen_layers(plan: Plan, count: int) -> list[int]:
    chosen = list(range(count)) if plan.layers is None else sorted(set(plan.layers))
    wrong = [layer for layer in chosen if not 0 <= layer < count]
    if wrong or not chosen:
        raise SchemeError(
            "the model has no such cache layer",
            where="layers",
            expected=f"numbers from 0 to {count - 1}",
            got=", ".join(map(str, wrong)) or "none",
        )
    return chosen


def _windows(plan: Plan) -> tuple[Text, Windows, Any]:
    text, tokenizer = open_text(plan.text), load_tokenizer(plan.model)
    windows = cut_windows(
        tokenizer,
        text,
        window_tokens=plan.sequence_tokens,
        tokens=plan.windows * plan.sequence_tokens,
        next_step="use a longer --text, or fewer or shorter windows (--windows, --sequence-tokens)",
    )
    return text, windows, tokenizer


def _settings(
    plan: Plan, reader: CheckpointReader, scheme: KVScheme, windows: Windows
) -> dict[str, Any]:
    return {
        "model": plan.model.name,
        "coordinates": "fused" if reader.is_fused else "untransformed",
        "scheme": scheme.name,
        "group": scheme.group,
        "zero": scheme.zero,
        "nmse": plan.nmse,
        "windows": plan.windows,
        "probes": plan.probes,
        **windows.provenance(),
    }


def estimate_analysis(plan: Plan) -> dict[str, Any]:
    """Time the last layer on random input and scale up to the whole analysis; writes nothing.

    Args: plan.

    Returns:
        cache_layers, windows, sequence_tokens, jacobian_products, time_s, peak_memory_bytes (host).

    Raises:
        What `run_analysis` raises for an unusable plan.

    Source: own.
    """
    reader = CheckpointReader(plan.model)
    formats = layer_formats(reader, plan.scheme)
    chosen = _chosen_layers(plan, len(formats))
    _windows(plan)
    capture, capture_s = _trial_capture(plan, reader, len(formats))
    exact_s, probe_s = _trial_times(plan, capture, formats[-1])
    decoders = len({decoder_of(p) for p in _prefixes(reader)[: chosen[-1] + 1]})
    window_s = exact_s + plan.probes * probe_s
    rows = capture.latent_unit, capture.k_rope, capture.q_nope, capture.q_rope
    captured_bytes = sum(part.numel() * part.element_size() for part in rows) // TRIAL_WINDOWS
    hidden_bytes = 4 * plan.sequence_tokens * MLADims.from_config(reader.config).hidden_size
    more = plan.windows - TRIAL_WINDOWS
    return {
        "cache_layers": len(chosen),
        "windows": plan.windows,
        "sequence_tokens": plan.sequence_tokens,
        "jacobian_products": len(chosen) * plan.windows * 2 * (1 + 2 * plan.probes),
        "time_s": round(plan.windows * (decoders * capture_s + len(chosen) * window_s), 1),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        + max(0, more) * (captured_bytes + hidden_bytes),
    }


def _prefixes(reader: CheckpointReader) -> list[str]:
    return family_of(reader.config).attention_prefixes(reader.config)


def _trial_capture(plan: Plan, reader: CheckpointReader, count: int) -> tuple[Any, float]:
    """Return a capture of the last layer on random input, and the seconds of one window."""
    last = decoder_of(_prefixes(reader)[-1])
    hidden_size = MLADims.from_config(reader.config).hidden_size
    shape = (TRIAL_WINDOWS, plan.sequence_tokens, hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ends = []
    (capture,) = capture_layers(
        plan.model,
        torch.zeros(shape[:2], dtype=torch.int64),
        device=plan.device,
        start=(last, hidden),
        skip=range(count - 1),
        progress=lambda *_: ends.append(clock()),
    )
    return capture, (ends[-1] - ends[0]) / (TRIAL_WINDOWS - 1)


def _trial_times(plan: Plan, capture: Any, layer_format: Any) -> tuple[float, float]:
    """Return the seconds of a window without probes, and those of one more probe."""
    times = []
    for probes in (TRIAL_PROBES, TRIAL_PROBES, 2 * TRIAL_PROBES):  # first use of each operation
        start = clock()
        settings = Settings(plan.nmse, probes, plan.seed, plan.device)
        analyse_layer(capture, layer_format, settings)
        times.append((clock() - start) / TRIAL_WINDOWS)
    probe_s = max(0.0, times[2] - times[1]) / TRIAL_PROBES
    return max(0.0, times[1] - TRIAL_PROBES * probe_s), probe_s
