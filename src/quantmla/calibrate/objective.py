"""One captured attention layer as a function of what its cache gives back, and its output error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from quantmla.cache.policy import representation

if TYPE_CHECKING:
    from quantmla.calibrate.capture import LayerCapture

QUERY_TILE_TOKENS = 512  # bounds the [H, tile, T] score buffers for long sequences


@dataclass(frozen=True)
class Protection:
    """Which (query, key) pairs read BF16 rows and so never see a quantisation error.

    Args:
        sink_tokens: first keys of the sequence that stay BF16.
        window_tokens: most recent keys of each query that stay BF16, itself included; 0 for none.
    """

    sink_tokens: int = 0
    window_tokens: int = 0

    @classmethod
    def of(cls, protect: str, sink_tokens: int, window_tokens: int) -> Protection:
        """Return the protection that a recipe's `protect` word names."""
        return cls(
            sink_tokens=0 if protect == "none" else sink_tokens,
            window_tokens=window_tokens if protect == "policy" else 0,
        )

    def mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return True where the pair reads BF16, shape [queries, keys]."""
        return representation(query[:, None], key[None, :], self.sink_tokens, self.window_tokens)


class LayerAttention:
    """One captured MLA layer as a differentiable function of its cached latent and RoPE key.

    The latent is the *unit* latent (normed, before the norm weight); the norm weight is folded into
    kv_b here, so a transform of the cache only changes what comes in. Keys and values are expanded
    per head: cheaper than absorption when every query of a sequence is present.

    Args:
        capture: activations and weights of the layer.
        device: where to compute.
        dtype: compute dtype.
        protection: pairs that read the BF16 rows.
    """

    def __init__(
        self,
        capture: LayerCapture,
        protection: Protection | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.capture = capture
        self.protection = protection or Protection()
        self.device = torch.device(device)
        self.dtype = dtype
        self.heads = capture.kv_b.shape[0]
        self.nope_dim = capture.q_nope.shape[-1]
        folded = capture.kv_b.double() * capture.gamma.double()  # [H, N+V, R]
        self.kv_b = folded.reshape(-1, folded.shape[-1]).to(self.device, dtype)
        self.o_proj = capture.o_proj.to(self.device, dtype)
        self._teacher: dict[int, torch.Tensor] = {}

    def sequence(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (latent_unit [T, R], k_rope [T, P], query [H, T, N+P]) of one sequence."""
        c = self.capture
        query = torch.cat((c.q_nope[index], c.q_rope[index]), dim=-1)
        parts = (c.latent_unit[index], c.k_rope[index], query)
        return tuple(part.to(self.device, self.dtype) for part in parts)

    def output(
        self,
        index: int,
        latent_unit: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the post-o_proj attention output of one sequence with either cached path replaced.

        Args:
            index: which captured sequence.
            latent_unit [T, R]: what the cache gives back as content; None for the exact latent.
            k_rope [T, P]: what the cache gives back as RoPE key; None for the exact key.

        Returns:
            [T, D] output without the projection bias, which cancels in every difference.

        Source: QuantMLA study, content objective.
        """
        exact_latent, exact_rope, query = self.sequence(index)
        latent = exact_latent if latent_unit is None else latent_unit
        rope = exact_rope if k_rope is None else k_rope
        key, value = self._expand(latent, rope)
        exact = latent_unit is None and k_rope is None
        if exact or not (self.protection.sink_tokens or self.protection.window_tokens):
            mixed = F.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=True, scale=self.capture.scaling
            )[0]
        else:
            mixed = self._two_key_sets(query, key, value, *self._expand(exact_latent, exact_rope))
        return mixed.transpose(0, 1).reshape(latent.shape[0], -1) @ self.o_proj.T

    def teacher(self, index: int) -> torch.Tensor:
        """Return the cached exact output [T, D] of one sequence."""
        if index not in self._teacher:
            with torch.no_grad():
                self._teacher[index] = self.output(index)
        return self._teacher[index]

    def error(
        self,
        index: int,
        latent_unit: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (squared error, squared teacher norm) of one sequence for `output`'s arguments.

        The content objective is the ratio of their sums over sequences.
        """
        teacher = self.teacher(index)
        error = self.output(index, latent_unit, k_rope) - teacher
        return error.square().sum(), teacher.square().sum()

    def rope_error(self, index: int, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `error` with only the RoPE path replaced."""
        return self.error(index, k_rope=k_rope)

    def _expand(
        self, latent: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        expanded = (latent @ self.kv_b.T).view(latent.shape[0], self.heads, -1)
        expanded = expanded.transpose(0, 1)  # [H, T, N+V]
        value_dim = expanded.shape[-1] - self.nope_dim
        key_nope, value = expanded.split([self.nope_dim, value_dim], dim=-1)
        return torch.cat((key_nope, rope.expand(self.heads, -1, -1)), dim=-1), value

    def _two_key_sets(self, query, key, value, exact_key, exact_value) -> torch.Tensor:
        tokens = query.shape[1]
        position = torch.arange(tokens, device=self.device)
        tiles = []
        for start in range(0, tokens, QUERY_TILE_TOKENS):
            stop = min(start + QUERY_TILE_TOKENS, tokens)
            rows = position[start:stop]
            protected = self.protection.mask(rows, position[:stop])  # [tile, keys]
            tile = query[:, start:stop] * self.capture.scaling
            exact = tile @ exact_key[:, :stop].transpose(1, 2)
            scores = torch.where(protected, exact, tile @ key[:, :stop].transpose(1, 2))
            future = position[:stop][None, :] > rows[:, None]
            scores = scores.masked_fill(future, float("-inf"))
            weight = scores.softmax(-1)
            near = weight * protected
            tiles.append(near @ exact_value[:, :stop] + (weight - near) @ value[:, :stop])
        return torch.cat(tiles, dim=1)


def ratio_of_sums(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the sum of errors over the sum of norms."""
    errors, norms = zip(*pairs, strict=True)
    return float(sum(errors)) / max(float(sum(norms)), 1e-30)
