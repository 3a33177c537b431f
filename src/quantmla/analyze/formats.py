"""Which quantiser each path of a checkpoint's cache has, and in which coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme, QuantMLABlock
from quantmla.dims import MLADims
from quantmla.engine.clips import Writer, check_block, load_writers
from quantmla.errors import SchemeError

if TYPE_CHECKING:
    from quantmla.checkpoint.reader import CheckpointReader

PLAIN_SCHEME = "c4r4"  # of the study's analysis
EXACT_BITS = 16


@dataclass(frozen=True)
class LayerFormat:
    """How one layer's cache rounds.

    Args:
        scheme: bits, group and zero mode.
        writer: clip ratios, shifts and error feedback.
        rope_online: "hadamard" where the cache turns keys and queries after RoPE.
    """

    scheme: KVScheme
    writer: Writer = field(default_factory=Writer)
    rope_online: str | None = None


def layer_formats(reader: CheckpointReader, scheme: KVScheme | None) -> list[LayerFormat]:
    """Return the format of every cache layer.

    A fused checkpoint has formats of its own; `scheme` replaces bits and drops what the writer has
    for them. Any other checkpoint is read with `scheme`, or C4R4.

    Args:
        reader: checkpoint, fused or not.
        scheme: instead of the checkpoint's own.

    Returns:
        One LayerFormat a cache layer.

    Raises:
        SchemeError: a path is not quantised, so that there is no error to follow.
        CheckpointError: a fused folder whose parts do not belong together.

    Source: own.
    """
    dims = MLADims.from_config(reader.config)
    layers = range(dims.num_cache_layers)
    if reader.is_fused:
        formats = _fused_formats(reader, dims, scheme)
    else:
        formats = [LayerFormat(scheme or KVScheme.parse(PLAIN_SCHEME)) for _ in layers]
    for layer, one in enumerate(formats):
        if EXACT_BITS in (one.scheme.content_bits, one.scheme.rope_bits):
            raise SchemeError(
                "a path that is not quantised has no error to follow",
                where=f"cache layer {layer}, {one.scheme.name}",
                expected="fewer than 16 bits on both paths",
                next_step=f"name a scheme, as --scheme {PLAIN_SCHEME}",
            )
    return formats


def _fused_formats(
    reader: CheckpointReader, dims: MLADims, scheme: KVScheme | None
) -> list[LayerFormat]:
    block = QuantMLABlock.from_config(reader.config)
    check_block(block, reader.config, reader.path)
    own = [block.scheme(layer) for layer in range(dims.num_cache_layers)]
    if scheme is not None:
        return [LayerFormat(scheme, rope_online=block.rope_online) for _ in own]
    layouts = [PageLayout(dims.kv_lora_rank, dims.qk_rope_head_dim, one) for one in own]
    writers = load_writers(reader.path, layouts, block)
    return [
        LayerFormat(one, writer, block.rope_online)
        for one, writer in zip(own, writers, strict=True)
    ]
