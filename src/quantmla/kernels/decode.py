"""Split-KV decode over packed pages and BF16 rows: one softmax, no BF16 history (Triton).

One launch holds two kinds of programs. The last part of a request attends to its BF16 rows (sinks
and recent tokens), every other part to a run of packed blobs. A part leaves its normalised output
and its log-sum-exp; the second launch merges the parts. Queries are absorbed, so all heads share
one key of R+P channels and one value of R channels, and packed words are read once for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS
from quantmla.errors import CacheError
from quantmla.kernels.common import INTERPRET
from quantmla.kernels.launch import INTERPRETER_SMS, device_limits, launch_of, split_blobs
from quantmla.kernels.packed_loop import (
    LN_2,
    LOG2_E,
    attention_constants,
    codes_a_word,
    dot,
    packed_run,
    plan_constants,
    softmax_step,
    typed,
)

# What a program of the second launch merges: a fixed number of parts a step, so that the sum does
# not depend on how many empty parts follow.
MERGE_PARTS, MERGE_COLUMNS = 64, 128
EARLY_LAUNCH = (9, 0)  # oldest GPU that can start a kernel before the one it depends on has ended
MOST_PARTS = 65535  # of a grid's third axis
MOST_PARTS_BYTES = 4 << 30


def launch(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    scale: float,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    page_tokens: int,
    split_tokens: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Run both launches; arguments are those of `attention.decode`, already checked.

    Returns: out [B, S, H, R, out_dtype], lse [B, S, H, fp32, base e].
    Source: own.
    """
    batch, queries, heads, rank = q_latent.shape
    all_rows = queries * heads
    out = torch.empty_like(q_latent, dtype=out_dtype)
    lse = q_latent.new_empty(batch, queries, heads, dtype=torch.float32)
    if batch == 0 or all_rows == 0:
        return out, lse
    interpret = INTERPRET.value
    capability, sms = (None, INTERPRETER_SMS) if interpret else device_limits(pages.device.index)
    plan = launch_of("decode", all_rows, content_bits, rope_bits, capability)
    # the second launch gets ready while the first one ends
    early = capability is not None and capability >= EARLY_LAUNCH
    row_tiles = triton.cdiv(all_rows, plan.rows)
    blobs = block_table.shape[1] * page_tokens // PAGE_TOKENS
    if split_tokens:
        size = split_tokens // PAGE_TOKENS
    else:
        size = split_blobs(batch, row_tiles, blobs, sms, plan.programs_an_sm)
    parts = triton.cdiv(blobs, size) + 1
    _check_parts(parts, batch * all_rows * rank, split_tokens)
    out_parts = q_latent.new_empty(parts, batch, all_rows, rank, dtype=torch.float32)
    lse_parts = q_latent.new_empty(parts, batch, all_rows, dtype=torch.float32)
    decode_parts[(batch, row_tiles, parts)](
        q_latent,
        q_rope,
        *typed(pages),
        rows,
        block_table,
        seq_lens,
        row_slots,
        out_parts,
        lse_parts,
        queries,
        heads,
        parts,
        size,
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
        EARLY=early,
        num_warps=plan.warps,
    )
    columns = min(rank, MERGE_COLUMNS)
    merge_parts[(batch * all_rows, rank // columns)](
        out_parts,
        lse_parts,
        out,
        lse,
        parts,
        R=rank,
        N=codes_a_word(content_bits),
        COLUMNS=columns,
        CHUNK=MERGE_PARTS,
        EARLY=early,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
    return out, lse


def _check_parts(parts: int, numbers: int, split_tokens: int) -> None:
    """Refuse parts whose results would fill the memory of the GPU, or a grid that is too large."""
    taken_bytes = 4 * parts * numbers
    if parts > MOST_PARTS or taken_bytes > MOST_PARTS_BYTES:
        raise CacheError(
            "a decode step would be cut into too many parts",
            where="quantmla::decode",
            expected=f"at most {MOST_PARTS} parts and {MOST_PARTS_BYTES} bytes of partial results",
            got=f"{parts} parts and {taken_bytes} bytes, with split_tokens={split_tokens}",
            next_step="raise split_tokens, narrow the block table, or decode a smaller batch",
        )


# Sizes of a call are not compiled in: a batch or a head count of its own needs no new kernel.
@triton.jit(
    do_not_specialize=["queries", "heads", "parts", "split_blobs", "table_stride", "ring_tokens"]
)
def decode_parts(
    q_latent, q_rope, words, scales, zeros, rows, block_table, seq_lens, row_slots, out, lse,
    queries, heads, parts, split_blobs, blob_stride_bytes, slot_stride, table_stride, ring_tokens,
    scale_log2,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, BLOBS_A_PAGE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, RECENT_TILE: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of (query, head) rows of a request to one of its parts.

    Args:
        q_latent [B, S*H, R], q_rope [B, S*H, P]: bf16, contiguous.
        words, scales, zeros: the pool as int16, bf16 and int16.
        rows [slots, SINK + ring_tokens, R+P, bf16]; block_table [B, .., int32]; seq_lens, row_slots
            [B, int32].
        out [parts, B, S*H, R, fp32]: channels in order of (channel mod N, channel // N), the order
            in which packed words give them; N codes are a word.
        lse [parts, B, S*H, fp32, base 2].
        scale_log2: softmax scale times log2(e).
    """
    # The part is the slowest index, and the short part that reads BF16 rows comes last: then long
    # programs are dealt evenly to the SMs.
    request = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    part = tl.program_id(2)
    all_rows = queries * heads
    row = first_row + tl.arange(0, ROWS)
    in_range = row < all_rows
    length = tl.load(seq_lens + request)
    slot = tl.load(row_slots + request).to(tl.int64)
    position = length - queries + row // heads  # of each row's query
    position = tl.where(in_range, position, -1)
    q_latent += (request.to(tl.int64) * all_rows + first_row) * R
    q_rope += (request.to(tl.int64) * all_rows + first_row) * P
    # The BF16 part is merged first: its place must not depend on how many parts follow.
    place = tl.where(part == parts - 1, 0, part + 1)
    target = (place.to(tl.int64) * tl.num_programs(0) + request) * all_rows
    out += (target + first_row) * R
    lse += target
    if part == parts - 1:
        _recent(
            q_latent, q_rope, rows + slot * slot_stride, out, lse + row, length, position, in_range,
            queries, ring_tokens, scale_log2,
            R, P, CONTENT_BITS, SINK, WINDOW, ROWS, RECENT_TILE, UPCAST, EARLY,
        )  # fmt: skip
    else:
        _packed(
            q_latent, q_rope, words, scales, zeros, block_table + request * table_stride,
            out, lse + row, length, position, in_range, queries, part, split_blobs,
            blob_stride_bytes, scale_log2,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, CHUNKS, STAGES, ASM, UPCAST, EARLY,
        )  # fmt: skip


@triton.jit
def _recent(
    q_latent, q_rope, rows, out, lse, length, position, in_range, queries, ring_tokens, scale_log2,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, SINK: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # Channels in slices: one chain of products over all of them would be slow.
    SLICES: tl.constexpr = R // 128 if R > 128 else 1
    C: tl.constexpr = R // SLICES
    N: tl.constexpr = 8 if CONTENT_BITS == 3 else 16 // CONTENT_BITS
    r, c, p = tl.arange(0, ROWS), tl.arange(0, C), tl.arange(0, P)
    ql, acc = (), ()
    for i in tl.static_range(SLICES):
        q = q_latent + r[:, None] * R + (i * C + c)[None, :]
        ql = ql + (tl.load(q, mask=in_range[:, None], other=0.0),)
        acc = acc + (tl.zeros([ROWS, C], tl.float32),)
    qr = tl.load(q_rope + r[:, None] * P + p[None, :], mask=in_range[:, None], other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    start = tl.maximum(length - queries - WINDOW + 1, SINK)  # oldest recent token of any query
    tokens = tl.minimum(SINK, length) + tl.maximum(length - start, 0)
    for first in tl.range(0, tokens, TILE, num_stages=3):
        n = first + tl.arange(0, TILE)
        key = tl.where(n < SINK, n, start + n - SINK)  # its position
        index = tl.where(n < SINK, n, SINK + (key - SINK) % ring_tokens)
        present = (key < length)[:, None]
        base = rows + index[:, None] * (R + P)
        rope = tl.load(base + R + p[None, :], mask=present, other=0.0)
        score = dot(qr, tl.trans(rope), None, UPCAST)
        latent = ()
        for i in tl.static_range(SLICES):
            piece = tl.load(base + (i * C + c)[None, :], mask=present, other=0.0)
            score += dot(ql[i], tl.trans(piece), None, UPCAST)
            latent = latent + (piece,)
        near = (key[None, :] < SINK) | (key[None, :] > position[:, None] - WINDOW)
        near &= key[None, :] <= position[:, None]
        top, shift, weight = softmax_step(top, tl.where(near, score * scale_log2, -float("inf")))
        total = total * shift + tl.sum(weight, 1)
        weight = weight.to(tl.bfloat16)
        sums = ()
        for i in tl.static_range(SLICES):
            sums = sums + (dot(weight, latent[i], acc[i] * shift[:, None], UPCAST),)
        acc = sums
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    j, w = tl.arange(0, N), tl.arange(0, C // N)[None, None, :]
    for i in tl.static_range(SLICES):
        # [ROWS, C / N, N] to the order of the parts
        part = tl.permute(tl.reshape(acc[i] * inverse[:, None], (ROWS, C // N, N)), (0, 2, 1))
        target = out + r[:, None, None] * R + j[None, :, None] * (R // N) + i * (C // N) + w
        tl.store(target, part, mask=in_range[:, None, None])
    tl.store(lse, top + tl.log2(total), mask=in_range)


@triton.jit
def _packed(
    q_latent, q_rope, words, scales, zeros, block_table, out, lse, length, position, in_range,
    queries, split, split_blobs, blob_stride_bytes, scale_log2,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, BLOBS_A_PAGE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = 8 if CONTENT_BITS == 3 else 16 // CONTENT_BITS  # codes of a word
    WORDS: tl.constexpr = R // N
    BLOB_TOKENS: tl.constexpr = 64
    STEPS_A_BLOB: tl.constexpr = BLOB_TOKENS // (TILE * CHUNKS)
    end = tl.maximum(length - WINDOW, 0)  # packed tokens that the newest query reads
    first_blob = split * split_blobs
    last_blob = tl.minimum(first_blob + split_blobs, tl.cdiv(end, BLOB_TOKENS))
    if first_blob < last_blob:
        top, total, acc = packed_run(
            first_blob * STEPS_A_BLOB, last_blob * STEPS_A_BLOB, tl.maximum(end - queries + 1, 0),
            q_latent, q_rope, words, scales, zeros, block_table, end, position, in_range,
            blob_stride_bytes, scale_log2,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, CHUNKS, STAGES, ASM, UPCAST,
        )  # fmt: skip
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        r, w = tl.arange(0, ROWS), tl.arange(0, WORDS)
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        for j in tl.static_range(N):
            target = out + r[:, None] * R + (j * WORDS + w)[None, :]
            tl.store(target, acc[j] * inverse[:, None], mask=in_range[:, None])
        tl.store(lse, top + tl.log2(total), mask=in_range)
    else:  # the output of a part without keys stays unwritten
        tl.store(lse, tl.full([ROWS], float("-inf"), tl.float32), mask=in_range)


@triton.jit(do_not_specialize=["parts"])
def merge_parts(
    out_parts, lse_parts, out, lse, parts, R: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one (request, query, head) row; a row without keys gives 0 and -inf.

    Args:
        out_parts [parts, rows, R, fp32], lse_parts [parts, rows, fp32, base 2]: of decode_parts.
        out [rows, R], lse [rows, fp32, base e].
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for the parts
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, CHUNK)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    # in chunks of a fixed size, so that the sum does not depend on how many empty parts follow
    for first in range(0, parts, CHUNK):
        part = first + n
        some = tl.load(lse_parts + part * rows + row, mask=part < parts, other=float("-inf"))
        source = out_parts + (part[:, None] * rows + row) * R + c[None, :]
        # an empty part left its output unwritten
        values = tl.load(source, mask=(part < parts)[:, None], other=0.0)
        new = tl.maximum(top, tl.max(some, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(some - safe)
        shrink = tl.exp2(top - safe)
        values = tl.where((weight > 0)[:, None], values, 0.0)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        top = new
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    channel = c % (R // N) * N + c // (R // N)
    tl.store(out + row * R + channel, (acc * inverse).to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + row, (top + tl.log2(total)) * LN_2)
