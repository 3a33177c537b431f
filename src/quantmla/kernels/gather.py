"""Triton kernel `gather`: packed tokens of a block table back to BF16 rows.

Launched with enable_fp_fusion=False, as every kernel whose numbers must equal the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantmla.kernels.codes import dequantise, unpack
from quantmla.kernels.common import (
    INTERPRET,
    SLOTS,
    bf16_bits,
    bf16_numbers,
    cells,
    constants,
    zero_place,
)

# A program of the interpreter costs tens of milliseconds, whatever its size.
BLOCK_TOKENS, WARPS = (32, 1) if INTERPRET.value else (8, 4)


def launch(
    pages: Tensor,
    block_table: Tensor,
    starts: Tensor,
    ends: Tensor,
    n_tokens: int,
    page_tokens: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    content_bits: int,
    rope_bits: int,
) -> Tensor:
    """Launch the kernel; the arguments are those of `ops.gather` and are not checked here.

    Returns: rows [B, n_tokens, R+P, bf16].
    Source: own.
    """
    batch, channels = block_table.shape[0], kv_lora_rank + qk_rope_head_dim
    out = pages.new_empty(batch, n_tokens, channels, dtype=torch.bfloat16)
    if out.numel() == 0:
        return out
    gather_kernel[(triton.cdiv(n_tokens, BLOCK_TOKENS), batch)](
        out,
        pages,
        block_table,
        starts,
        ends,
        n_tokens,
        pages.shape[0],
        block_table.shape[1],
        pages.stride(0),
        block_table.stride(0),
        **constants(kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits),
        PAGE=page_tokens,
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["n_tokens", "n_blobs", "n_columns", "table_stride"])
def gather_kernel(
    out_ptr,
    pages_ptr,
    block_table_ptr,
    starts_ptr,
    ends_ptr,
    n_tokens,
    n_blobs,
    n_columns,
    page_stride,
    table_stride,
    R: tl.constexpr,
    P: tl.constexpr,
    R_PADDED: tl.constexpr,
    P_PADDED: tl.constexpr,
    CONTENT_BITS: tl.constexpr,
    ROPE_BITS: tl.constexpr,
    CONTENT_GROUPS: tl.constexpr,
    ROPE_GROUPS: tl.constexpr,
    CONTENT_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Gather BLOCK_TOKENS tokens of sequence program_id(1); see `ops.gather`."""
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    start = tl.load(starts_ptr + sequence)
    token, column = start + row, (start + row) // PAGE
    known = (row < n_tokens) & (token >= 0) & (token < tl.load(ends_ptr + sequence))
    known = known & (column < n_columns)
    page = tl.load(block_table_ptr + sequence * table_stride + column, mask=known, other=-1)
    blob = page.to(tl.int64) * (PAGE // SLOTS) + token % PAGE // SLOTS
    known = known & (blob >= 0) & (blob < n_blobs)
    slot, byte = token % SLOTS, blob * page_stride

    content = _read(
        pages_ptr,
        byte,
        slot,
        known,
        R,
        R_PADDED,
        GROUP,
        CONTENT_BITS,
        CONTENT_OFFSET,
        SCALE_OFFSET,
        ZERO_OFFSET,
        0,
        CONTENT_GROUPS,
    )
    rope = _read(
        pages_ptr,
        byte,
        slot,
        known,
        P,
        P_PADDED,
        GROUP,
        ROPE_BITS,
        ROPE_OFFSET,
        SCALE_OFFSET,
        ZERO_OFFSET,
        CONTENT_GROUPS,
        ROPE_GROUPS,
    )
    target_ptr = out_ptr.to(tl.pointer_type(tl.int16))
    target_ptr += ((sequence * n_tokens + row) * (R + P))[:, None]
    column = tl.arange(0, R_PADDED)[None, :]
    tl.store(target_ptr + column, content, mask=cells(row < n_tokens, R_PADDED, R))
    column = R + tl.arange(0, P_PADDED)[None, :]
    tl.store(target_ptr + column, rope, mask=cells(row < n_tokens, P_PADDED, P))


@triton.jit
def _read(
    pages_ptr,
    byte,
    slot,
    known,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """BF16 bits [T, PADDED] of one path of the tokens of a tile; 0 for those that are not known."""
    if BITS == 16:
        at = (byte + OFFSET) // 2 + slot * CHANNELS
        source_ptr = pages_ptr.to(tl.pointer_type(tl.int16)) + at[:, None]
        mask = cells(known, PADDED, CHANNELS)
        return tl.load(source_ptr + tl.arange(0, PADDED)[None, :], mask=mask, other=0)
    else:
        at = byte + OFFSET + slot * (CHANNELS * BITS // 8)
        codes = _load_codes(pages_ptr, at, known, CHANNELS, PADDED, BITS)
        n: tl.constexpr = GROUP if PADDED > GROUP else PADDED
        codes = tl.reshape(codes, (codes.shape[0], PADDED // n, n))
        group = tl.arange(0, PADDED // n)
        entry = slot[None, :] + ((FIRST + group) * SLOTS)[:, None]  # [G, T]
        mask = known[None, :] & (group < GROUPS)[:, None]
        scales_ptr = pages_ptr.to(tl.pointer_type(tl.int16)) + ((byte + SCALE_OFFSET) // 2)[None, :]
        scale = tl.trans(bf16_numbers(tl.load(scales_ptr + entry, mask=mask, other=0)))
        zeros_ptr = pages_ptr + (byte + ZERO_OFFSET)[None, :]
        entry = zero_place(slot)[None, :] + ((FIRST + group) * SLOTS)[:, None]
        zero = tl.trans(tl.load(zeros_ptr + entry, mask=mask, other=0))
        return tl.reshape(bf16_bits(dequantise(codes, scale, zero)), (codes.shape[0], PADDED))


@triton.jit
def _load_codes(
    pages_ptr, at, known, CHANNELS: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr
):
    """Codes [T, PADDED, int32] of the rows that start at byte `at` [T]."""
    if BITS == 4:
        words_ptr = pages_ptr.to(tl.pointer_type(tl.int32)) + (at // 4)[:, None]
        return unpack(_load_words(words_ptr, known, CHANNELS // 8, PADDED // 8), 8, 4)
    elif BITS == 8:
        words_ptr = pages_ptr.to(tl.pointer_type(tl.int32)) + (at // 4)[:, None]
        return unpack(_load_words(words_ptr, known, CHANNELS // 4, PADDED // 4), 4, 8)
    else:
        words_ptr = pages_ptr.to(tl.pointer_type(tl.int16)) + (at // 2)[:, None]
        codes = unpack(_load_words(words_ptr, known, CHANNELS // 8, PADDED // 8), 8, 2)
        if BITS == 3:
            high_ptr = pages_ptr + (at + CHANNELS // 4)[:, None]
            high = unpack(_load_words(high_ptr, known, CHANNELS // 8, PADDED // 8), 8, 1)
            codes += high << 2
        return codes


@triton.jit
def _load_words(source_ptr, known, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Words [T, PADDED, int32] of rows that start at source_ptr [T, 1]."""
    mask = cells(known, PADDED, WORDS)
    return tl.load(source_ptr + tl.arange(0, PADDED)[None, :], mask=mask, other=0).to(tl.int32)
