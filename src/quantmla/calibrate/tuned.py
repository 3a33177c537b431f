"""Method smoothquant_tuned: the exponent of each path is chosen on held-out windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.baselines import smoothed
from quantmla.calibrate.clip import with_clips
from quantmla.calibrate.objective import ratio_of_sums
from quantmla.calibrate.readback import read_content, read_rope
from quantmla.calibrate.workspace import LayerWorkspace, protection_of, split_windows
from quantmla.transform.layer import LayerTransform

if TYPE_CHECKING:
    from quantmla.config import Recipe

EXPONENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def smoothquant_tuned(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Pick the exponent of either path whose attention output is closest on held-out windows.

    Each candidate has the clip ratios that the recipe gives it.

    Args:
        layer: the captured layer.
        recipe: bits, clip policy, windows.

    Returns:
        Scales only; `stats` names both exponents.

    Source: SmoothQuant, with the search over its exponent that its authors advise.
    """
    attention, scheme = layer.attention(protection_of(recipe)), recipe.scheme
    heldout = split_windows(recipe)[1]
    errors: dict[str, dict[float, float]] = {"content": {}, "rope": {}}
    candidates = {}
    for exponent in EXPONENTS:
        plain = smoothed(layer.capture, recipe, layer.pairing_cache, exponent)
        candidates[exponent] = transform = with_clips(plain, layer, recipe)
        with torch.no_grad():  # the search of clips above samples gradients
            content, rope = [], []
            for window in heldout:
                latent, k_rope, _ = attention.sequence(window)
                back = read_content(transform, scheme, layer.gamma, latent)
                content.append(attention.error(window, back))
                back = read_rope(transform, scheme, layer.pairing_cache, k_rope)
                rope.append(attention.rope_error(window, back))
        errors["content"][exponent] = ratio_of_sums(content)
        errors["rope"][exponent] = ratio_of_sums(rope)
    best = {path: min(found, key=found.__getitem__) for path, found in errors.items()}
    content, rope = candidates[best["content"]], candidates[best["rope"]]
    return replace(
        content,
        rope_scale=rope.rope_scale,
        rope_clip=rope.rope_clip,
        stats={f"{path}_exponent": exponent for path, exponent in best.items()},
    )
