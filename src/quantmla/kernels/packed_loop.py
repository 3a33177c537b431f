"""Inner loop of every attention kernel: packed tokens, tile by tile, into a running softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantmla.kernels.common import INTERPRET, constants
from quantmla.kernels.launch import Launch
from quantmla.kernels.unpack import (
    few_offsets,
    few_scales,
    field,
    split_fields,
    spread,
    zero_offset,
)

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


def typed(pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pool as the kernels read it: codes, scales and zero points."""
    words = pages.view(torch.int16)
    return words, pages.view(torch.bfloat16), words


def attention_constants(
    kv_lora_rank: int, qk_rope_head_dim: int, content_bits: int, rope_bits: int
) -> dict[str, int]:
    """Return what an attention kernel is compiled for: sizes, bits and plane offsets of a page."""
    known = constants(kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    names = ("R", "P", "CONTENT_BITS", "ROPE_BITS", "ROPE_OFFSET", "SCALE_OFFSET", "ZERO_OFFSET")
    return {name: known[name] for name in names}


def plan_constants(plan: Launch) -> dict[str, int | bool]:
    """Return the constants of a launch; the interpreter has no assembly and no BF16 products."""
    interpret = INTERPRET.value
    return {
        "ROWS": plan.rows,
        "TILE": plan.tile_tokens,
        "RECENT_TILE": plan.recent_tokens,
        "STAGES": plan.stages,
        "ASM": not interpret,
        "UPCAST": interpret,
    }


@triton.jit
def packed_run(
    first, last, common, q_latent, q_rope, words, scales, zeros, block_table, end, position,
    in_range, blob_stride_bytes, scale_log2,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, BLOBS_A_PAGE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows to a run of packed tiles.

    Args:
        first, last: tiles of the run.
        common: how many first packed tokens every row may read.
        q_latent, q_rope: pointers to the first row; rows are contiguous.
        words, scales, zeros: the pool as int16, bf16 and int16.
        block_table: of the request.
        end: packed tokens that some row may read.
        position, in_range [ROWS]: of each row's query.
    Returns: running maximum [ROWS, base 2], sum of weights [ROWS], and a tuple of unnormalised sums
        [ROWS, R / N], channel mod N.
    """
    N: tl.constexpr = 8 if CONTENT_BITS == 3 else 16 // CONTENT_BITS
    WORDS: tl.constexpr = R // N
    ROPE_N: tl.constexpr = 8 if ROPE_BITS == 3 else 16 // ROPE_BITS
    ROPE_WORDS: tl.constexpr = P // ROPE_N
    ROPE_PAD: tl.constexpr = 16 if ROPE_WORDS < 16 else ROPE_WORDS
    r, w, n = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, N)
    wr = tl.arange(0, ROPE_PAD)
    q = tl.load(
        q_latent + r[:, None, None] * R + w[None, :, None] * N + n[None, None, :],
        mask=in_range[:, None, None], other=0.0,
    )  # fmt: skip
    q = split_fields(q, ROWS, WORDS, N)
    qr, acc = (), ()
    for j in tl.static_range(ROPE_N):
        part = tl.load(
            q_rope + r[:, None] * P + wr[None, :] * ROPE_N + j,
            mask=in_range[:, None] & (wr < ROPE_WORDS)[None, :], other=0.0,
        )  # fmt: skip
        qr = qr + (part,)
    for _j in tl.static_range(N):
        acc = acc + (tl.zeros([ROWS, WORDS], tl.float32),)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, TILE], tl.float32)

    # Only tiles at the borders hold keys that some row must not see, or none at all: they go first,
    # so that the loop over the others tests nothing.
    last = tl.maximum(first, last)
    open_first = tl.minimum(tl.maximum(first, tl.cdiv(SINK, TILE)), last)
    open_last = tl.maximum(open_first, tl.minimum(last, common // TILE))
    head = open_first - first
    for border in tl.range(head + last - open_last, num_stages=1):
        tile = tl.where(border < head, first + border, open_last + border - head)
        top, total, acc = packed_tile(
            tile, q, qr, top, total, acc, words, scales, zeros, block_table, end, position,
            blob_stride_bytes, scale_log2, True,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, ASM, UPCAST,
        )  # fmt: skip
    for tile in tl.range(open_first, open_last, num_stages=STAGES):
        top, total, acc = packed_tile(
            tile, q, qr, top, total, acc, words, scales, zeros, block_table, end, position,
            blob_stride_bytes, scale_log2, False,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, ASM, UPCAST,
        )  # fmt: skip
    return top, tl.sum(total, 1), acc


@triton.jit
def packed_tile(
    tile, q, qr, top, total, acc, words, scales, zeros, block_table, end, position,
    blob_stride_bytes, scale_log2, MASKED: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, BLOBS_A_PAGE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add one tile of packed tokens to the running softmax."""
    N: tl.constexpr = 8 if CONTENT_BITS == 3 else 16 // CONTENT_BITS  # codes of a word
    WORDS: tl.constexpr = R // N
    GROUPS: tl.constexpr = R // 64
    ROPE_N: tl.constexpr = 8 if ROPE_BITS == 3 else 16 // ROPE_BITS
    ROPE_WORDS: tl.constexpr = P // ROPE_N
    ROPE_PAD: tl.constexpr = 16 if ROPE_WORDS < 16 else ROPE_WORDS  # a product needs 16 terms
    ROW_WORDS: tl.constexpr = R * (2 if CONTENT_BITS == 3 else CONTENT_BITS) // 16
    CONTENT_STRIDE: tl.constexpr = R * CONTENT_BITS // 16  # [int16] of a token
    ROPE_STRIDE: tl.constexpr = P * ROPE_BITS // 16
    BLOB_TOKENS: tl.constexpr = 64
    TILES_A_BLOB: tl.constexpr = BLOB_TOKENS // TILE
    t, w, g = tl.arange(0, TILE), tl.arange(0, WORDS), tl.arange(0, GROUPS)
    wr = tl.arange(0, ROPE_PAD)
    blob = tile // TILES_A_BLOB
    page = tl.load(block_table + blob // BLOBS_A_PAGE).to(tl.int64)
    address = (page * BLOBS_A_PAGE + blob % BLOBS_A_PAGE) * blob_stride_bytes
    slot = (tile % TILES_A_BLOB) * TILE  # first token of the tile in its blob
    key = blob * BLOB_TOKENS + slot + t
    present = key < end
    code = words + address // 2 + (slot + t)[:, None] * CONTENT_STRIDE
    content = tl.load(code + w[None, :])
    high = content
    if CONTENT_BITS == 3:
        bits = (code + ROW_WORDS).to(tl.pointer_type(tl.uint8))
        high = tl.load(bits + w[None, :]).to(tl.int16)
    planes = scales + address // 2 + SCALE_OFFSET // 2
    lows = zeros + address // 2 + ZERO_OFFSET // 2
    # A token behind the end may hold anything: a scale of 0 makes it 0. Not by a masked load,
    # whose result would be shuffled into both operand layouts.
    step = tl.load(planes + g[None, :] * BLOB_TOKENS + (slot + t)[:, None])  # [TILE, GROUPS]
    if MASKED:
        step = tl.where(present[:, None], step, 0.0).to(tl.bfloat16)
    offset = zero_offset(lows, g[None, :], (slot + t)[:, None], CONTENT_BITS, ASM)
    step = spread(step, TILE, GROUPS, WORDS // GROUPS)
    offset = spread(offset, TILE, GROUPS, WORDS // GROUPS)

    # rope words are read with words as rows: small, and their operand layout stays in a warp
    rope_code = words + address // 2 + ROPE_OFFSET // 2 + (slot + t)[None, :] * ROPE_STRIDE
    in_words = (wr < ROPE_WORDS)[:, None]
    if ROPE_WORDS < ROPE_PAD:
        rope = tl.load(rope_code + wr[:, None], mask=in_words, other=0)
    else:
        rope = tl.load(rope_code + wr[:, None])
    rope_high = rope
    if ROPE_BITS == 3:
        bits = (rope_code + P // 8).to(tl.pointer_type(tl.uint8))
        rope_high = tl.load(bits + wr[:, None], mask=in_words, other=0).to(tl.int16)
    scores = ()
    if ROPE_BITS == 16:
        number = rope.to(tl.bfloat16, bitcast=True)
        if MASKED:
            number = tl.where(present[None, :], number, 0.0).to(tl.bfloat16)
        scores = scores + (dot(qr[0], number, None, UPCAST),)
    else:
        rope_step = few_scales(planes, GROUPS, slot + t)
        if MASKED:
            rope_step = tl.where(present, rope_step, 0.0).to(tl.bfloat16)
        rope_offset = few_offsets(lows, GROUPS, slot + t, ROPE_BITS)
        rope_step = tl.broadcast_to(rope_step[None, :], (ROPE_PAD, TILE))
        rope_offset = tl.broadcast_to(rope_offset[None, :], (ROPE_PAD, TILE))
        for j in tl.static_range(ROPE_N):
            k = field(rope, rope_high, rope_offset, rope_step, ROPE_BITS, j, "rope", ASM)
            if j < N:  # each field has its own sum: one chain of products would be slow
                scores = scores + (dot(qr[j], k, None, UPCAST),)
            else:
                scores = (dot(qr[j], k, scores[0], UPCAST),) + scores[1:]
    score = tl.zeros([ROWS, TILE], tl.float32)
    for j in tl.static_range(N):
        k = field(content, high, offset, step, CONTENT_BITS, j, "key", ASM)
        if j < len(scores):
            score += dot(q[j], tl.trans(k), scores[j], UPCAST)
        else:
            score += dot(q[j], tl.trans(k), None, UPCAST)
    score *= scale_log2
    if MASKED:
        visible = (key >= SINK)[None, :] & (key[None, :] <= position[:, None] - WINDOW)
        score = tl.where(visible, score, -float("inf"))
    top, shift, weight = softmax_step(top, score)
    total = total * shift[:, None] + weight
    weight = weight.to(tl.bfloat16)
    sums = ()
    for j in tl.static_range(N):
        v = field(content, high, offset, step, CONTENT_BITS, j, "value", ASM)
        sums = sums + (dot(weight, v, acc[j] * shift[:, None], UPCAST),)
    return top, total, sums


@triton.jit
def softmax_step(top, score):
    """Return the new running maximum, what old sums shrink by, and the weights of this tile."""
    new = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # nothing seen yet: exp2(-inf - 0) = 0
    return new, tl.exp2(top - safe), tl.exp2(score - safe[:, None])


@triton.jit
def dot(a, b, c, UPCAST: tl.constexpr):
    """Matrix product with fp32 sums; the interpreter needs fp32 operands."""
    if UPCAST:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return product if c is None else c + product
    return tl.dot(a, b) if c is None else tl.dot(a, b, c)
