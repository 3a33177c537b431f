"""Arithmetic of MLA attention over a latent cache: absorbed against expanded, per layer.

Absorbed: each query is taken into latent space (N x R a head), reads the latent as key and value,
and its result goes through the value half of kv_b (R x V a head). Expanded: every latent that is
read becomes per-head keys and values first (R x (N + V) a head). A multiply-add counts as 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantmla.dims import MLADims


@dataclass(frozen=True)
class AttentionFlops:
    """Operations of one layer for some new tokens: `attention` over the keys, `projection` by kv_b.

    Args:
        attention [FLOP]: scores and weighted sums.
        projection [FLOP]: what kv_b costs on the way.
    """

    attention: int
    projection: int

    @property
    def total(self) -> int:
        """All operations."""
        return self.attention + self.projection


def causal_pairs(new_tokens: int, cached_tokens: int = 0) -> int:
    """Return how many (query, key) pairs new tokens make with the cache and among themselves."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2


def absorbed_flops(dims: MLADims, new_tokens: int, cached_tokens: int = 0) -> AttentionFlops:
    """Count attention in latent space, 2 H (2 R + P) a pair.

    Args:
        dims: of the model.
        new_tokens [tokens]: queries.
        cached_tokens [tokens]: history before them.

    Returns:
        AttentionFlops of one layer.

    Source: QuantMLA study, accounting of the two forms.
    """
    width = 2 * dims.kv_lora_rank + dims.qk_rope_head_dim
    return AttentionFlops(
        2 * dims.num_heads * width * causal_pairs(new_tokens, cached_tokens),
        _kv_b_flops(dims) * new_tokens,
    )


def expanded_flops(dims: MLADims, new_tokens: int, cached_tokens: int = 0) -> AttentionFlops:
    """Count attention on per-head keys and values, 2 H (N + P + V) a pair.

    The history is cached as latents, so all of it is expanded again.

    Args:
        dims, new_tokens, cached_tokens: as for `absorbed_flops`.

    Returns:
        AttentionFlops of one layer.

    Source: QuantMLA study, accounting of the two forms.
    """
    width = dims.qk_head_dim + dims.v_head_dim
    return AttentionFlops(
        2 * dims.num_heads * width * causal_pairs(new_tokens, cached_tokens),
        _kv_b_flops(dims) * (new_tokens + cached_tokens),
    )


def break_even_tokens(dims: MLADims) -> float:
    """Return the chunk size over a long history from which on expanding costs less than absorbing.

    Returns:
        New tokens S with S (2 R - N - V) = R (N + V); infinite when absorbing never costs more.

    Source: own.
    """
    per_head = dims.qk_nope_head_dim + dims.v_head_dim
    gain = 2 * dims.kv_lora_rank - per_head
    return dims.kv_lora_rank * per_head / gain if gain > 0 else float("inf")


def prefill_table(dims: MLADims, lengths_tokens: Iterable[int]) -> list[dict[str, int | float]]:
    """Compare both forms for whole prompts.

    Args:
        dims: of the model.
        lengths_tokens [tokens]: prompt lengths.

    Returns:
        One row a length: tokens, absorbed_flops, expanded_flops, ratio of the two, and
        attention_ratio without the projection by kv_b, which is the same in both.

    Source: own.
    """
    rows = []
    for tokens in lengths_tokens:
        absorbed, expanded = absorbed_flops(dims, tokens), expanded_flops(dims, tokens)
        rows.append(
            {
                "tokens": tokens,
                "absorbed_flops": absorbed.total,
                "expanded_flops": expanded.total,
                "ratio": absorbed.total / expanded.total,
                "attention_ratio": absorbed.attention / expanded.attention,
            }
        )
    return rows


def _kv_b_flops(dims: MLADims) -> int:
    """Return what one token costs in kv_b: absorbing a query or expanding a key is the same."""
    return 2 * dims.num_heads * dims.kv_lora_rank * (dims.qk_nope_head_dim + dims.v_head_dim)
