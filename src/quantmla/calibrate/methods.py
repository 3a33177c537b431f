"""Every calibration method by name, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quantmla.calibrate import baselines

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
    from quantmla.calibrate.train import train_layer

    return train_layer(layer, recipe)


# name in a recipe -> method
METHODS: dict[str, Method] = {
    "rtn": _untrained(baselines.rtn),
    "smoothquant": _untrained(baselines.smoothquant),
    "quarot_online": _untrained(baselines.quarot_online),
    "quarot_offline": _untrained(baselines.quarot_offline),
    "quantmla": quantmla,
    "quantmla_plus": quantmla,  # the same with other defaults of the recipe
}
