"""Bit order of packed codes: the only file that knows it.

Little endian: channel 0 sits in the lowest bits of the first byte. 4 bits put channel 2i in the low
nibble, 2 bits put channel 4i in bits 0-1. 3 bits put the low two bits of all channels, as 2-bit
codes, before the high bits of all channels, as 1-bit codes: no code crosses a 16-bit word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.errors import SchemeError

CODE_BITS = (1, 2, 3, 4, 8)  # a 16-bit path has no codes, it is stored as BF16 rows


def packed_bytes(channels: int, bits: int) -> int:
    """Return the bytes of `channels` packed codes.

    Raises: SchemeError for an unknown width, or if the channels do not fill whole units (8 codes
        at 1 or 3 bits, 4 at 2 bits, 2 at 4 bits).
    """
    codes_per_unit = _codes_per_unit(bits)
    if channels % codes_per_unit:
        raise SchemeError(
            "channels do not fill whole bytes",
            where="pack",
            expected=f"a multiple of {codes_per_unit} channels at {bits} bits",
            got=channels,
        )
    return channels * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes.

    Args:
        codes [..., channels, uint8]: values below 2**bits.
        bits [1, 2, 3, 4 or 8]: code width.
    Returns: packed [..., channels*bits/8, uint8].
    Raises: SchemeError for a wrong dtype, a code that does not fit, or channels that do not fill
        whole units.
    """
    packed_bytes(codes.shape[-1], bits)
    if codes.dtype != torch.uint8 or (bits < 8 and codes.numel() and int(codes.max()) >> bits):
        raise SchemeError(
            "codes do not fit their width",
            where="pack",
            expected=f"uint8 codes below {2**bits}",
            got=f"{codes.dtype}, largest {codes.max().item() if codes.numel() else None}",
        )
    if bits == 8:
        return codes.clone()
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], -1)
    codes_per_byte = 8 // bits
    units = codes.unflatten(-1, (codes.shape[-1] // codes_per_byte, codes_per_byte))
    byte = units[..., 0].clone()
    for i in range(1, codes_per_byte):
        byte |= units[..., i] << (bits * i)
    return byte


def unpack(packed: Tensor, bits: int, channels: int) -> Tensor:
    """Unpack bytes into codes.

    Args:
        packed [..., channels*bits/8, uint8]: bytes of pack.
        bits [1, 2, 3, 4 or 8]: code width.
        channels: number of codes.
    Returns: codes [..., channels, uint8].
    Raises: SchemeError if the bytes do not hold that many channels.
    """
    if packed.dtype != torch.uint8 or packed.shape[-1] != packed_bytes(channels, bits):
        raise SchemeError(
            "packed bytes do not fit the channels",
            where="unpack",
            expected=f"uint8 rows of {packed_bytes(channels, bits)} bytes"
            f" for {channels} channels at {bits} bits",
            got=f"{packed.dtype} rows of {packed.shape[-1]} bytes",
        )
    if bits == 8:
        return packed.clone()
    if bits == 3:
        low, high = packed.split([packed_bytes(channels, 2), packed_bytes(channels, 1)], -1)
        return unpack(low, 2, channels) | unpack(high, 1, channels) << 2
    mask = 2**bits - 1
    return torch.stack([packed >> (bits * i) & mask for i in range(8 // bits)], -1).flatten(-2)


def _codes_per_unit(bits: int) -> int:
    """Return the smallest number of codes that ends on a byte border in every part of a row."""
    if bits not in CODE_BITS:
        raise SchemeError(
            "no packing for this width", where="pack", expected=f"bits in {CODE_BITS}", got=bits
        )
    return 8 if bits == 3 else 8 // bits
