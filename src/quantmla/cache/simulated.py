"""A cache layer that keeps what codecs give back, for formats without packed pages.

The pages hold BF16 rows: what the content codec and the RoPE codec made of every token. Policy,
BF16 rows of sinks and window, and attention are those of LatentLayer. The memory it takes says
nothing about a format; `logical_bytes` of the codecs does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantmla.cache.latent import LatentLayer, VisibleRows
from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme
from quantmla.quant.codec import Codec


class SimulatedLayer(LatentLayer):
    """Rectangular batch store of one cache layer whose formats are simulated.

    A codec of groups of tokens (KIVI's keys) finds its groups behind the sinks, which are never
    read coded. With a window of at least a group, a token that leaves the window is in a closed
    group. Without any protection, queries read the RoPE keys of the open group in BF16, as KIVI
    does; calls must then begin at the border of a group.

    Args:
        kv_lora_rank, qk_rope_head_dim [channels]: sizes of both paths.
        content, rope: codecs.
        sink_tokens, window_tokens [tokens]: policy.
        settings: layer_idx, slack_tokens, row_dtype, check_finite of LatentLayer.
    Raises: CacheError if a codec of groups of tokens does not fit the policy.
    Source: own.
    """

    def __init__(
        self,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        content: Codec,
        rope: Codec,
        *,
        sink_tokens: int,
        window_tokens: int,
        **settings,
    ):
        policy = {"sink_tokens": sink_tokens, "window_tokens": window_tokens}
        scheme = KVScheme(content_bits=16, rope_bits=16, **policy)
        super().__init__(PageLayout(kv_lora_rank, qk_rope_head_dim, scheme), **settings)
        self.rows_only = False
        self.content, self.rope = content, rope
        if content.group_tokens > 1:
            self._refuse(
                "the latent cannot be coded in groups of tokens",
                "a content codec that codes each token alone",
                content.name,
            )
        group = rope.group_tokens
        self.residual_tokens = 0  # keys of an open group that are read in BF16
        if group > 1 and window_tokens < group:
            self.residual_tokens = group
            if sink_tokens or window_tokens:
                self._refuse(
                    "the window is too short for a codec of groups of tokens",
                    f"a window of at least {group} tokens, or no sink and no window",
                    f"{sink_tokens} and {window_tokens}",
                )

    @property
    def logical_bytes(self) -> float:
        """Bytes of a token in the simulated format, without padding."""
        layout = self.layout
        return self.content.logical_bytes(layout.kv_lora_rank) + self.rope.logical_bytes(
            layout.qk_rope_head_dim
        )

    def append(
        self,
        latent: Tensor,
        k_rope: Tensor,
        mask: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> VisibleRows:
        """Store new tokens and return what their queries may read; see `LatentLayer.append`.

        Raises: CacheError as there, and for a call that begins inside of an open group.
        """
        if not self.residual_tokens:
            return super().append(latent, k_rope, mask, chunk_tokens)
        inside = [n for n in self.lengths if n % self.residual_tokens]
        if inside or chunk_tokens is not None or (mask is not None and not bool(mask.all())):
            self._refuse(
                "an open group of keys can only be read in whole chunks of one length",
                f"strict mode, no padding, calls that begin at multiples of {self.residual_tokens}",
                f"lengths {inside[:4]}, chunk_tokens={chunk_tokens}",
                f"feed multiples of {self.residual_tokens} tokens",
            )
        visible = super().append(latent, k_rope, mask, self.residual_tokens)
        band = visible.band.clone()
        rank = self.layout.kv_lora_rank
        band[..., :rank] = self.content.round_trip(band[..., :rank]).to(band.dtype)
        return replace(visible, band=band)

    def _encode(self, rows: Tensor, raw: Tensor) -> list[Tensor]:
        """Both paths as they come back; keys in groups of tokens wait in BF16 until read."""
        rank = self.layout.kv_lora_rank
        content, rope = rows[..., :rank], rows[..., rank:]
        alone = self.rope.group_tokens == 1
        return [self.content.round_trip(content), self.rope.round_trip(rope) if alone else rope]

    def _load(self, end: int) -> Tensor:
        first, group = self.recent.sink_tokens, self.rope.group_tokens
        if group == 1 or end <= first:
            return super()._load(end)
        # whole groups, of which the last may lie partly in the window
        closed = min(first - (first - end) // group * group, max(self.lengths))
        content, rope = self.layout.load(self.pages, first, closed)
        rows = torch.cat([content, self.rope.round_trip(rope).to(content.dtype)], -1)
        return self._without_unused(rows[:, : end - first], first)
