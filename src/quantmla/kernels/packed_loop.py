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


def codes_a_word(bits: int) -> int:
    """Return how many codes the kernels read as one word."""
    return 8 if bits == 3 else 16 // bits


def plan_constants(plan: Launch) -> dict[str, int | bool]:
    """Return the constants of a launch; the interpreter has no assembly and no BF16 products."""
    interpret = INTERPRET.value
    return {
        "ROWS": plan.rows,
        "TILE": plan.tile_tokens,
        "CHUNKS": plan.chunks,
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
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows to a run of packed tokens.

    Args:
        first, last: steps of the run; a step is CHUNKS tiles.
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
    STEP: tl.constexpr = TILE * CHUNKS
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

    # Only the last tiles hold keys that some row must not see, or none at all: they have a loop of
    # their own, so that the long one tests nothing but the sinks.
    last = tl.maximum(first, last)
    open_last = tl.maximum(first, tl.minimum(last, common // STEP))
    for step in tl.range(first, open_last, num_stages=STAGES):
        top, total, acc = packed_step(
            step, q, qr, top, total, acc, words, scales, zeros, block_table, end, position,
            blob_stride_bytes, scale_log2, False,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, CHUNKS, ASM, UPCAST,
        )  # fmt: skip
    for tile in tl.range(open_last * CHUNKS, last * CHUNKS, num_stages=1):
        top, total, acc = packed_step(
            tile, q, qr, top, total, acc, words, scales, zeros, block_table, end, position,
            blob_stride_bytes, scale_log2, True,
            R, P, CONTENT_BITS, ROPE_BITS, SINK, WINDOW, BLOBS_A_PAGE,
            ROPE_OFFSET, SCALE_OFFSET, ZERO_OFFSET, ROWS, TILE, 1, ASM, UPCAST,
        )  # fmt: skip
    return top, tl.sum(total, 1), acc


@triton.jit
def packed_step(
    step, q, qr, top, total, acc, words, scales, zeros, block_table, end, position,
    blob_stride_bytes, scale_log2, MASKED: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, CONTENT_BITS: tl.constexpr, ROPE_BITS: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, BLOBS_A_PAGE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add CHUNKS tiles of packed tokens to the running softmax.

    The tiles share one maximum and one rescaling, and each field of the queries is read once for
    all of them.
    """
    N: tl.constexpr = 8 if CONTENT_BITS == 3 else 16 // CONTENT_BITS  # codes of a word
    GROUPS: tl.constexpr = R // 64
    BLOB_TOKENS: tl.constexpr = 64
    STEPS_A_BLOB: tl.constexpr = BLOB_TOKENS // (TILE * CHUNKS)
    t = tl.arange(0, TILE)
    blob = step // STEPS_A_BLOB
    page = tl.load(block_table + blob // BLOBS_A_PAGE).to(tl.int64)
    address = (page * BLOBS_A_PAGE + blob % BLOBS_A_PAGE) * blob_stride_bytes
    words += address // 2
    planes = scales + address // 2 + SCALE_OFFSET // 2
    lows = zeros + address // 2 + ZERO_OFFSET // 2
    base = step % STEPS_A_BLOB * (TILE * CHUNKS)  # first token of the step in its blob
    tiles, scores = (), ()
    for c in tl.static_range(CHUNKS):
        slot = base + c * TILE + t
        present = blob * BLOB_TOKENS + slot < end
        tiles = tiles + (
            _content(words, planes, lows, slot, present, MASKED, R, CONTENT_BITS, TILE, ASM),
        )
        # two sums for each tile: one chain of products over all channels would be slow
        scores = scores + _rope_scores(
            words + ROPE_OFFSET // 2, planes, lows, slot, present, qr, MASKED,
            P, ROPE_BITS, GROUPS, ROWS, TILE, ASM, UPCAST,
        )  # fmt: skip
    for j in tl.static_range(N):
        sums = ()
        for c in tl.static_range(CHUNKS):
            code, high, offset, scale = tiles[c]
            k = field(code, high, offset, scale, CONTENT_BITS, j, "key", ASM)
            if j % 2 == 0:
                even = dot(q[j], tl.trans(k), scores[2 * c], UPCAST)
                sums = sums + (even, scores[2 * c + 1])
            else:
                odd = dot(q[j], tl.trans(k), scores[2 * c + 1], UPCAST)
                sums = sums + (scores[2 * c], odd)
        scores = sums
    masked = ()
    most = tl.full([ROWS, TILE], float("-inf"), tl.float32)
    for c in tl.static_range(CHUNKS):
        key = blob * BLOB_TOKENS + base + c * TILE + t
        score = (scores[2 * c] + scores[2 * c + 1]) * scale_log2
        if c * TILE < SINK:
            score = tl.where((key >= SINK)[None, :], score, float("-inf"))
        if MASKED:
            score = tl.where(key[None, :] <= position[:, None] - WINDOW, score, float("-inf"))
        masked = masked + (score,)
        most = tl.maximum(most, score)
    top, safe, shift = new_maximum(top, most)
    total = total * shift[:, None]
    weights = ()
    for c in tl.static_range(CHUNKS):
        weight = tl.exp2(masked[c] - safe[:, None])
        total += weight
        weights = weights + (weight.to(tl.bfloat16),)
    result = ()
    for j in tl.static_range(N):
        sums = acc[j] * shift[:, None]
        for c in tl.static_range(CHUNKS):
            code, high, offset, scale = tiles[c]
            v = field(code, high, offset, scale, CONTENT_BITS, j, "value", ASM)
            sums = dot(weights[c], v, sums, UPCAST)
        result = result + (sums,)
    return top, total, result


@triton.jit
def _content(
    words, planes, lows, slot, present, MASKED: tl.constexpr,
    R: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words, high bits, offsets and scales [TILE, R / N] of the latents in some slots."""
    N: tl.constexpr = 8 if BITS == 3 else 16 // BITS
    WORDS: tl.constexpr = R // N
    GROUPS: tl.constexpr = R // 64
    w, g = tl.arange(0, WORDS), tl.arange(0, GROUPS)
    row = words + slot[:, None] * (R * BITS // 16)
    code = tl.load(row + w[None, :])
    high = code
    if BITS == 3:
        bits = (row + R * 2 // 16).to(tl.pointer_type(tl.uint8))
        high = tl.load(bits + w[None, :]).to(tl.int16)
    # A token behind the end may hold anything: a scale of 0 makes it 0. Not by a masked load,
    # whose result would be shuffled into both operand layouts.
    scale = tl.load(planes + g[None, :] * 64 + slot[:, None])  # [TILE, GROUPS]
    if MASKED:
        scale = tl.where(present[:, None], scale, 0.0).to(tl.bfloat16)
    offset = zero_offset(lows, g[None, :], slot[:, None], BITS, ASM)
    offset = spread(offset, TILE, GROUPS, WORDS // GROUPS)
    return code, high, offset, spread(scale, TILE, GROUPS, WORDS // GROUPS)


@triton.jit
def _rope_scores(
    words, planes, lows, slot, present, qr, MASKED: tl.constexpr,
    P: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Two terms [ROWS, TILE] of the scores of the RoPE keys in some slots."""
    N: tl.constexpr = 8 if BITS == 3 else 16 // BITS
    WORDS: tl.constexpr = P // N
    PAD: tl.constexpr = 16 if WORDS < 16 else WORDS  # a product needs 16 terms
    w = tl.arange(0, PAD)
    # words are the rows here: few of them, and their operand layout stays within a warp
    row = words + slot[None, :] * (P * BITS // 16)
    in_row = (w < WORDS)[:, None]
    if WORDS < PAD:
        code = tl.load(row + w[:, None], mask=in_row, other=0)
    else:
        code = tl.load(row + w[:, None])
    even = tl.zeros([ROWS, TILE], tl.float32)
    odd = tl.zeros([ROWS, TILE], tl.float32)
    if BITS == 16:
        k = code.to(tl.bfloat16, bitcast=True)
        if MASKED:
            k = tl.where(present[None, :], k, 0.0).to(tl.bfloat16)
        even = dot(qr[0], k, even, UPCAST)
    else:
        high = code
        if BITS == 3:
            bits = (row + P // 8).to(tl.pointer_type(tl.uint8))
            high = tl.load(bits + w[:, None], mask=in_row, other=0).to(tl.int16)
        scale = few_scales(planes, GROUPS, slot)
        if MASKED:
            scale = tl.where(present, scale, 0.0).to(tl.bfloat16)
        offset = few_offsets(lows, GROUPS, slot, BITS)
        scale = tl.broadcast_to(scale[None, :], (PAD, TILE))
        offset = tl.broadcast_to(offset[None, :], (PAD, TILE))
        for j in tl.static_range(N):
            k = field(code, high, offset, scale, BITS, j, "rope", ASM)
            if j % 2 == 0:
                even = dot(qr[j], k, even, UPCAST)
            else:
                odd = dot(qr[j], k, odd, UPCAST)
    return even, odd


@triton.jit
def new_maximum(top, score):
    """Return the running maximum, the same without -inf, and what old sums shrink by."""
    new = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # nothing seen yet: exp2(-inf - 0) = 0
    return new, safe, tl.exp2(top - safe)


@triton.jit
def softmax_step(top, score):
    """Return the new running maximum, what old sums shrink by, and the weights of this tile."""
    new, safe, shift = new_maximum(top, score)
    return new, shift, tl.exp2(score - safe[:, None])


@triton.jit
def dot(a, b, c, UPCAST: tl.constexpr):
    """Matrix product with fp32 sums; the interpreter needs fp32 operands."""
    if UPCAST:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return product if c is None else c + product
    return tl.dot(a, b) if c is None else tl.dot(a, b, c)
