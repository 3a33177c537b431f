"""Numbers to codes and codes to bytes."""

from quantmla.quant.affine import (
    Clip,
    Quantized,
    dequantize,
    fake_quantize,
    group_count,
    quantize,
    usable_clip,
)
from quantmla.quant.pack import pack, packed_bytes, unpack

__all__ = [
    "Clip",
    "Quantized",
    "dequantize",
    "fake_quantize",
    "group_count",
    "pack",
    "packed_bytes",
    "quantize",
    "unpack",
    "usable_clip",
]
