"""Learn the transforms of one layer, each cached path on its own objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantmla.calibrate.clip import SEARCH_WINDOWS, common_clip, with_clips
from quantmla.calibrate.dither import weighted_mean
from quantmla.calibrate.objective import ratio_of_sums
from quantmla.calibrate.optimise import Phase, optimise
from quantmla.calibrate.paths import ContentPath, RopePath
from quantmla.calibrate.proxies import ContentProxy, RopeProxy
from quantmla.calibrate.readback import read_content, read_rope
from quantmla.calibrate.workspace import LayerWorkspace, protection_of, split_windows
from quantmla.quant import group_count
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform
from quantmla.transform.rope import pair_indices

if TYPE_CHECKING:
    from quantmla.config import Recipe

HADAMARD_SEEDS = 8
DITHER_TWO_BIT_CLIP = 0.8
ROPE_TENSORS = (
    "rope_angle",
    "rope_scale",
    "rope_clip",
    "rope_shift",
    "rope_order",
    "rope_feedback",
)
ReadBack = Callable[[torch.Tensor], torch.Tensor]
ErrorOf = Callable[..., float]  # of a ReadBack, on the held-out windows or on those given


def train_layer(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Learn both transforms of a layer; a path that does not beat plain rounding stays identity.

    Args:
        layer: the captured layer; training windows first, then the held-out windows.
        recipe: bits, steps, clip policy, protection, learning rates, extensions.

    Returns:
        The layer's transform; `stats` holds each path's held-out error: plain rounding, start and
        learned.

    Source: QuantMLA study, path-wise objectives; curvature phases, learned clip and extensions are
        own.
    """
    plain = with_clips(LayerTransform(), layer, recipe)
    learned = LayerTransform(content_clip=plain.content_clip, rope_clip=plain.rope_clip)
    if recipe.scheme.content_bits < 16:
        _train_content(layer, recipe, plain, learned)
    if recipe.scheme.rope_bits < 16:
        rope = layer.once(_rope_part(recipe), lambda: _train_rope(layer, recipe, plain))
        learned.stats.update(rope.stats)
        for name in ROPE_TENSORS:
            setattr(learned, name, getattr(rope, name))
    return learned


