"""Calibrate several recipes in one pass over a model: layers outermost, recipes inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantmla.calibrate.capture import Progress, capture_layers, decoder_of
from quantmla.calibrate.data import load_windows
from quantmla.calibrate.layer import LayerWork
from quantmla.calibrate.methods import TRAINED
from quantmla.calibrate.pool import calibrate_in_workers, calibration_threads
from quantmla.calibrate.rundir import RunDir, build_manifest
from quantmla.checkpoint.block import new_block
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.plan import AttentionLayers
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import Recipe
from quantmla.errors import CalibrationError
from quantmla.loading import load_tokenizer
from quantmla.text import open_text
from quantmla.transform.layer import LayerTransform

if TYPE_CHECKING:
    from quantmla.calibrate.record import LayerCapture

PROGRESS_UNITS = 1000  # of one cache layer
WINDOW_FIELDS = ("sequences", "heldout_sequences", "sequence_tokens")


@dataclass(frozen=True)
class CalibrationRun:
    """A finished run: the transforms of every recipe, ready to be fused.

    Args:
        source: original checkpoint.
        folder: files of the run.
        recipes: what was calibrated.
    """

    source: Path
    folder: RunDir
    recipes: tuple[Recipe, ...]

    def transforms(self, recipe: Recipe) -> list[LayerTransform]:
        """Return the transforms of a recipe, one a cache layer."""
        layers = range(self.folder.num_layers)
        return [LayerTransform.load(self.folder.layer_path(recipe, layer)) for layer in layers]

    def stats(self, recipe: Recipe) -> list[dict[str, Any]]:
        """Return the error record of each cache layer."""
        return [transform.stats for transform in self.transforms(recipe)]

    def flagged_layers(self, recipe: Recipe) -> list[int]:
        """Return the cache layers that fail the joint check."""
        return [i for i, stats in enumerate(self.stats(recipe)) if not stats["joint_ok"]]

    def fuse(self, recipe: Recipe, out: str | Path, progress: Progress | None = None) -> Path:
        """Write the fused checkpoint of one recipe; see `fuse_checkpoint`."""
        config = CheckpointReader(self.source).config
        block = new_block(recipe.method, recipe.scheme, family_of(config), config)
        return fuse_checkpoint(self.source, out, self.transforms(recipe), block, recipe, progress)


def run_calibration(
    source: str | Path,
    text: str | Path,
    recipes: list[Recipe],
    run_dir: str | Path,
    *,
    resume: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
    tokenizer: Any = None,
    device: str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    storage_dtype: torch.dtype = torch.float32,
) -> CalibrationRun:
    """Learn the transforms of every layer for every recipe, with one decoder layer in memory.

    A killed run that is resumed writes the same bytes as one that was not interrupted. The number
    of workers does not change them, but that of torch threads does: several workers share the
    cores, and a worker has cores // workers threads.

    Args:
        source: MLA checkpoint folder, not fused.
        text: UTF-8 text file, plain or .gz, or the name of a shipped slice.
        recipes: what to calibrate; they must agree on the windows.
        run_dir: folder for the transforms of each layer; new or empty unless `resume`.
        resume: go on with what an earlier run finished in `run_dir`.
        workers: layers calibrated at a time; above 1 each in a process of its own, so that a script
            needs `if __name__ == "__main__":`, and the captures of so many layers are in memory.
        progress: called with (what, units done, units in all).
        tokenizer: of the model; read from `source` when None.
        device: where layers run and transforms are trained.
        compute_dtype: dtype of the model's forward pass.
        storage_dtype: dtype of waiting hidden states and queries; bfloat16 halves the memory.

    Returns:
        CalibrationRun.

    Raises:
        TextError: the text cannot be used.
        CalibrationError: recipes or run folder cannot be used, a layer overflows, or a worker was
            killed.
        CheckpointError: the checkpoint or the disk.
        UnsupportedModelError: a family that is refused.

    Source: own; protocol of the QuantMLA study.
    """
    reader = CheckpointReader(source)
    reader.refuse_fused()
    layers = AttentionLayers.of(reader)
    first = check_recipes(recipes)
    tokenizer = tokenizer or load_tokenizer(source)
    data = load_windows(open_text(text), tokenizer, first)
    folder = RunDir(run_dir, layers.dims.num_cache_layers)
    decoders = [decoder_of(names.prefix) for names in layers.names]
    with folder_lock(run_dir), calibration_threads(workers) as threads:
        settings = {
            "compute_dtype": str(compute_dtype).removeprefix("torch."),
            "storage_dtype": str(storage_dtype).removeprefix("torch."),
            "device": device,
            "threads": threads,
        }
        folder.open(build_manifest(layers, data, recipes, settings), resume)
        pending = _pending(folder, recipes)
        report = _RunProgress(progress, folder.num_layers, len(recipes), len(pending))
        captures = capture_layers(
            source,
            data.windows.ids,
            compute_dtype=compute_dtype,
            storage_dtype=storage_dtype,
            device=device,
            start=folder.load_hidden(decoders[min(pending)]) if pending else None,
            skip=set(range(folder.num_layers)) - set(pending),
            on_hidden=folder.save_hidden,
            progress=report.capturing,
        )
        work = LayerWork(folder, family_of(reader.config).rope_pairing_cache(reader.config), device)
        if workers > 1:
            steps = calibrate_in_workers(work, captures, pending, workers, threads)
        else:
            steps = _calibrate_here(work, captures, pending)
        with closing(steps):  # which ends the workers
            for layer, done in steps:
                report.calibrating(layer, done, pending[layer])
                if done == len(pending[layer]):
                    del pending[layer]
                    if pending:
                        folder.drop_hidden(before=decoders[min(pending)])
        folder.drop_hidden()
    return CalibrationRun(Path(source), folder, tuple(recipes))


def check_recipes(recipes: list[Recipe]) -> Recipe:
    """Return the first recipe after checking that all of them can share one pass.

    Raises:
        CalibrationError: no recipe, one given twice, or recipes with different windows.
    """
    if not recipes:
        raise CalibrationError(
            "no recipe was given", next_step="name at least one method and scheme"
        )
    if len(set(recipes)) < len(recipes):
        raise CalibrationError("a recipe was given twice", next_step="leave one of them out")
    for name in WINDOW_FIELDS:
        values = sorted({getattr(recipe, name) for recipe in recipes})
        if len(values) > 1:
            raise CalibrationError(
                "recipes of one run must share their windows",
                where=name,
                expected="one value",
                got=", ".join(map(str, values)),
                next_step="run them apart, in two folders",
            )
    for recipe in recipes:
        scheme = recipe.scheme
        protected_tokens = scheme.sink_tokens + scheme.window_tokens
        void = recipe.protect == "policy" and recipe.sequence_tokens <= protected_tokens
        if recipe.method in TRAINED and void:
            raise CalibrationError(
                "there is nothing to learn: every pair of a window is read in BF16",
                where="sequence_tokens, protect",
                expected=f"windows longer than sink + window = {protected_tokens} tokens",
                got=f"{recipe.sequence_tokens} tokens with protect=policy",
                next_step="use longer windows, or protect=none",
            )
    return recipes[0]


def _pending(folder: RunDir, recipes: list[Recipe]) -> dict[int, list[Recipe]]:
    """Return the recipes that each unfinished layer still needs."""
    finished = {recipe: folder.finished(recipe) for recipe in recipes}
    todo = {
        layer: [recipe for recipe in recipes if layer not in finished[recipe]]
        for layer in range(folder.num_layers)
    }
    return {layer: left for layer, left in todo.items() if left}


def _calibrate_here(
    work: LayerWork, captures: Iterable[LayerCapture], pending: dict[int, list[Recipe]]
) -> Iterator[tuple[int, int]]:
    """Calibrate layer after layer; yield (layer, recipes of it that are done)."""
    for capture in captures:
        layer = capture.layer
        for done in work.run(capture, pending[layer]):
            yield layer, done
        del capture  # before the next layer is recorded


class _RunProgress:
    """Turns what happens inside the layers into one count over the whole run.

    Args:
        progress: what is told, or None.
        layers: cache layers of the model.
        recipes: of the run; the capture of a layer counts as one more.
        pending: layers that are not finished.
    """

    def __init__(self, progress: Progress | None, layers: int, recipes: int, pending: int) -> None:
        self.progress = progress
        self.layers, self.parts = layers, recipes + 1
        self.finished = layers - pending
        self.in_work: dict[int, int] = {}  # layer -> its units
        self.told = 0

    def capturing(self, what: str, done: int, total: int) -> None:
        self._tell(what, PROGRESS_UNITS * done // total // self.parts)

    def calibrating(self, layer: int, done: int, recipes: list[Recipe]) -> None:
        what = f"layer {layer + 1}/{self.layers}"
        if done == len(recipes):
            self.in_work.pop(layer)
            self.finished += 1
        else:
            left = len(recipes) - done
            self.in_work[layer] = PROGRESS_UNITS * (self.parts - left) // self.parts
            what += f" {recipes[done].method} {recipes[done].scheme.name}"
        self._tell(what, 0)

    def _tell(self, what: str, captured: int) -> None:
        units = self.finished * PROGRESS_UNITS + sum(self.in_work.values()) + captured
        self.told = max(self.told, units)  # a layer that is passed through is captured in vain
        if self.progress is not None:
            self.progress(what, self.told, self.layers * PROGRESS_UNITS)
