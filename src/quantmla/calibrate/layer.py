"""One captured layer for all its recipes: learn, check, write."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.joint import JOINT_SEQUENCES, joint_check
from quantmla.calibrate.methods import METHODS
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.files import storage_errors

if TYPE_CHECKING:
    from quantmla.calibrate.record import LayerCapture
    from quantmla.calibrate.rundir import RunDir
    from quantmla.config import Recipe


@dataclass(frozen=True)
class LayerWork:
    """What to do with a captured layer; the same for every layer of a run.

    Args:
        folder: where the transforms go.
        pairing_cache: RoPE pairing of the cached key.
        device: where to compute.
    """

    folder: RunDir
    pairing_cache: str
    device: str

    def run(self, capture: LayerCapture, recipes: Sequence[Recipe]) -> Iterator[int]:
        """Calibrate a layer, recipe by recipe, and write each transform.

        Args:
            capture: activations and weights of the layer.
            recipes: what is still to be done on it.

        Returns:
            Iterator over how many of the recipes are done: 0 first, len(recipes) last.
        """
        workspaces: dict[int, LayerWorkspace] = {}
        for number, recipe in enumerate(recipes):
            yield number
            seed = layer_seed(recipe, capture.layer)
            make = LayerWorkspace
            layer = workspaces.setdefault(
                seed, make(capture, self.pairing_cache, seed, self.device)
            )
            self._calibrate(layer, recipe)
        yield len(recipes)

    def _calibrate(self, layer: LayerWorkspace, recipe: Recipe) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(layer.seed)
            transform = METHODS[recipe.method](layer, recipe)
        heldout = range(recipe.sequences, recipe.sequences + recipe.heldout_sequences)
        transform.stats.update(
            joint_check(
                layer.attention(),
                transform,
                recipe.scheme,
                self.pairing_cache,
                heldout[:JOINT_SEQUENCES],
            )
        )
        path = self.folder.layer_path(recipe, layer.capture.layer)
        with storage_errors(path):
            transform.save(path)


def layer_seed(recipe: Recipe, layer: int) -> int:
    """Return the seed of one layer, a function of the recipe's seed and the layer alone."""
    digest = hashlib.sha256(f"{recipe.seed}/{layer}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
