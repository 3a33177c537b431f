"""Calibrate several recipes in one pass over a model: layers outermost, recipes inside."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantmla.calibrate.capture import Progress, capture_layers, decoder_of
from quantmla.calibrate.data import load_windows
from quantmla.calibrate.joint import JOINT_SEQUENCES, joint_check
from quantmla.calibrate.methods import METHODS
from quantmla.calibrate.rundir import RunDir, build_manifest
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.checkpoint.block import new_block
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.plan import AttentionLayers
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import Recipe
from quantmla.errors import CalibrationError
from quantmla.files import storage_errors
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
    progress: Progress | None = None,
    tokenizer: Any = None,
    device: str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    storage_dtype: torch.dtype = torch.float32,
) -> CalibrationRun:
    """Learn the transforms of every layer for every recipe, with one decoder layer in memory.

    A killed run that is resumed writes the same bytes as one that was not interrupted.

    Args:
        source: MLA checkpoint folder, not fused.
        text: UTF-8 text file, plain or .gz, or the name of a shipped slice.
        recipes: what to calibrate; they must agree on the windows.
        run_dir: folder for the transforms of each layer; new or empty unless `resume`.
        resume: go on with what an earlier run finished in `run_dir`.
        progress: called with (what, units done, units in all).
        tokenizer: of the model; read from `source` when None.
        device: where layers run and transforms are trained.
        compute_dtype: dtype of the model's forward pass.
        storage_dtype: dtype of waiting hidden states and queries; bfloat16 halves the memory.

    Returns:
        CalibrationRun.

    Raises:
        TextError: the text cannot be used.
        CalibrationError: recipes or run folder cannot be used, or a layer overflows.
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
    settings = {
        "compute_dtype": str(compute_dtype).removeprefix("torch."),
        "storage_dtype": str(storage_dtype).removeprefix("torch."),
        "device": device,
        "threads": torch.get_num_threads(),
    }
    folder = RunDir(run_dir, layers.dims.num_cache_layers)
    with folder_lock(run_dir):
        folder.open(build_manifest(layers, data, recipes, settings), resume)
        todo = {
            recipe: set(range(folder.num_layers)) - folder.finished(recipe) for recipe in recipes
        }
        open_layers = set().union(*todo.values())
        prefixes = [names.prefix for names in layers.names]
        start = None
        if open_layers:
            start = folder.load_hidden(decoder_of(prefixes[min(open_layers)]))
        report = _LayerProgress(
            progress, folder.num_layers, len(recipes), min(open_layers, default=folder.num_layers)
        )
        captures = capture_layers(
            source,
            data.windows.ids,
            compute_dtype=compute_dtype,
            storage_dtype=storage_dtype,
            device=device,
            start=start,
            skip=set(range(folder.num_layers)) - open_layers,
            on_hidden=folder.save_hidden,
            progress=report.capturing,
        )
        pairing_cache = family_of(reader.config).rope_pairing_cache(reader.config)
        for capture in captures:
            pending = [recipe for recipe in recipes if capture.layer in todo[recipe]]
            _calibrate_layer(capture, pending, folder, pairing_cache, device, report)
            del capture  # before the next layer is recorded
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
        if recipe.method == "quantmla" and void:
            raise CalibrationError(
                "there is nothing to learn: every pair of a window is read in BF16",
                where="sequence_tokens, protect",
                expected=f"windows longer than sink + window = {protected_tokens} tokens",
                got=f"{recipe.sequence_tokens} tokens with protect=policy",
                next_step="use longer windows, or protect=none",
            )
    return recipes[0]


def layer_seed(recipe: Recipe, layer: int) -> int:
    """Return the seed of one layer, a function of the recipe's seed and the layer alone."""
    digest = hashlib.sha256(f"{recipe.seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _calibrate_layer(
    capture: LayerCapture,
    recipes: list[Recipe],
    folder: RunDir,
    pairing_cache: str,
    device: str,
    report: _LayerProgress,
) -> None:
    workspaces: dict[int, LayerWorkspace] = {}
    for number, recipe in enumerate(recipes):
        report.calibrating(capture.layer, number, recipe)
        seed = layer_seed(recipe, capture.layer)
        layer = workspaces.setdefault(seed, LayerWorkspace(capture, pairing_cache, seed, device))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            transform = METHODS[recipe.method](layer, recipe)
        heldout = range(recipe.sequences, recipe.sequences + recipe.heldout_sequences)
        transform.stats.update(
            joint_check(
                layer.attention(),
                transform,
                recipe.scheme,
                pairing_cache,
                heldout[:JOINT_SEQUENCES],
            )
        )
        path = folder.layer_path(recipe, capture.layer)
        with storage_errors(path):
            transform.save(path)
    report.calibrating(capture.layer, len(recipes), None)


class _LayerProgress:
    """Turns what happens inside a layer into one count over the whole run."""

    def __init__(self, progress: Progress | None, layers: int, recipes: int, first: int) -> None:
        self.progress = progress
        self.layers, self.parts = layers, recipes + 1  # capture counts as one recipe
        self.before = first

    def capturing(self, what: str, done: int, total: int) -> None:
        self._tell(
            what, self.before * PROGRESS_UNITS + PROGRESS_UNITS * done // total // self.parts
        )

    def calibrating(self, layer: int, number: int, recipe: Recipe | None) -> None:
        self.before = layer + (recipe is None)
        what = f"layer {layer + 1}/{self.layers}"
        if recipe is not None:
            what += f" {recipe.method} {recipe.scheme.name}"
        inside = 0 if recipe is None else PROGRESS_UNITS * (number + 1) // self.parts
        self._tell(what, self.before * PROGRESS_UNITS + inside)

    def _tell(self, what: str, done: int) -> None:
        if self.progress is not None:
            self.progress(what, done, self.layers * PROGRESS_UNITS)
