"""Proposition 2: how far the output can move when the position scores do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.analyze.window import CachedWindow


@dataclass(frozen=True)
class RopeBound:
    """Both sides' ingredients for one window; each right-hand side is a property.

    Args:
        value_norm: sum over heads of the squared spectral norm of the values after o_proj.
        value_norm_centred: the same with the mean row of each head taken out.
        score_change: squared change of the scaled logits over heads and causal pairs.
        weighted_change: the same with each row's mean under its attention weights taken out, and
            each pair weighted by its squared attention weight.
        rope_scores, content_scores: squared scaled logits of either path, over the same pairs.
    """

    value_norm: float
    value_norm_centred: float
    score_change: float
    weighted_change: float
    rope_scores: float
    content_scores: float

    @classmethod
    def of(cls, window: CachedWindow, d_rope: Tensor) -> RopeBound:
        """Measure a window under a change of its RoPE key.

        The squared change of the output is at most

            1/4 (sum_h ||Vbar_h||_2^2) sum_h ||dZ_h||_F^2

        for a change of any size, and to first order at most

            (sum_h ||Vbar_h||_2^2) sum_h ||A_h o (dZ_h - mu_h 1^T)||_F^2

        with Z the logits, softmax scale included (tau^2 of the study is in them), over causal
        pairs. Rows of dA add up to 0, so Vbar may be centred.

        Args:
            window: exact cache and queries.
            d_rope [T, P]: what is added to the RoPE key.

        Returns:
            RopeBound.

        Source: algorithms.md section 4.4; Proposition 2 of the QuantMLA study.
        """
        key, value = window.expand(window.latent)
        o_proj = window.weights.o_proj
        sums = torch.zeros(4, dtype=torch.float64)
        for rows in window.tiles():
            future = window.future(rows)
            content = window.logits(rows, key, None).masked_fill(future, 0)
            rope = window.logits(rows, None, window.k_rope).masked_fill(future, 0)
            weight = (content + rope).masked_fill(future, float("-inf")).softmax(-1)
            change = window.logits(rows, None, d_rope).masked_fill(future, 0)
            mean = (weight * change).sum(-1, keepdim=True)
            parts = (change, weight * (change - mean), rope, content)
            sums += torch.stack([part.double().square().sum() for part in parts]).cpu()
        return cls(
            value_norm=spectral_energy(value, o_proj),
            value_norm_centred=spectral_energy(value - value.mean(1, keepdim=True), o_proj),
            score_change=float(sums[0]),
            weighted_change=float(sums[1]),
            rope_scores=float(sums[2]),
            content_scores=float(sums[3]),
        )

    @property
    def plain(self) -> float:
        """Right-hand side for a change of any size."""
        return self.value_norm * self.score_change / 4

    @property
    def centred(self) -> float:
        """The same with centred values."""
        return self.value_norm_centred * self.score_change / 4

    @property
    def weighted(self) -> float:
        """Right-hand side of the first-order form; bounds ||J d_rope||^2."""
        return self.value_norm * self.weighted_change

    @property
    def weighted_centred(self) -> float:
        """The same with centred values."""
        return self.value_norm_centred * self.weighted_change


def spectral_energy(value: Tensor, o_proj: Tensor) -> float:
    """Return the sum over heads of ||value_h o_proj_h||_2^2, without a power iteration.

    A power iteration comes from below and would break a bound. value_h = Q R and o_proj_h^T = Q' R'
    with orthonormal columns leave the singular values to the small matrix R R'^T, which is
    decomposed in float64.

    Args:
        value [H, T, V]: values of each head.
        o_proj [H, V, D]: their way to the output.

    Source: own.
    """
    left = torch.linalg.qr(value.double(), mode="r").R
    right = torch.linalg.qr(o_proj.double().mT, mode="r").R
    return float(torch.linalg.matrix_norm(left @ right.mT, ord=2).square().sum())
