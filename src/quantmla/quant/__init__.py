"""Numbers to codes and codes to bytes."""

from quantmla.quant.affine import Quantized, dequantize, fake_quantize, group_count, quantize
from quantmla.quant.pack import pack, packed_bytes, unpack

__all__ = [
    "Quantized",
    "dequantize",
    "fake_quantize",
    "group_count",
    "pack",
    "packed_bytes",
    "quantize",
    "unpack",
]
