"""Calibrated transforms of single paths, put together into those of a cell.

Content and RoPE path are calibrated apart, so one recipe a method, path and width serves every
cell, and the transform of a cell is the same as that of a recipe of both paths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path

import torch

from quantmla.ablate.cells import Cell
from quantmla.calibrate.capture import Progress
from quantmla.calibrate.run import run_calibration
from quantmla.calibrate.rundir import MANIFEST_NAME, RunDir, recipe_name
from quantmla.checkpoint.header import read_json
from quantmla.config import KVScheme, Recipe, method_defaults
from quantmla.transform.layer import LayerTransform

# At 2 bits clipping matters more than any transform: every method gets it there, and none above.
CLIPPED_CONTENT_BITS = 2


@dataclass(frozen=True)
class Calibrations:
    """The calibration runs below one folder, and what they gave.

    Args:
        folder: of all runs.
        base: recipe whose method, scheme and clips are replaced.
        num_layers: cache layers of the model.
        found: runs of finished recipes, filled by use.
    """

    folder: Path
    base: Recipe
    num_layers: int
    found: dict[Recipe, RunDir] = field(default_factory=dict)

    def recipes(self, cells: list[Cell]) -> list[Recipe]:
        """Return the recipes of some cells, each once."""
        found: dict[Recipe, None] = {}
        for cell in cells:
            for recipe in self._paths(cell):
                if recipe is not None:
                    found[recipe] = None
        return list(found)

    def missing(self, cells: list[Cell]) -> list[Recipe]:
        """Return the recipes of some cells that no run has finished."""
        return [recipe for recipe in self.recipes(cells) if self._find(recipe) is None]

    def run(
        self,
        cells: list[Cell],
        source: Path,
        text: str,
        *,
        device: str,
        workers: int,
        progress: Progress | None,
    ) -> None:
        """Calibrate what is missing, in one pass over the model; goes on where a run stopped.

        Raises: as `run_calibration`.
        """
        recipes = self.missing(cells)
        if not recipes:
            return
        digest = sha256("".join(recipe.sha256() for recipe in recipes).encode()).hexdigest()
        run_calibration(
            source,
            text,
            recipes,
            self.folder / digest[:12],
            resume=True,
            workers=workers,
            device=device,
            progress=progress,
        )

    def transforms(self, cell: Cell) -> list[LayerTransform]:
        """Return the transforms of a cell, one a cache layer."""
        return [self.transform(cell, layer) for layer in range(self.num_layers)]

    def transform(self, cell: Cell, layer: int) -> LayerTransform:
        """Return the transform of a cell on one layer."""
        sides = [
            LayerTransform()
            if recipe is None
            else LayerTransform.load(self._find(recipe).layer_path(recipe, layer))
            for recipe in self._paths(cell)
        ]
        return combined(*sides)

    def _paths(self, cell: Cell) -> tuple[Recipe | None, Recipe | None]:
        """The recipe of either path; None at 16 bits, where nothing is calibrated."""
        form, scheme = cell.format, self.base.scheme
        recipes = []
        for method, path, bits in (
            (cell.content, "content", form.content_bits),
            (cell.rope, "rope", form.rope_bits),
        ):
            if bits == 16:
                recipes.append(None)
                continue
            other = "rope" if path == "content" else "content"
            widths = scheme.model_dump() | {f"{path}_bits": bits, f"{other}_bits": 16}
            clip = "learned" if path == "content" and bits <= CLIPPED_CONTENT_BITS else None
            changes = {"method": method, "scheme": KVScheme(**widths)} | method_defaults(method)
            if method != "quantmla_plus":  # which searches its clips at any width
                changes["clip_content"] = clip
            recipes.append(self.base.model_copy(update=changes))
        return tuple(recipes)

    def _find(self, recipe: Recipe) -> RunDir | None:
        """A run that finished this recipe on all layers."""
        if recipe in self.found:
            return self.found[recipe]
        for manifest in sorted(self.folder.glob(f"*/{MANIFEST_NAME}")):
            run = RunDir(manifest.parent, self.num_layers)
            named = recipe_name(recipe) in read_json(manifest)["recipes"]
            layers = range(self.num_layers)
            if named and all(run.layer_path(recipe, layer).is_file() for layer in layers):
                self.found[recipe] = run
                return run
        return None


def combined(content: LayerTransform, rope: LayerTransform) -> LayerTransform:
    """Return a transform with the content path of one and the RoPE path of another.

    Source: own.
    """
    names = [field.name for field in fields(LayerTransform) if field.name.startswith("rope_")]
    return replace(content, **{name: getattr(rope, name) for name in names}, stats={})


def foldable(transform: LayerTransform) -> LayerTransform:
    """Return a transform without the matrices that a simulated cache applies.

    Source: own.
    """
    return replace(transform, content_matrix=None, rope_matrix=None)


def same(first: list[LayerTransform] | None, second: list[LayerTransform]) -> bool:
    """Tell whether two lists of transforms change weights alike.

    Source: own.
    """
    names = ("content_rotation", "content_scale", "rope_angle", "rope_scale")
    if first is None:
        return False
    pairs = [
        (getattr(a, n), getattr(b, n)) for a, b in zip(first, second, strict=True) for n in names
    ]
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)
