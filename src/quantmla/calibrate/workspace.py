"""What several recipes share while one layer is in memory: attention, scores, sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from quantmla.calibrate.curvature import OutputSensitivity
from quantmla.calibrate.objective import LayerAttention, Protection
from quantmla.calibrate.scores import PositionScores

if TYPE_CHECKING:
    from quantmla.calibrate.record import LayerCapture
    from quantmla.config import Recipe


class LayerWorkspace:
    """One captured layer with everything that is computed once and used by several recipes.

    Args:
        capture: activations and weights of the layer.
        pairing_cache: RoPE pairing of the cached key.
        seed: every random choice of the layer derives from it.
        device: where to compute.
    """

    def __init__(
        self,
        capture: LayerCapture,
        pairing_cache: str,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capture = capture
        self.pairing_cache = pairing_cache
        self.seed = seed
        self.device = torch.device(device)
        self._kept: dict[Hashable, Any] = {}

    @property
    def gamma(self) -> torch.Tensor:
        """Norm weight [R] of the original checkpoint, on the device."""
        return self.capture.gamma.to(self.device, torch.float32)

    def attention(self, protection: Protection | None = None) -> LayerAttention:
        """Return the layer under a protection; none by default."""
        protection = protection or Protection()
        make = LayerAttention
        return self.once((make, protection), lambda: make(self.capture, protection, self.device))

    def scores(self, protection: Protection) -> PositionScores:
        """Return the layer's position scores under a protection."""
        make = PositionScores
        return self.once((make, protection), lambda: make(self.capture, protection, self.device))

    def sensitivity(self, recipe: Recipe) -> OutputSensitivity:
        """Return the output sensitivity on the first training and held-out windows of a recipe."""
        config, protection = recipe.train, protection_of(recipe)
        train, heldout = split_windows(recipe)
        train, heldout = (w[: config.curvature_windows] for w in (train, heldout))
        windows = (tuple(train), tuple(heldout))
        key = (OutputSensitivity, protection, config.curvature_probes, windows)
        return self.once(
            key,
            lambda: OutputSensitivity.of(
                self.attention(protection), train, heldout, config.curvature_probes, self.seed
            ),
        )

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, made at the first call with this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def protection_of(recipe: Recipe) -> Protection:
    """Return which pairs a recipe's objectives leave out."""
    scheme = recipe.scheme
    return Protection.of(recipe.protect, scheme.sink_tokens, scheme.window_tokens)


def split_windows(recipe: Recipe) -> tuple[list[int], list[int]]:
    """Return the numbers of the training windows and of the held-out windows."""
    last = recipe.sequences + recipe.heldout_sequences
    return list(range(recipe.sequences)), list(range(recipe.sequences, last))
