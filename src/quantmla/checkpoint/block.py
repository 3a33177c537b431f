"""A new `quantmla` block, from what a family and a scheme decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantmla.config import PathFormat, QuantMLABlock

if TYPE_CHECKING:
    from quantmla.checkpoint.families import Family
    from quantmla.config import KVScheme
    from quantmla.strict import Method


def new_block(method: Method, scheme: KVScheme, family: Family, config) -> QuantMLABlock:
    """Return the block of a checkpoint that a method makes for a scheme, before it is fused.

    Args:
        method: `quarot_online` transforms keys and queries after RoPE, in the cache.
        scheme: bits, group, zero mode, sink and window.
        family: row of the model.
        config: dict (config.json) or transformers config.

    Returns:
        QuantMLABlock without clip ratios and fingerprint, which fusing fills in.

    Source: own.
    """
    return QuantMLABlock(
        method=method,
        content=PathFormat(bits=scheme.content_bits, group=scheme.group),
        rope=PathFormat(bits=scheme.rope_bits, group=scheme.group),
        zero=scheme.zero,
        rope_pairing=family.rope_pairing(config),
        rope_pairing_cache=family.rope_pairing_cache(config),
        rope_online="hadamard" if method == "quarot_online" else None,
        sink_tokens=scheme.sink_tokens,
        window_tokens=scheme.window_tokens,
    )
