"""Bit order of packed codes: the only file that knows it.

Little endian: channel 0 sits in the lowest bits of the first byte. 4 bits put channel 2i in the low
nibble, 2 bits put channel 4i in bits 0-1, 3 bits put 8 channels into 24 bits that are stored as
3 bytes, lowest byte first.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from quantmla.errors import SchemeError

CODE_BITS = (1, 2, 3, 4, 8)  # a 16-bit path has no codes, it is stored as BF16 rows


def packed_bytes(channels: int, bits: int) -> int:
    """Return the bytes of `channels` packed codes.

    Raises: SchemeError for an unknown width, or if the channels do not fill whole units (8 codes
        at 1 or 3 bits, 4 at 2 bits, 2 at 4 bits).
    """
    codes_per_unit, bytes_per_unit = _unit(bits)
    if channels % codes_per_unit:
        raise SchemeError(
            "channels do not fill whole bytes",
            where="pack",
            expected=f"a multiple of {codes_per_unit} channels at {bits} bits",
            got=channels,
        )
    return channels // codes_per_unit * bytes_per_unit


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
    codes_per_unit, bytes_per_unit = _unit(bits)
    units = codes.unflatten(-1, (codes.shape[-1] // codes_per_unit, codes_per_unit))
    if bytes_per_unit > 1:
        units = units.to(torch.int32)
    word = units[..., 0].clone()
    for i in range(1, codes_per_unit):
        word |= units[..., i] << (bits * i)
    if bytes_per_unit == 1:
        return word
    return torch.stack(
        [(word >> (8 * j) & 0xFF).to(torch.uint8) for j in range(bytes_per_unit)], -1
    ).flatten(-2)


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
    codes_per_unit, bytes_per_unit = _unit(bits)
    word = packed
    if bytes_per_unit > 1:
        units = packed.unflatten(-1, (packed.shape[-1] // bytes_per_unit, bytes_per_unit)).to(
            torch.int32
        )
        word = units[..., 0].clone()
        for j in range(1, bytes_per_unit):
            word |= units[..., j] << (8 * j)
    mask = 2**bits - 1
    return torch.stack(
        [(word >> (bits * i) & mask).to(torch.uint8) for i in range(codes_per_unit)], -1
    ).flatten(-2)


def _unit(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the smallest run of codes that ends on a byte border."""
    if bits not in CODE_BITS:
        raise SchemeError(
            "no packing for this width", where="pack", expected=f"bits in {CODE_BITS}", got=bits
        )
    return 8 // gcd(bits, 8), bits // gcd(bits, 8)
