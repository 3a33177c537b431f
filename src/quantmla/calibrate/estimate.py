"""What a calibration will cost, from a short trial on one real layer; writes nothing."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantmla.calibrate.capture import capture_layers, decoder_of
from quantmla.calibrate.joint import JOINT_SEQUENCES, joint_check
from quantmla.calibrate.methods import METHODS, TRAINED
from quantmla.calibrate.pool import calibration_threads
from quantmla.calibrate.record import LayerCapture
from quantmla.calibrate.run import check_recipes
from quantmla.calibrate.scores import GRAMS_BYTES
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.plan import AttentionLayers
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import LEARNED, Recipe
from quantmla.transform.layer import LayerTransform

TRIAL_WINDOWS = 4  # two to train on, two held out
TRIAL_STEPS = 4
SCORE_MATRICES = 8  # of all heads, while the sensitivity of one window is sampled
clock = time.perf_counter


def estimate_run(
    source: str | Path,
    recipes: list[Recipe],
    *,
    workers: int = 1,
    device: str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    storage_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Time the last decoder layer on random input and scale up to the whole run.

    Args:
        source, recipes, workers, device, compute_dtype, storage_dtype: as for `run_calibration`.

    Returns:
        cache_layers, windows, sequence_tokens, optimiser_steps, workers; time_s with its parts
        capture_time_s, sampling_time_s and method_time_s (by method and scheme), which several
        workers share; peak_memory_bytes (host, all processes); disk_bytes (run folder) and
        fused_bytes (upper bound of all fused checkpoints).

    Raises:
        What `run_calibration` raises for an unusable source or recipes.

    Source: own.
    """
    reader = CheckpointReader(source)
    reader.refuse_fused()
    layers = AttentionLayers.of(reader)
    first = check_recipes(recipes)
    windows = first.sequences + first.heldout_sequences
    options = {"compute_dtype": compute_dtype, "storage_dtype": storage_dtype, "device": device}
    idle_bytes = _peak_bytes()
    with calibration_threads(workers):
        times = _times(source, layers, recipes, windows, options)
    work_s = sum(times.values())
    capture_s, sampling_s = times.pop("capture"), times.pop("sampling")
    workers = min(workers, len(layers.names))
    memory = _WindowBytes.of(layers, first, storage_dtype)
    shards = sum((reader.path / shard).stat().st_size for shard in reader.shards)
    return {
        "cache_layers": len(layers.names),
        "windows": windows,
        "sequence_tokens": first.sequence_tokens,
        "optimiser_steps": len(layers.names) * sum(map(_steps, recipes)),
        "workers": workers,
        "time_s": round(max(capture_s, work_s / workers), 1),
        "capture_time_s": round(capture_s, 1),
        "sampling_time_s": round(sampling_s, 1),
        "method_time_s": {name: round(seconds, 1) for name, seconds in times.items()},
        "peak_memory_bytes": memory.peak(windows, workers, idle_bytes, _peak_bytes()),
        "disk_bytes": (workers + 1) * windows * memory.hidden + _transform_bytes(layers, recipes),
        "fused_bytes": shards * len(recipes),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _times(
    source: str | Path,
    layers: AttentionLayers,
    recipes: list[Recipe],
    windows: int,
    options: dict[str, Any],
) -> dict[str, float]:
    """Return the seconds of "capture", "sampling" and each recipe over all layers."""
    tokens, device = recipes[0].sequence_tokens, options["device"]
    capture, load_s, window_s = _trial_capture(source, layers, tokens, options)
    config = layers.reader.config
    pairing_cache = family_of(config).rope_pairing_cache(config)
    decoders = [decoder_of(names.prefix) for names in layers.names]
    return {
        "capture": len(set(decoders)) * (load_s + windows * window_s),
        "sampling": len(decoders) * _sampling_time(capture, recipes, pairing_cache, device),
    } | {
        f"{recipe.method} {recipe.scheme.name}": len(decoders)
        * _layer_time(capture, recipe, pairing_cache, device)
        for recipe in recipes
    }


def _trial_capture(
    source: str | Path, layers: AttentionLayers, tokens: int, options: dict[str, Any]
) -> tuple[LayerCapture, float, float]:
    """Return a capture of the last decoder layer, the seconds to load it, and those of a window."""
    last = decoder_of(layers.names[-1].prefix)
    generator = torch.Generator().manual_seed(0)
    shape = (TRIAL_WINDOWS, tokens, layers.dims.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(options["storage_dtype"])
    windows = torch.zeros(TRIAL_WINDOWS, tokens, dtype=torch.int64)
    skip = range(len(layers.names) - 1)
    ends = [clock()]
    (capture,) = capture_layers(
        source,
        windows,
        start=(last, hidden),
        skip=skip,
        progress=lambda *_: ends.append(clock()),
        **options,
    )
    window_s = (ends[-1] - ends[1]) / (TRIAL_WINDOWS - 1)
    return capture, max(0.0, ends[1] - ends[0] - window_s), window_s


def _layer_time(capture: LayerCapture, recipe: Recipe, pairing_cache: str, device: str) -> float:
    """Return the seconds of one recipe on one layer.

    The time is taken as linear in training steps, in steps on the curvature, and in measurements
    of held-out windows; each rate comes from the difference of two trials. The sensitivity that
    the recipes share is left out; see `_sampling_time`.
    """
    one = min(1, recipe.train.curvature_steps)  # decides which error the RoPE path measures

    def trial(steps: int, curvature_steps: int, heldout: int) -> float:
        train = recipe.train.model_copy(update={"curvature_steps": curvature_steps})
        small = recipe.model_copy(
            update={
                "train": train,
                "steps": steps,
                "sequences": TRIAL_WINDOWS - heldout,
                "heldout_sequences": heldout,
                "eval_every": TRIAL_STEPS + 1,
            }
        )
        layer = LayerWorkspace(capture, pairing_cache, 0, device)
        if _samples(recipe):
            layer.sensitivity(small)
        start = clock()
        METHODS[recipe.method](layer, small)
        return clock() - start

    trial(0, one, 1)  # first use of each operation
    base = trial(0, one, 1)
    seconds = base
    if recipe.method in TRAINED:
        measurement = max(0.0, trial(0, one, 2) - base) / (2 + one)  # start, end, plain rounding
        per_step = max(0.0, trial(TRIAL_STEPS, one, 1) - base - measurement) / TRIAL_STEPS
        per_proxy = max(0.0, trial(0, one + TRIAL_STEPS, 1) - base) / TRIAL_STEPS
        steps, proxies = recipe.steps, recipe.train.curvature_steps
        measured = (steps + proxies) // recipe.eval_every + 2
        seconds += per_step * steps + per_proxy * proxies
        seconds += measurement * measured * recipe.heldout_sequences
    layer = LayerWorkspace(capture, pairing_cache, 0, device)
    checked = range(min(JOINT_SEQUENCES, recipe.heldout_sequences))
    start = clock()
    joint_check(layer.attention(), LayerTransform(), recipe.scheme, pairing_cache, checked)
    return seconds + clock() - start


def _sampling_time(
    capture: LayerCapture, recipes: list[Recipe], pairing_cache: str, device: str
) -> float:
    """Return the seconds of one layer's output sensitivity, which all recipes that ask share."""
    asking = next((recipe for recipe in recipes if _samples(recipe)), None)
    if asking is None:
        return 0.0
    small = asking.model_copy(update={"sequences": 1, "heldout_sequences": 1})
    layer = LayerWorkspace(capture, pairing_cache, 0, device)
    start = clock()
    layer.sensitivity(small)
    per_window = (clock() - start) / 2
    most = asking.train.curvature_windows
    return per_window * (min(most, asking.sequences) + min(most, asking.heldout_sequences))


def _samples(recipe: Recipe) -> bool:
    return recipe.method in TRAINED or recipe.clip_content == "learned"


def _steps(recipe: Recipe) -> int:
    if recipe.method not in TRAINED:
        return 0
    runs = 2 if recipe.method in LEARNED else 5  # one a path; flatquant: three more behind them
    return runs * (recipe.steps + recipe.train.curvature_steps)


@dataclass(frozen=True)
class _WindowBytes:
    """Host memory of one window of a run.

    Args:
        hidden: its hidden states.
        captured: what is kept of one attention.
        attentions: of a decoder layer.
        learned: what the objectives keep of it.
        scratch: what is there once, while one window is worked on: score matrices of all heads.
    """

    hidden: int
    captured: int
    attentions: int
    learned: int
    scratch: int

    @classmethod
    def of(
        cls, layers: AttentionLayers, recipe: Recipe, storage_dtype: torch.dtype
    ) -> _WindowBytes:
        dims, tokens = layers.dims, recipe.sequence_tokens
        queries = dims.num_heads * dims.qk_head_dim * storage_dtype.itemsize
        cached = (dims.kv_lora_rank + dims.qk_rope_head_dim) * 4
        teacher = tokens * dims.hidden_size * 4
        grams = min(tokens * dims.qk_rope_head_dim**2 * 4, GRAMS_BYTES // recipe.sequences)
        return cls(
            hidden=tokens * dims.hidden_size * storage_dtype.itemsize,
            captured=tokens * (queries + cached),
            attentions=len(layers.names) // len({decoder_of(n.prefix) for n in layers.names}),
            learned=teacher + grams,
            scratch=SCORE_MATRICES * dims.num_heads * tokens**2 * 4,
        )

    def peak(self, windows: int, workers: int, idle_bytes: int, trial_bytes: int) -> int:
        """Return the bytes of all processes; `trial_bytes` has a decoder layer and the scratch."""
        here = self.hidden + self.attentions * self.captured
        if workers == 1:
            return trial_bytes + (here + self.learned) * max(0, windows - TRIAL_WINDOWS)
        worker = idle_bytes + self.scratch + (self.captured + self.learned) * windows
        return trial_bytes + here * max(0, windows - TRIAL_WINDOWS) + workers * worker


def _transform_bytes(layers: AttentionLayers, recipes: list[Recipe]) -> int:
    rank, pairs = layers.dims.kv_lora_rank, layers.dims.qk_rope_head_dim // 2
    sizes = {
        "rtn": 0,
        "smoothquant": rank + pairs,
        "quarot_offline": rank * (rank + 1),
        "quarot_online": rank * (rank + 1),
        "smoothquant_tuned": rank + pairs,
        "quarot_angles": rank * (rank + 1) + pairs,
        "quantmla": rank * (rank + 1) + 2 * pairs,
        "quantmla_plus": rank * (rank + 2) + (2 * pairs) ** 2 + 6 * pairs,
        "flatquant": rank * (rank + 1) + (2 * pairs) ** 2,
    }
    header = 1024
    return len(layers.names) * sum(8 * sizes[recipe.method] + header for recipe in recipes)
