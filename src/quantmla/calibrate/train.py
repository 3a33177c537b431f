"""Learn the transforms of one layer, each cached path on its own objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.clip import SEARCH_WINDOWS, common_clip, with_clips
from quantmla.calibrate.dither import dither_error, weighted_mean
from quantmla.calibrate.objective import ratio_of_sums
from quantmla.calibrate.optimise import Phase, optimise
from quantmla.calibrate.paths import ContentPath, RopePath
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
        for name in ROPE_TENSORS:
            setattr(learned, name, getattr(rope, name))
    return learned


def _train_content(
    layer: LayerWorkspace, recipe: Recipe, plain: LayerTransform, learned: LayerTransform
) -> None:
    """Train R_C, S_C and the content clip on the attention-output error.

    A first phase descends on the second-order form of that error, which needs no attention pass a
    step, sampled or as the dither model has it; the second phase is the exact objective.
    """
    scheme, config = recipe.scheme, recipe.train
    attention = layer.attention(protection_of(recipe))
    train, heldout = split_windows(recipe)
    proxy = _ContentProxy(layer, recipe)
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

    def exact_loss(step: int) -> torch.Tensor:
        window = train[step % len(train)]
        error, norm = attention.error(window, path(attention.sequence(window)[0]))
        return error / norm

    def error_of(read: ReadBack) -> float:
        return ratio_of_sums(attention.error(w, read(attention.sequence(w)[0])) for w in heldout)

    first_loss = proxy.dither_loss if recipe.dither else proxy.loss
    start, best = optimise(
        path,
        {
            "skew": config.lr_rotation,
            "log_scale": config.lr_scale,
            "clip.logit": config.lr_clip,
            "shift.steps": config.lr_shift,
        },
        [
            Phase(config.curvature_steps, lambda step: first_loss(path)),
            Phase(recipe.steps, exact_loss),
        ],
        lambda: error_of(path),
        config.warmup_steps,
        recipe.eval_every,
    )
    with torch.no_grad():
        rounding = error_of(lambda latent: read_content(plain, scheme, layer.gamma, latent))
        own = path.transform()
        if recipe.dither and recipe.clip_content == "learned":

            def error_with(clip: torch.Tensor) -> float:
                trial = replace(own, content_clip=clip)
                return ratio_of_sums(
                    attention.error(
                        w, read_content(trial, scheme, layer.gamma, attention.sequence(w)[0])
                    )
                    for w in train[:SEARCH_WINDOWS]
                )

            groups = group_count(proxy.rank, scheme.group)
            own.content_clip = common_clip(error_with, groups)
            best = error_of(lambda latent: read_content(own, scheme, layer.gamma, latent))
    learned.stats.update(_record("content", rounding, start, best))
    if best < rounding:
        learned.content_rotation, learned.content_scale = own.content_rotation, own.content_scale
        learned.content_clip, learned.content_shift = own.content_clip, own.content_shift


def _rope_part(recipe: Recipe) -> Recipe:
    """Return the recipe without what does not concern the RoPE path; equal parts train once."""
    scheme = recipe.scheme.model_copy(update={"content_bits": 16})
    rest = {"clip_content": None, "content_shift": False}
    return recipe.model_copy(update={"scheme": scheme, **rest})


def _train_rope(layer: LayerWorkspace, recipe: Recipe, plain: LayerTransform) -> LayerTransform:
    """Train R_P, S_P and the RoPE clip on position scores, then on their effect on the output.

    The held-out error that picks the state is the output error when the second phase runs, else the
    position-score error.
    """
    scheme, config = recipe.scheme, recipe.train
    protection = protection_of(recipe)
    scores, attention = layer.scores(protection), layer.attention(protection)
    train, heldout = split_windows(recipe)
    pairing = layer.pairing_cache
    start_scale = scores.balanced_scale(train, *pair_indices(scores.rope_dim, pairing))
    clip = _clip_while_training(recipe, recipe.clip_rope, scheme.rope_bits)
    path = RopePath(start_scale, scheme, pairing, clip).to(layer.device)
    proxy = None
    if recipe.dither or recipe.rope_shift or recipe.rope_feedback:
        proxy = _RopeProxy(layer, recipe)
    if recipe.rope_shift:
        with torch.no_grad():
            path = min(
                (
                    RopePath(start_scale, scheme, pairing, clip, shift, proxy.unit).to(layer.device)
                    for shift in proxy.shifts()
                ),
                key=proxy.dither_loss,
            )
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

    def error_of(read: ReadBack, windows: list[int] = heldout) -> float:
        return ratio_of_sums(objective(w, read(scores.key(w))) for w in windows)

    def as_stored() -> LayerTransform:
        return path.transform(proxy.gram if recipe.rope_feedback else None)

    def error_now() -> float:
        if not recipe.rope_feedback:
            return error_of(path)
        own = as_stored()
        return error_of(lambda key: read_rope(own, scheme, pairing, key))

    second_loss = (lambda step: proxy.dither_loss(path)) if recipe.dither else output_loss
    start, best = optimise(
        path,
        {
            "angle": config.lr_angle,
            "log_scale": config.lr_rope_scale,
            "clip.logit": config.lr_clip,
            "shift.steps": config.lr_shift,
        },
        [Phase(recipe.steps, score_loss), Phase(config.curvature_steps, second_loss)],
        error_now,
        config.warmup_steps,
        recipe.eval_every,
    )
    with torch.no_grad():
        rounding = error_of(lambda key: read_rope(plain, scheme, pairing, key))
        own = as_stored()
        if recipe.dither and recipe.clip_rope == "learned":

            def error_with(clip: torch.Tensor) -> float:
                trial = replace(own, rope_clip=clip)
                read = lambda key: read_rope(trial, scheme, pairing, key)  # noqa: E731
                return error_of(read, train[:SEARCH_WINDOWS])

            own.rope_clip = common_clip(error_with, group_count(scores.rope_dim, scheme.group))
            best = error_of(lambda key: read_rope(own, scheme, pairing, key))
    own.stats = _record("rope", rounding, start, best)
    if not best < rounding:  # NaN counts as not better
        return LayerTransform(rope_clip=plain.rope_clip, stats=own.stats)
    return own


def _clip_while_training(recipe: Recipe, clip: float | str | None, bits: int) -> float | str | None:
    """Return the clip of the training; the dither model knows none, it is searched afterwards."""
    if not (recipe.dither and clip == "learned"):
        return clip
    return DITHER_TWO_BIT_CLIP if bits <= 2 else None


class _ContentProxy:
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
        return self._error(path, *self._batch())

    def dither_loss(self, path: ContentPath) -> torch.Tensor:
        """Return the expected error of rounding a random batch of training tokens."""
        latent, weight = self._batch()
        stored, gram = path.stored(latent), path.gram(self.sensitivity.content.double())
        scheme = path.scheme
        return dither_error(stored, weight, gram, group=scheme.group, zero=scheme.zero)

    def heldout_error(self, path: ContentPath) -> float:
        """Return the proxy on all held-out tokens."""
        return float(self._error(path, *self.heldout))

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        latent, weight = self.train
        size = (min(self.batch_tokens, latent.shape[0]),)
        picked = torch.randint(latent.shape[0], size, generator=self.generator).to(latent.device)
        return latent[picked], weight[picked]

    def _error(self, path: ContentPath, latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        energy = self.sensitivity.content_energy
        return energy(path(latent) - latent, weight) / energy(latent, weight)


class _RopeProxy:
    """What the dither model and the feedback of the RoPE path need, from the sampled sensitivity.

    Args:
        layer: the captured layer.
        recipe: which windows; whether rounding has feedback.
    """

    def __init__(self, layer: LayerWorkspace, recipe: Recipe) -> None:
        pulls = layer.sensitivity(recipe).rope_pull
        scores = layer.scores(protection_of(recipe))
        rows = torch.cat([pull.flatten(0, 1) for pull in pulls.values()]).double()
        self.gram = rows.T @ rows / len(rows)
        self.key = torch.cat([scores.key(window) for window in pulls])
        self.weight = torch.cat([pull.square().sum(-1).mean(0) for pull in pulls.values()])
        self.unit = float(self.key.std(0).mean())
        self.feedback = recipe.rope_feedback

    def shifts(self) -> list[torch.Tensor]:
        """Return constants [P] to start from: none, mean key, the mean that counts, and between."""
        mean, counting = self.key.mean(0), weighted_mean(self.key, self.weight)
        shares = ((0, 0), (0.5, 0), (1, 0), (0, 0.5), (0, 1), (0.5, 0.5))
        return [a * mean + b * counting for a, b in shares]

    def dither_loss(self, path: RopePath) -> torch.Tensor:
        """Return the expected error of rounding all sampled tokens."""
        scheme = path.scheme
        return dither_error(
            path.stored(self.key),
            self.weight,
            path.gram(self.gram),
            group=scheme.group,
            zero=scheme.zero,
            feedback=self.feedback,
        )


def _record(name: str, rounding: float, start: float, best: float) -> dict[str, float]:
    return {
        f"{name}_error_plain": rounding,
        f"{name}_error_start": start,
        f"{name}_error": min(best, rounding),
    }
