"""Strict-mode causal attention of many new tokens over packed pages and BF16 rows (Triton).

Query i reads BF16 keys where j < SINK or j > i - WINDOW and dequantised keys elsewhere, in one
softmax, without any buffer that grows with the square of the length. The packed form of the new
tokens is already in the pages; their BF16 form comes from the call, and that of older tokens from
the rows as they were before this call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS
from quantmla.kernels.common import INTERPRET
from quantmla.kernels.launch import device_limits, launch_of
from quantmla.kernels.packed_loop import (
    LN_2,
    LOG2_E,
    attention_constants,
    dot,
    packed_run,
    plan_constants,
    softmax_step,
    typed,
)
from quantmla.kernels.unpack import join_fields


def launch(
    q_latent: Tensor,
    q_rope: Tensor,
    new_rows: Tensor,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    starts: Tensor,
    scale: float,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    most_tokens: int,
    page_tokens: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Run the kernel; arguments are those of `attention.prefill`, already checked.

    Returns: out [S, H, R, out_dtype], lse [S, H, fp32, base e].
    Source: own.
    """
    _, heads, rank = q_latent.shape
    batch = seq_lens.shape[0]
    capability = None if INTERPRET.value else device_limits(pages.device.index)[0]
    plan = launch_of("prefill", most_tokens * heads, content_bits, rope_bits, capability)
    # rows that belong to no request are 0
    out = torch.zeros_like(q_latent, dtype=out_dtype)
    lse = q_latent.new_full(q_latent.shape[:2], float("-inf"), dtype=torch.float32)
    if q_latent.numel() == 0 or batch == 0 or most_tokens == 0:
        return out, lse
    prefill_rows[(triton.cdiv(most_tokens * heads, plan.rows), batch)](
        q_latent,
        q_rope,
        new_rows,
        *typed(pages),
        rows,
        block_table,
        seq_lens,
        row_slots,
        starts,
        out,
        lse,
        heads,
        pages.stride(0),
        rows.stride(0),
        block_table.stride(0),
        max(rows.shape[1] - sink_tokens, 1),
        scale * LOG2_E,
        **attention_constants(rank, q_rope.shape[-1], content_bits, rope_bits),
        SINK=sink_tokens,
        WINDOW=window_tokens,
        BLOBS_A_PAGE=page_tokens // PAGE_TOKENS,
        **plan_constants(plan),
        num_warps=plan.warps,
    )
    return out, lse


# Sizes of a call are not compiled in: a head count of its own needs no new kernel.
@triton.jit(do_not_specialize=["heads", "table_stride", "ring_tokens"])
def prefill_rows(
    q_latent, q_rope, new_rows, words, scales, zeros, rows, block_table, seq_lens, row_slots,
    starts, out, lse, heads, blob_stride_bytes, slot_stride, table_stride, ring_tokens, scale_log2,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, BLOBS_A_PAGE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, RECENT_TILE: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of (token, head) rows of a request to everything that they may read.

    Args:
        q_latent [S, H, R], q_rope [S, H, P]: bf16, contiguous, the requests one after the other.
        new_rows [S, R+P, bf16]: latent and rotated key of the new tokens.
        words, scales, zeros: the pool as int16, bf16 and int16.
        rows [slots, SINK + ring_tokens, R+P, bf16]: before this call.
        block_table [B, .., int32]; seq_lens [B, int32], new tokens included; row_slots [B, int32].
        starts [B+1, int32]: first new token of each request, in new_rows.
        out [S, H, R], lse [S, H, fp32, base e].
    """
    # the tile is the fast index, from the last one on: the longest programs start first
    request = tl.program_id(1)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    token = tl.load(starts + request)
    tokens = tl.load(starts + request + 1) - token
    if first_row < tokens * heads:
        length = tl.load(seq_lens + request)
        start = length - tokens  # position of the first new token
        row = first_row + tl.arange(0, ROWS)
        in_range = row < tokens * heads
        position = tl.where(in_range, start + row // heads, -1)
        oldest = start + first_row // heads
        newest = start + tl.minimum(first_row + ROWS - 1, tokens * heads - 1) // heads
        base = token.to(tl.int64) * heads + first_row
        q_latent += base * R
        q_rope += base * P

        N: tl.constexpr = 8 if CONTENT_BITS == 3 else 16 // CONTENT_BITS
        WORDS: tl.constexpr = R // N
        end = tl.maximum(newest - WINDOW + 1, 0)
        top, total, acc = packed_run(
            0, tl.cdiv(end, TILE * CHUNKS), tl.maximum(oldest - WINDOW + 1, 0),
            q_latent, q_rope, words, scales, zeros, block_table + request * table_stride, end,
            position, in_range, blob_stride_bytes, scale_log2,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, CHUNKS, STAGES, ASM, UPCAST,
        )  # fmt: skip
        # from channel mod N to channels in order
        acc = tl.reshape(join_fields(acc, ROWS, WORDS, N), (ROWS, R))

        r, c, p = tl.arange(0, ROWS), tl.arange(0, R), tl.arange(0, P)
        ql = tl.load(q_latent + r[:, None] * R + c[None, :], mask=in_range[:, None], other=0.0)
        qr = tl.load(q_rope + r[:, None] * P + p[None, :], mask=in_range[:, None], other=0.0)
        slot = tl.load(row_slots + request).to(tl.int64)
        rows += slot * slot_stride
        new_rows += (token.to(tl.int64) - start) * (R + P)
        near = tl.maximum(oldest - WINDOW + 1, SINK)  # oldest key of the window of any row
        keys = tl.minimum(SINK, newest + 1) + tl.maximum(newest + 1 - near, 0)
        for first in tl.range(0, keys, RECENT_TILE, num_stages=1):
            n = first + tl.arange(0, RECENT_TILE)
            key = tl.where(n < SINK, n, near + n - SINK)
            present = key <= newest
            index = tl.where(key < SINK, key, SINK + (key - SINK) % ring_tokens)
            old = rows + index * (R + P)
            new = new_rows + key.to(tl.int64) * (R + P)
            source = tl.where(key < start, old, new)[:, None]
            latent = tl.load(source + c[None, :], mask=present[:, None], other=0.0)
            rope = tl.load(source + R + p[None, :], mask=present[:, None], other=0.0)
            score = dot(ql, tl.trans(latent), None, UPCAST)
            score = dot(qr, tl.trans(rope), score, UPCAST) * scale_log2
            seen = (key[None, :] < SINK) | (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen & (key[None, :] <= position[:, None]), score, float("-inf"))
            top, shift, weight = softmax_step(top, score)
            total = total * shift + tl.sum(weight, 1)
            acc = dot(weight.to(tl.bfloat16), latent, acc * shift[:, None], UPCAST)
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        out += base * R
        result = (acc * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + r[:, None] * R + c[None, :], result, mask=in_range[:, None])
        natural = (top + tl.log2(total)) * LN_2
        tl.store(lse + base + r, natural, mask=in_range)
