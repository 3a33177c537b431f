"""Stand-ins for the errors that a cache makes, from the sampled sensitivity of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.dither import dither_error, weighted_mean
from quantmla.calibrate.workspace import LayerWorkspace, protection_of, split_windows

if TYPE_CHECKING:
    from quantmla.calibrate.paths import ContentPath, RopePath
    from quantmla.config import Recipe


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


class RopeProxy:
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