def shared_training(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Return a copy of what `train_layer` gives, learned once a layer for all methods that ask.

    Args: layer, recipe: as for `train_layer`; the method does not count.
    """
    key = (train_layer, recipe.model_copy(update={"method": "quantmla"}))
    learned = layer.once(key, lambda: train_layer(layer, recipe))
    return replace(learned, stats=dict(learned.stats))


def _train_content(
    layer: LayerWorkspace, recipe: Recipe, plain: LayerTransform, learned: LayerTransform
) -> None:
    """Train R_C, S_C, the content clip and shift on the attention-output error."""
    scheme, config, gamma = recipe.scheme, recipe.train, layer.gamma
    proxy = ContentProxy(layer, recipe)
    clip = _clip_while_training(recipe, recipe.clip_content, scheme.content_bits)
    shift = weighted_mean(*proxy.train) if recipe.content_shift else None
    with torch.no_grad():
        path = min(
            (
                ContentPath(random_hadamard(proxy.rank, layer.seed + n), scheme, clip, shift)
                for n in range(HADAMARD_SEEDS)
            ),
            key=lambda candidate: proxy.heldout_error(candidate.to(layer.device)),
        )
    rates = {
        "skew": config.lr_rotation,
        "log_scale": config.lr_scale,
        "clip.logit": config.lr_clip,
        "shift.steps": config.lr_shift,
    }
    start, best, error_of = fit_content(layer, recipe, path, rates, proxy)

    def read_of(transform: LayerTransform) -> ReadBack:
        return lambda latent: read_content(transform, scheme, gamma, latent)

    with torch.no_grad():
        rounding = error_of(read_of(plain))
        own = path.transform()
        if recipe.dither and recipe.clip_content == "learned":
            groups = group_count(proxy.rank, scheme.group)
            best = _search_clip(recipe, own, "content_clip", groups, error_of, read_of)
    learned.stats.update(error_record("content", rounding, start, best))
    if best < rounding:
        learned.content_rotation, learned.content_scale = own.content_rotation, own.content_scale
        learned.content_clip, learned.content_shift = own.content_clip, own.content_shift


def fit_content(
    layer: LayerWorkspace,
    recipe: Recipe,
    path: nn.Module,
    rates: dict[str, float],
    proxy: ContentProxy,
) -> tuple[float, float, ErrorOf]:
    """Train a round trip of the unit latent; curvature first, then the exact objective.

    The first phase descends on the second-order form of the error, which needs no attention pass a
    step, sampled or as the dither model has it.

    Args:
        layer: the captured layer.
        recipe: steps, windows, protection.
        path: module from latent to latent, left in its best held-out state.
        rates: peak learning rate of each parameter.
        proxy: of the first phase.

    Returns:
        Held-out error at the start, the smallest one, and the function that measures it.
    """
    config, attention = recipe.train, layer.attention(protection_of(recipe))
    train, heldout = split_windows(recipe)

    def exact_loss(step: int) -> torch.Tensor:
        window = train[step % len(train)]
        error, norm = attention.error(window, path(attention.sequence(window)[0]))
        return error / norm

    def error_of(read: ReadBack, windows: list[int] = heldout) -> float:
        return ratio_of_sums(attention.error(w, read(attention.sequence(w)[0])) for w in windows)

    first_loss = proxy.dither_loss if recipe.dither else proxy.loss
    start, best = optimise(
        path,
        rates,
        [
            Phase(config.curvature_steps, lambda step: first_loss(path)),
            Phase(recipe.steps, exact_loss),
        ],
        lambda: error_of(path),
        config.warmup_steps,
        recipe.eval_every,
    )
    return start, best, error_of


def _rope_part(recipe: Recipe) -> Recipe:
    """Return the recipe without what does not concern the RoPE path; equal parts train once."""
    scheme = recipe.scheme.model_copy(update={"content_bits": 16})
    rest = {"clip_content": None, "content_shift": False}
    return recipe.model_copy(update={"scheme": scheme, **rest})


def _train_rope(layer: LayerWorkspace, recipe: Recipe, plain: LayerTransform) -> LayerTransform:
    """Train R_P, S_P, the RoPE clip and shift; rounding may feed its errors back."""
    scheme, config, pairing = recipe.scheme, recipe.train, layer.pairing_cache
    scores, train = layer.scores(protection_of(recipe)), split_windows(recipe)[0]
    start_scale = scores.balanced_scale(train, *pair_indices(scores.rope_dim, pairing))
    clip = _clip_while_training(recipe, recipe.clip_rope, scheme.rope_bits)
    path = RopePath(start_scale, scheme, pairing, clip).to(layer.device)
    proxy = None
    if recipe.dither or recipe.rope_shift or recipe.rope_feedback:
        proxy = RopeProxy(layer, recipe)
    if recipe.rope_shift:
        with torch.no_grad():
            path = min(
                (
                    RopePath(start_scale, scheme, pairing, clip, shift, proxy.unit).to(layer.device)
                    for shift in proxy.shifts()
                ),
                key=proxy.dither_loss,
            )
    rates = {
        "angle": config.lr_angle,
        "log_scale": config.lr_rope_scale,
        "clip.logit": config.lr_clip,
        "shift.steps": config.lr_shift,
    }

    def read_of(transform: LayerTransform) -> ReadBack:
        return lambda key: read_rope(transform, scheme, pairing, key)

    def as_stored() -> LayerTransform:
        return path.transform(proxy.gram if recipe.rope_feedback else None)

    # rounding with feedback has no gradient: training goes without, held-out errors are with it
    read_now = (lambda: read_of(as_stored())) if recipe.rope_feedback else None
    start, best, error_of = fit_rope(layer, recipe, path, rates, proxy, read_now)
    with torch.no_grad():
        rounding = error_of(read_of(plain))
        own = as_stored()
        if recipe.dither and recipe.clip_rope == "learned":
            groups = group_count(scores.rope_dim, scheme.group)
            best = _search_clip(recipe, own, "rope_clip", groups, error_of, read_of)
    own.stats = error_record("rope", rounding, start, best)
    if not best < rounding:  # NaN counts as not better
        return LayerTransform(rope_clip=plain.rope_clip, stats=own.stats)
    return own


def fit_rope(
    layer: LayerWorkspace,
    recipe: Recipe,
    path: nn.Module,
    rates: dict[str, float],
    proxy: RopeProxy | None = None,
    read_now: Callable[[], ReadBack] | None = None,
) -> tuple[float, float, ErrorOf]:
    """Train a round trip of the RoPE key; position scores first, then their effect on the output.

    The held-out error that picks the state is the output error when the second phase runs, else the
    position-score error.

    Args:
        layer, recipe, path, rates: as for `fit_content`.
        proxy: of the second phase, for the dither model.
        read_now: gives the round trip that held-out windows measure; the path itself if None.

    Returns:
        As `fit_content`.
    """
    config, protection = recipe.train, protection_of(recipe)
    scores, attention = layer.scores(protection), layer.attention(protection)
    train, heldout = split_windows(recipe)
    on_output = config.curvature_steps > 0
    objective = attention.rope_error if on_output else scores.error

    def score_loss(step: int) -> torch.Tensor:
        window = train[step % len(train)]
        error, norm = scores.error(window, path(scores.key(window)))
        return error / norm

    def output_loss(step: int) -> torch.Tensor:
        if recipe.dither:
            return proxy.dither_loss(path)
        window = train[step % min(len(train), config.curvature_windows)]
        key = scores.key(window)
        sensitivity = layer.sensitivity(recipe)
        error = sensitivity.rope_energy(path(key) - key, window)
        return error / sensitivity.rope_energy(key, window)

    def error_of(read: ReadBack, windows: list[int] = heldout) -> float:
        return ratio_of_sums(objective(w, read(scores.key(w))) for w in windows)

    start, best = optimise(
        path,
        rates,
        [Phase(recipe.steps, score_loss), Phase(config.curvature_steps, output_loss)],
        lambda: error_of(path if read_now is None else read_now()),
        config.warmup_steps,
        recipe.eval_every,
    )
    return start, best, error_of


def _clip_while_training(recipe: Recipe, clip: float | str | None, bits: int) -> float | str | None:
    """Return the clip of the training; the dither model knows none, it is searched afterwards."""
    if not (recipe.dither and clip == "learned"):
        return clip
    return DITHER_TWO_BIT_CLIP if bits <= 2 else None


def _search_clip(
    recipe: Recipe,
    own: LayerTransform,
    name: str,
    groups: int,
    error_of: ErrorOf,
    read_of: Callable[[LayerTransform], ReadBack],
) -> float:
    """Set one clip ratio for all groups by the error on training windows; return the held-out."""
    windows = split_windows(recipe)[0][:SEARCH_WINDOWS]
    setattr(
        own,
        name,
        common_clip(lambda clip: error_of(read_of(replace(own, **{name: clip})), windows), groups),
    )
    return error_of(read_of(own))


def error_record(name: str, rounding: float, start: float, best: float) -> dict[str, float]:
    """Return what a layer's statistics say about one path."""
    return {
        f"{name}_error_plain": rounding,
        f"{name}_error_start": start,
        f"{name}_error": min(best, rounding),
    }
