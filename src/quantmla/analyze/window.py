"""One window of a captured layer as a function of what its cache holds, in tiles of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantmla.transform.content import hadamard

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.calibrate.record import LayerCapture

CPU_TILE_BYTES = 1 << 23  # of one [H, rows, T] buffer: near the size of a core's cache
GPU_TILE_BYTES = 1 << 28
LEAST_ROWS = 16  # fewer make slow matrix products


@dataclass(frozen=True)
class LayerWeights:
    """What turns cached rows into an attention output, in the precision of the analysis.

    Args:
        key_up [H, N, R]: latent to the content part of each head's key.
        value_up [H, V, R]: latent to each head's value.
        o_proj [H, V, D]: each head's part of the output projection, transposed.
        scaling: softmax scale tau.
    """

    key_up: Tensor
    value_up: Tensor
    o_proj: Tensor
    scaling: float

    @classmethod
    def of(
        cls, capture: LayerCapture, device: torch.device | str, dtype: torch.dtype
    ) -> LayerWeights:
        """Read them from a capture."""
        heads, nope_dim = capture.kv_b.shape[0], capture.q_nope.shape[-1]
        kv_b = capture.kv_b.to(device, dtype)
        o_proj = capture.o_proj.to(device, dtype).view(capture.o_proj.shape[0], heads, -1)
        return cls(
            key_up=kv_b[:, :nope_dim],
            value_up=kv_b[:, nope_dim:],
            o_proj=o_proj.permute(1, 2, 0).contiguous(),
            scaling=capture.scaling,
        )


@dataclass(frozen=True)
class CachedWindow:
    """One window: F(latent, k_rope), the attention output after o_proj and without its bias.

    The arguments are in the coordinates of the cache: the latent with its norm weight, the key as
    it is stored. Nothing of size [H, T, T] exists; see `tiles`.

    Args:
        weights: of the layer.
        latent [T, R]: exact cached content.
        k_rope [T, P]: exact cached RoPE key.
        q_nope [H, T, N]: content queries, times the softmax scale.
        q_rope [H, T, P]: rotated queries, times the softmax scale.
    """

    weights: LayerWeights
    latent: Tensor
    k_rope: Tensor
    q_nope: Tensor
    q_rope: Tensor

    @classmethod
    def of(
        cls,
        capture: LayerCapture,
        index: int,
        weights: LayerWeights,
        rope_online: str | None = None,
    ) -> CachedWindow:
        """Take one captured window in the device and dtype of the weights.

        Args:
            capture: activations of the layer.
            index: which window.
            weights: of the layer.
            rope_online: "hadamard" where the cache turns keys and queries after RoPE.

        Returns:
            CachedWindow.

        Source: own.
        """
        like = weights.key_up
        return cls(
            weights=weights,
            latent=cached_content(capture, index).to(like),
            k_rope=cached_rope(capture, index, rope_online).to(like),
            q_nope=capture.q_nope[index].to(like) * weights.scaling,
            q_rope=turned(capture.q_rope[index].to(like), rope_online) * weights.scaling,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the window."""
        return self.latent.shape[0]

    def tiles(self) -> Iterator[slice]:
        """Yield ranges of queries whose scores of all heads fit the tile of the device."""
        heads = self.q_rope.shape[0]
        row_bytes = heads * self.tokens * self.latent.element_size()
        tile_bytes = GPU_TILE_BYTES if self.latent.is_cuda else CPU_TILE_BYTES
        rows = max(LEAST_ROWS, tile_bytes // row_bytes)
        for start in range(0, self.tokens, rows):
            yield slice(start, min(start + rows, self.tokens))

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return (content key [H, T, N], value [H, T, V]) of latents [T, R]; linear."""
        return latent @ self.weights.key_up.mT, latent @ self.weights.value_up.mT

    def logits(self, rows: slice, key: Tensor | None, k_rope: Tensor | None) -> Tensor:
        """Return tau times the scores of some queries, or the change of them; linear in the keys.

        Args:
            rows: a tile.
            key [H, T, N]: content keys, or their change; None for no content part.
            k_rope [T, P]: RoPE keys, or their change; None for no RoPE part.

        Returns:
            [H, rows, keys up to the last row]; entries of later keys than the row mean nothing.

        Source: own.
        """
        if key is None:
            return self.q_rope[:, rows] @ k_rope[: rows.stop].T
        logits = self.q_nope[:, rows] @ key[:, : rows.stop].mT
        return (
            logits if k_rope is None else logits.add_(self.q_rope[:, rows] @ k_rope[: rows.stop].T)
        )

    def future(self, rows: slice) -> Tensor:
        """Return True [rows, keys] where a key is later than the query."""
        shape = (rows.stop - rows.start, rows.stop)
        return torch.ones(shape, dtype=torch.bool, device=self.latent.device).triu(rows.start + 1)

    def attention(self, rows: slice, key: Tensor, k_rope: Tensor) -> Tensor:
        """Return the attention weights [H, rows, keys] of a tile; arguments as for `logits`."""
        logits = self.logits(rows, key, k_rope)
        return logits.masked_fill(self.future(rows), float("-inf")).softmax(-1)

    def project(self, mixed: Tensor) -> Tensor:
        """Return the output [.., rows, D] of what the heads mixed, [.., H, rows, V]."""
        heads, value_dim, hidden = self.weights.o_proj.shape
        flat = mixed.transpose(-3, -2).flatten(-2)
        return flat @ self.weights.o_proj.view(heads * value_dim, hidden)

    def output(self, latent: Tensor, k_rope: Tensor) -> Tensor:
        """Return F [T, D]; differentiable in both arguments."""
        key, value = self.expand(latent)
        tiles = (
            self.project(self.attention(rows, key, k_rope) @ value[:, : rows.stop])
            for rows in self.tiles()
        )
        return torch.cat(list(tiles))


def cached_content(capture: LayerCapture, index: int) -> Tensor:
    """Return the latent [T, R] of one window as the cache holds it, in float32."""
    return capture.latent_unit[index] * capture.gamma


def cached_rope(capture: LayerCapture, index: int, rope_online: str | None = None) -> Tensor:
    """Return the RoPE key [T, P] of one window as the cache holds it, in float32."""
    return turned(capture.k_rope[index], rope_online)


def turned(rows: Tensor, rope_online: str | None) -> Tensor:
    """Return keys or queries [.., P] after what the cache applies to them at run time."""
    return rows if rope_online is None else rows @ hadamard(rows.shape[-1]).to(rows)
