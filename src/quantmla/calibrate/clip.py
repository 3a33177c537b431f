"""Clip ratios for methods that do not train them: constant, or each group's best of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.readback import read_rope, restore_content, store_content
from quantmla.calibrate.workspace import LayerWorkspace, protection_of, split_windows
from quantmla.quant.affine import fake_quantize, group_count

if TYPE_CHECKING:
    from quantmla.config import Recipe
    from quantmla.transform.layer import LayerTransform

RATIOS = tuple(round(1.0 - 0.05 * step, 2) for step in range(13))  # 1.00 ... 0.40
SEARCH_WINDOWS = 2


def with_clips(transform: LayerTransform, layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Return the transform with the clip ratios that its recipe asks for.

    Args:
        transform: everything but the clips.
        layer: the captured layer.
        recipe: `clip_content` and `clip_rope`: None, a ratio, or "learned" for the grid search.

    Returns:
        A copy; a path of 16 bits has no clip.

    Source: own.
    """
    scheme, capture = recipe.scheme, layer.capture
    groups = {
        "content": group_count(capture.gamma.shape[0], scheme.group),
        "rope": group_count(capture.k_rope.shape[-1], scheme.group),
    }
    bits = {"content": scheme.content_bits, "rope": scheme.rope_bits}
    clips = {}
    for path, ratio in (("content", recipe.clip_content), ("rope", recipe.clip_rope)):
        if ratio is None or bits[path] == 16:
            continue
        if ratio != "learned":
            clips[path] = torch.full((groups[path],), float(ratio))
        elif path == "content":
            clips[path] = search_content_clip(transform, layer, recipe)
        else:
            clips[path] = search_rope_clip(transform, layer, recipe)
    return replace(transform, content_clip=clips.get("content"), rope_clip=clips.get("rope"))


def search_content_clip(
    transform: LayerTransform, layer: LayerWorkspace, recipe: Recipe
) -> torch.Tensor:
    """Pick the ratio of each group whose quantisation error moves the attention output least.

    The output error is taken to second order. Starting from the best common ratio, each group in
    turn takes its best, given the others.

    Args:
        transform, layer, recipe: as for `with_clips`.

    Returns:
        [G, float32] ratios out of RATIOS.

    Source: own.
    """
    scheme, sensitivity = recipe.scheme, layer.sensitivity(recipe)
    attention = layer.attention(protection_of(recipe))
    windows = [
        w for w in split_windows(recipe)[0][:SEARCH_WINDOWS] if w in sensitivity.content_weight
    ]
    unit = torch.cat([attention.sequence(w)[0] for w in windows])
    weight = torch.cat([sensitivity.content_weight[w] for w in windows])
    stored = store_content(transform, layer.gamma, unit)
    errors = torch.stack(
        [
            fake_quantize(
                stored, scheme.content_bits, group=scheme.group, zero=scheme.zero, clip=ratio
            )
            - stored
            for ratio in RATIOS
        ]
    )

    def loss(error: torch.Tensor) -> float:
        back = restore_content(transform, layer.gamma, error)
        return float(sensitivity.content_energy(back, weight))

    common = min(range(len(RATIOS)), key=lambda number: loss(errors[number]))
    current = errors[common].clone()
    picked = []
    for start in range(0, stored.shape[-1], scheme.group):
        part = slice(start, start + scheme.group)
        losses = []
        for candidate in errors:
            current[:, part] = candidate[:, part]
            losses.append(loss(current))
        picked.append(losses.index(min(losses)))
        current[:, part] = errors[picked[-1]][:, part]
    return torch.tensor(RATIOS)[torch.tensor(picked)]


def search_rope_clip(
    transform: LayerTransform, layer: LayerWorkspace, recipe: Recipe
) -> torch.Tensor:
    """Pick the ratio of each group that changes the position scores least, group after group.

    Args:
        transform, layer, recipe: as for `with_clips`.

    Returns:
        [G, float32] ratios out of RATIOS.

    Source: own.
    """
    scores = layer.scores(protection_of(recipe))
    windows = split_windows(recipe)[0][:SEARCH_WINDOWS]
    clip = torch.ones(group_count(scores.rope_dim, recipe.scheme.group))

    def loss(candidate: torch.Tensor) -> float:
        trial = replace(transform, rope_clip=candidate)
        return sum(
            float(
                scores.error(
                    w, read_rope(trial, recipe.scheme, layer.pairing_cache, scores.key(w))
                )[0]
            )
            for w in windows
        )

    for group in range(clip.numel()):
        trials = clip.repeat(len(RATIOS), 1)
        trials[:, group] = torch.tensor(RATIOS)
        losses = [loss(trial) for trial in trials]
        clip = trials[losses.index(min(losses))]
    return clip


def common_clip(error_of: Callable[[torch.Tensor], float], groups: int) -> torch.Tensor:
    """Return the ratio, the same for all groups, that a measured error likes best.

    Ratios are tried from 1 downwards, until two in a row are worse than the best one.

    Args:
        error_of: error of a path under ratios [G, float32].
        groups: G.

    Returns:
        [G, float32].

    Source: own.
    """
    best, picked, worse = math.inf, 1.0, 0
    for ratio in RATIOS:
        error = error_of(torch.full((groups,), ratio))
        if error < best:
            best, picked, worse = error, ratio, 0
        else:
            worse += 1
        if worse == 2:
            break
    return torch.full((groups,), picked)
