"""Learn the transforms of one layer, each cached path on its own objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantmla.calibrate.clip import with_clips
from quantmla.calibrate.objective import ratio_of_sums
from quantmla.calibrate.optimise import Phase, optimise
from quantmla.calibrate.paths import ContentPath, RopePath
from quantmla.calibrate.readback import read_content, read_rope
from quantmla.calibrate.workspace import LayerWorkspace, protection_of, split_windows
from quantmla.transform.content import polar, random_hadamard
from quantmla.transform.layer import LayerTransform
from quantmla.transform.rope import pair_indices

if TYPE_CHECKING:
    from quantmla.config import Recipe

HADAMARD_SEEDS = 8
ReadBack = Callable[[torch.Tensor], torch.Tensor]


def train_layer(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Learn both transforms of a layer; a path that does not beat plain rounding stays identity.

    Args:
        layer: the captured layer; training windows first, then the held-out windows.
        recipe: bits, steps, clip policy, protection, learning rates.

    Returns:
        The layer's transform; `stats` holds each path's held-out error: plain rounding, start and
        learned.

    Source: QuantMLA study, path-wise objectives; curvature phases and learned clip are own.
    """
    plain = with_clips(LayerTransform(), layer, recipe)
    learned = LayerTransform(content_clip=plain.content_clip, rope_clip=plain.rope_clip)
    if recipe.scheme.content_bits < 16:
        _train_content(layer, recipe, plain, learned)
    if recipe.scheme.rope_bits < 16:
        rope = layer.once(_rope_part(recipe), lambda: _train_rope(layer, recipe, plain))
        learned.stats.update(rope.stats)
        learned.rope_angle, learned.rope_scale = rope.rope_angle, rope.rope_scale
        learned.rope_clip = rope.rope_clip
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
    """Train R_C, S_C and the content clip on the attention-output error.

    A first phase descends on the second-order form of that error, which needs no attention pass a
    step; the second phase is the exact objective.
    """
    scheme, config = recipe.scheme, recipe.train
    proxy = ContentProxy(layer, recipe)
    with torch.no_grad():
        path = min(
            (
                ContentPath(
                    random_hadamard(proxy.rank, layer.seed + n), scheme, recipe.clip_content
                )
                for n in range(HADAMARD_SEEDS)
            ),
            key=lambda candidate: proxy.heldout_error(candidate.to(layer.device)),
        )

    rates = {"skew": config.lr_rotation, "log_scale": config.lr_scale, "clip.logit": config.lr_clip}
    start, best, error_of = fit_content(layer, recipe, path, rates, proxy)
    with torch.no_grad():
        rounding = error_of(lambda latent: read_content(plain, scheme, layer.gamma, latent))
    learned.stats.update(error_record("content", rounding, start, best))
    if best < rounding:
        learned.content_rotation = polar(path.rotation().cpu())
        learned.content_scale = path.scale().detach().double().cpu()
        learned.content_clip = path.clip.values()


