"""What Triton kernels share: sizes, numbers and their BF16 bits, masks.

Importing this module imports triton.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from quantmla.cache.layout import PAGE_TOKENS
from quantmla.kernels.support import GROUP, page_layout

# The interpreter drops the carry when it rounds to bf16, so it gets integer arithmetic instead.
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
SLOTS = tl.constexpr(PAGE_TOKENS)


@triton.jit
def bf16_bits(x):
    """BF16 bits [int16] of fp32 numbers, rounded to nearest even; NaN stays NaN."""
    if INTERPRET:
        word = x.to(tl.int32, bitcast=True)
        upper = (word >> 16) & 0xFFFF
        half = (upper & 1) + 0x7FFF
        rounded = upper + (((word & 0xFFFF) + half) >> 16)
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)
    else:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def bf16_numbers(bits):
    """Numbers [fp32] of BF16 bits [int16]."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def cells(tokens, PADDED: tl.constexpr, VALID: tl.constexpr):
    """Mask [T, PADDED or 1] of the first VALID columns of some tokens [T]."""
    if PADDED == VALID:
        return tokens[:, None]
    else:
        return tokens[:, None] & (tl.arange(0, PADDED) < VALID)[None, :]


@triton.jit
def zero_place(slot):
    """Place of a token slot in the zero plane, where slots t and t + 32 are neighbours."""
    return slot % 32 * 2 + slot // 32


@lru_cache(maxsize=256)
def constants(
    kv_lora_rank: int, qk_rope_head_dim: int, content_bits: int, rope_bits: int
) -> dict[str, int]:
    """Return what kernels are compiled for: sizes, bits and plane offsets of a page.

    Args:
        kv_lora_rank, qk_rope_head_dim [channels]: R and P.
        content_bits, rope_bits: code widths; 16 for BF16 rows.
    Returns: constexpr arguments by name.
    Source: own.
    """
    layout = page_layout(kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    offsets = {plane.name: plane.offset_bytes for plane in layout.planes}
    return {
        "R": kv_lora_rank,
        "P": qk_rope_head_dim,
        "R_PADDED": triton.next_power_of_2(kv_lora_rank),
        "P_PADDED": triton.next_power_of_2(qk_rope_head_dim),
        "CONTENT_BITS": content_bits,
        "ROPE_BITS": rope_bits,
        "CONTENT_GROUPS": layout.content_groups,
        "ROPE_GROUPS": layout.rope_groups,
        "CONTENT_OFFSET": offsets["content"],
        "ROPE_OFFSET": offsets["rope"],
        "SCALE_OFFSET": offsets.get("scale", 0),
        "ZERO_OFFSET": offsets.get("zero", 0),
        "GROUP": GROUP,
    }
