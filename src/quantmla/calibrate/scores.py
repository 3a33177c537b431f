"""Position-score error of the RoPE path, through query Grams instead of T x T score matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.objective import Protection

if TYPE_CHECKING:
    from quantmla.calibrate.record import LayerCapture

GRAMS_BYTES = 1 << 30  # query Grams kept in memory; further ones are rebuilt at each use


class PositionScores:
    """The RoPE objective of a captured layer, differentiable in the key that the cache gives back.

    Args:
        capture: activations of the layer.
        protection: pairs that read BF16 rows do not count.
        device: where to compute.
    """

    def __init__(
        self,
        capture: LayerCapture,
        protection: Protection | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capture = capture
        self.protection = protection or Protection()
        self.device = torch.device(device)
        self.rope_dim = capture.k_rope.shape[-1]
        self._grams: dict[int, torch.Tensor] = {}
        self._grams_bytes = 0

    def key(self, index: int) -> torch.Tensor:
        """Return the exact post-RoPE key [T, P] of one window."""
        return self.capture.k_rope[index].to(self.device, torch.float32)

    def error(self, index: int, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (squared score error, squared score norm) over heads and unprotected causal pairs.

        Args:
            index: window.
            k_rope [T, P]: key as the cache gives it back.

        Returns:
            Two scalars; the first is differentiable.

        Source: QuantMLA study, RoPE objective; the Gram form is own and exact.
        """
        grams, key = self.grams(index), self.key(index)
        return score_energy(k_rope - key, grams), score_energy(key, grams)

    def grams(self, index: int) -> torch.Tensor:
        """Return the query Grams [T, P, P] of one window, kept while they fit GRAMS_BYTES."""
        if index in self._grams:
            return self._grams[index]
        q_rope = self.capture.q_rope[index].to(self.device, torch.float32)
        grams = query_grams(q_rope, self.protection.window_tokens)
        grams[: self.protection.sink_tokens] = 0
        size_bytes = grams.numel() * grams.element_size()
        if self._grams_bytes + size_bytes <= GRAMS_BYTES:
            self._grams[index] = grams
            self._grams_bytes += size_bytes
        return grams

    def balanced_scale(
        self, indices: list[int], first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        """Return the starting pair scale (E|q|^2 / E|k|^2)^(1/4) with geometric mean 1.

        Args:
            indices: windows to average over.
            first [P/2, int64], second [P/2, int64]: channels of each pair.

        Returns:
            [P/2, float64].

        Source: SmoothQuant's balance, per pair and in the mean square.
        """
        energy = {}
        for name, rows in (("q", self.capture.q_rope), ("k", self.capture.k_rope)):
            channel = torch.stack([rows[i].double().square().mean(-2) for i in indices])
            channel = channel.reshape(-1, self.rope_dim).mean(0)
            energy[name] = (channel[first] + channel[second]).clamp_min(1e-30)
        log_scale = (energy["q"] / energy["k"]).log() / 4
        return (log_scale - log_scale.mean()).exp()


def query_grams(q_rope: torch.Tensor, first_distance: int = 0) -> torch.Tensor:
    """Return for each key position the Gram matrix of the queries that see it.

    Args:
        q_rope [H, T, P]: post-RoPE queries.
        first_distance: only queries at least this many tokens later count; 0 counts all.

    Returns:
        [T, P, P] suffix sums over queries and heads of q^T q, float32.

    Source: own exact form of the position-score objective.
    """
    outer = torch.einsum("htp,htq->tpq", q_rope, q_rope)
    suffix = outer.flip(0).cumsum(0).flip(0)
    if first_distance == 0:
        return suffix
    shifted = torch.zeros_like(suffix)
    if first_distance < suffix.shape[0]:
        shifted[: suffix.shape[0] - first_distance] = suffix[first_distance:]
    return shifted


def score_energy(key: torch.Tensor, grams: torch.Tensor) -> torch.Tensor:
    """Return sum over heads and causal pairs of (q . key)^2 for keys [T, P] and Grams [T, P, P]."""
    return torch.einsum("tp,tpq,tq->", key, grams, key)