def fit_content(
    layer: LayerWorkspace,
    recipe: Recipe,
    path: nn.Module,
    rates: dict[str, float],
    proxy: ContentProxy,
) -> tuple[float, float, Callable[[ReadBack], float]]:
    """Train a round trip of the unit latent; curvature first, then the exact objective.

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

    def error_of(read: ReadBack) -> float:
        return ratio_of_sums(attention.error(w, read(attention.sequence(w)[0])) for w in heldout)

    start, best = optimise(
        path,
        rates,
        [
            Phase(config.curvature_steps, lambda step: proxy.loss(path)),
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
    return recipe.model_copy(update={"scheme": scheme, "clip_content": None})


def _train_rope(layer: LayerWorkspace, recipe: Recipe, plain: LayerTransform) -> LayerTransform:
    """Train R_P, S_P and the RoPE clip on position scores, then on their effect on the output.

    The held-out error that picks the state is the output error when the second phase runs, else the
    position-score error.
    """
    scheme, config = recipe.scheme, recipe.train
    scores, train = layer.scores(protection_of(recipe)), split_windows(recipe)[0]
    start_scale = scores.balanced_scale(train, *pair_indices(scores.rope_dim, layer.pairing_cache))
    path = RopePath(start_scale, scheme, layer.pairing_cache, recipe.clip_rope).to(layer.device)
    rates = {
        "angle": config.lr_angle,
        "log_scale": config.lr_rope_scale,
        "clip.logit": config.lr_clip,
    }
    start, best, error_of = fit_rope(layer, recipe, path, rates)
    with torch.no_grad():
        rounding = error_of(lambda key: read_rope(plain, scheme, layer.pairing_cache, key))
    stats = error_record("rope", rounding, start, best)
    if not best < rounding:  # NaN counts as not better
        return LayerTransform(rope_clip=plain.rope_clip, stats=stats)
    return LayerTransform(
        rope_angle=path.angle.detach().double().cpu(),
        rope_scale=path.scale().detach().double().cpu(),
        rope_clip=path.clip.values(),
        stats=stats,
    )


def fit_rope(
    layer: LayerWorkspace, recipe: Recipe, path: nn.Module, rates: dict[str, float]
) -> tuple[float, float, Callable[[ReadBack], float]]:
    """Train a round trip of the RoPE key; position scores first, then their effect on the output.

    Args: layer, recipe, path, rates: as for `fit_content`.

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
        window = train[step % min(len(train), config.curvature_windows)]
        key = scores.key(window)
        sensitivity = layer.sensitivity(recipe)
        error = sensitivity.rope_energy(path(key) - key, window)
        return error / sensitivity.rope_energy(key, window)

    def error_of(read: ReadBack) -> float:
        return ratio_of_sums(objective(w, read(scores.key(w))) for w in heldout)

    start, best = optimise(
        path,
        rates,
        [Phase(recipe.steps, score_loss), Phase(config.curvature_steps, output_loss)],
        lambda: error_of(path),
        config.warmup_steps,
        recipe.eval_every,
    )
    return start, best, error_of


class ContentProxy:
    """Second-order stand-in for the content objective: token-weighted error in the mean block.

    Args:
        layer: the captured layer.
        recipe: which windows, and tokens a batch.
    """

    def __init__(self, layer: LayerWorkspace, recipe: Recipe) -> None:
        attention = layer.attention(protection_of(recipe))
        self.sensitivity = layer.sensitivity(recipe)
        self.rank = self.sensitivity.content.shape[0]
        self.batch_tokens = recipe.train.curvature_batch_tokens
        self.generator = torch.Generator().manual_seed(layer.seed)
        parts = []
        for windows in split_windows(recipe):
            known = [w for w in windows if w in self.sensitivity.content_weight]
            latent = torch.cat([attention.sequence(w)[0] for w in known])
            parts.append((latent, torch.cat([self.sensitivity.content_weight[w] for w in known])))
        self.train, self.heldout = parts

    def loss(self, path: ContentPath) -> torch.Tensor:
        """Return the proxy on a random batch of training tokens."""
        latent, weight = self.train
        size = (min(self.batch_tokens, latent.shape[0]),)
        picked = torch.randint(latent.shape[0], size, generator=self.generator).to(latent.device)
        return self._error(path, latent[picked], weight[picked])

    def heldout_error(self, path: ContentPath) -> float:
        """Return the proxy on all held-out tokens."""
        return float(self._error(path, *self.heldout))

    def _error(self, path: ContentPath, latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        energy = self.sensitivity.content_energy
        return energy(path(latent) - latent, weight) / energy(latent, weight)


def error_record(name: str, rounding: float, start: float, best: float) -> dict[str, float]:
    """Return what a layer's statistics say about one path."""
    return {
        f"{name}_error_plain": rounding,
        f"{name}_error_start": start,
        f"{name}_error": min(best, rounding),
    }
