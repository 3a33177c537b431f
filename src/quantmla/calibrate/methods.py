"""Every calibration method by name, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quantmla.calibrate import baselines
from quantmla.config import LEARNED
from quantmla.errors import CalibrationError

if TYPE_CHECKING:
    from quantmla.calibrate.workspace import LayerWorkspace
    from quantmla.config import Recipe
    from quantmla.transform.layer import LayerTransform

Method = Callable[["LayerWorkspace", "Recipe"], "LayerTransform"]


def _untrained(transform_of: Callable[..., LayerTransform]) -> Method:
    """Give a closed-form method the clip ratios of its recipe."""

    def method(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
        from quantmla.calibrate.clip import with_clips

        transform = transform_of(layer.capture, recipe, layer.pairing_cache, layer.seed)
        return with_clips(transform, layer, recipe)

    return method


def quantmla(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Learn both transforms and the clips; see `train.train_layer`."""
    from quantmla.calibrate.train import shared_training

    return shared_training(layer, recipe)


def smoothquant_tuned(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Search SmoothQuant's exponents; see `tuned.smoothquant_tuned`."""
    from quantmla.calibrate.tuned import smoothquant_tuned as method

    return method(layer, recipe)


def flatquant(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Learn unconstrained matrices; see `flatquant.flatquant`."""
    from quantmla.calibrate.flatquant import flatquant as method

    return method(layer, recipe)


# name in a recipe -> method
METHODS: dict[str, Method] = {
    "rtn": _untrained(baselines.rtn),
    "smoothquant": _untrained(baselines.smoothquant),
    "smoothquant_tuned": smoothquant_tuned,
    "quarot_online": _untrained(baselines.quarot_online),
    "quarot_offline": _untrained(baselines.quarot_offline),
    "quarot_angles": _untrained(baselines.quarot_angles),
    "quantmla": quantmla,
    "quantmla_plus": quantmla,  # the same with other defaults of the recipe
    "flatquant": flatquant,
}
TRAINED = (*LEARNED, "flatquant")
UNFOLDABLE = ("flatquant",)  # a cache must apply them at run time; see `LayerTransform`


def refuse_unfoldable(recipe: Recipe) -> None:
    """Refuse a recipe whose result no checkpoint can hold, before anything is learned.

    Raises: CalibrationError.
    Source: own.
    """
    if recipe.method in UNFOLDABLE:
        raise CalibrationError(
            "what this method learns cannot be folded into the weights",
            where=f"method {recipe.method}",
            expected=", ".join(name for name in METHODS if name not in UNFOLDABLE),
            got="dense matrices behind the norm and behind RoPE, which a cache would apply online",
            next_step="measure it with `quantmla ablate`",
        )
