"""QuantMLACache of formats without packed pages, for comparisons in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quantmla.cache.simulated import SimulatedLayer
from quantmla.dims import MLADims
from quantmla.engine.hf import PackedLayer, QuantMLACache
from quantmla.errors import CacheError
from quantmla.quant.codec import Codec


def simulated_cache(
    codecs: Sequence[tuple[Codec, Codec]],
    config,
    *,
    sink_tokens: int,
    window_tokens: int,
    rope_online: Literal["hadamard"] | None = None,
    **settings,
) -> QuantMLACache:
    """Make a strict-mode cache that stores what codecs give back.

    Args:
        codecs: (content, rope) of each cache layer.
        config: model config, dict or object.
        sink_tokens, window_tokens [tokens]: policy.
        rope_online: as in `QuantMLACache.from_scheme`.
        settings: slack_tokens, row_dtype, check_finite of LatentLayer.
    Returns: QuantMLACache.
    Raises: CacheError if there is not one pair a layer, or a codec does not fit the policy.
    Source: own.
    """
    dims = MLADims.from_config(config)
    if len(codecs) != dims.num_cache_layers:
        raise CacheError(
            "there must be one pair of codecs a cache layer",
            where="simulated_cache",
            expected=dims.num_cache_layers,
            got=len(codecs),
        )
    layers = [
        PackedLayer(
            SimulatedLayer(
                dims.kv_lora_rank,
                dims.qk_rope_head_dim,
                content,
                rope,
                sink_tokens=sink_tokens,
                window_tokens=window_tokens,
                layer_idx=index,
                **settings,
            ),
            rope_online=rope_online,
            kernels="never",
        )
        for index, (content, rope) in enumerate(codecs)
    ]
    return QuantMLACache(layers, None if isinstance(config, dict) else config)
