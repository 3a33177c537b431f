"""MLA dimensions of a model, and the one glossary of shape letters.

Shape letters used in comments and docstrings everywhere:
    B  batch                      R  kv_lora_rank (latent channels)
    S  new tokens (queries)       P  qk_rope_head_dim (rope channels)
    T  cached tokens (keys)       N  qk_nope_head_dim
    H  attention heads            V  v_head_dim
    D  hidden_size                G  quantisation groups of one path
    L  cache layers
"""

from __future__ import annotations

from dataclasses import dataclass

from quantmla.errors import CheckpointError

BF16_BYTES = 2


@dataclass(frozen=True)
class MLADims:
    """Sizes of the latent attention of one model.

    Args:
        hidden_size: D.
        num_cache_layers: L, one per attention module (longcat_flash has two a decoder layer).
        num_heads: H.
        kv_lora_rank: R.
        qk_rope_head_dim: P, even.
        qk_nope_head_dim: N.
        v_head_dim: V.
        q_lora_rank: rank of the query projection, None if queries are projected directly.
        norm_eps: epsilon of kv_a_layernorm as the loader builds it.
    Source: algorithms.md section 1.1.
    """

    hidden_size: int
    num_cache_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    norm_eps: float

    @classmethod
    def from_config(cls, config) -> MLADims:
        """Read the dimensions from a model config.

        Args:
            config: dict (config.json) or transformers config.
        Returns:
            MLADims.
        Raises:
            UnsupportedModelError: the family is refused.
            CheckpointError: a size is missing or impossible.
        Source: own.
        """
        from quantmla.checkpoint.families import family_of

        family = family_of(config)
        dims = cls(
            hidden_size=family.size(config, "hidden_size"),
            num_cache_layers=family.num_cache_layers(config),
            num_heads=family.size(config, "num_attention_heads"),
            kv_lora_rank=family.size(config, "kv_lora_rank"),
            qk_rope_head_dim=family.size(config, "qk_rope_head_dim"),
            qk_nope_head_dim=family.size(config, "qk_nope_head_dim"),
            v_head_dim=family.v_head_dim(config),
            q_lora_rank=family.size(config, "q_lora_rank") if family.low_rank_q(config) else None,
            norm_eps=family.norm_eps,
        )
        if dims.qk_rope_head_dim % 2:
            raise CheckpointError(
                "the rope part of a head cannot be split into pairs",
                where="qk_rope_head_dim",
                expected="an even number",
                got=dims.qk_rope_head_dim,
                next_step="correct config.json",
            )
        return dims

    @property
    def qk_head_dim(self) -> int:
        """Query and key size of a head: N + P."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def bf16_bytes_per_token(self) -> int:
        """Bytes of one cached token in one layer in BF16: 2 (R + P)."""
        return BF16_BYTES * (self.kv_lora_rank + self.qk_rope_head_dim)
