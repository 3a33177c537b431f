"""Triton kernel `write`: quantise, pack and store new tokens, and their BF16 rows, in one launch.

A program takes a few neighbouring tokens, whole rows each. It follows docs/layout.md, section 3,
to the bit. Launched with enable_fp_fusion=False, since a fused multiply-add could change a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS
from quantmla.kernels.codes import (
    INTEGER_BITS,
    feed_back,
    finite,
    pack,
    quantise,
    replace,
    saturate,
)
from quantmla.kernels.common import (
    INTERPRET,
    SLOTS,
    bf16_bits,
    bf16_numbers,
    cells,
    constants,
    zero_place,
)

_INF = tl.constexpr(float("inf"))
INTERPRETER_SHAPE = 16, 1  # there a program costs tens of milliseconds, whatever its size
REGISTERS_A_THREAD = 64  # 32 programs of one warp then fit an SM, the most that it takes


def launch(
    latent: Tensor,
    k_rope: Tensor,
    pages: Tensor,
    rows: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    seq_ends: Tensor,
    nonfinite: Tensor,
    content_clip: Tensor | None,
    rope_clip: Tensor | None,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    rope_order: Tensor | None = None,
    rope_feedback: Tensor | None = None,
    *,
    shape: tuple[int, int] | None = None,
) -> None:
    """Launch the kernel; the arguments are those of `ops.write` and are not checked here.

    Args:
        shape: (tokens of a program, warps of a program) instead of one warp for each token.
    Source: own.
    """
    n_tokens = latent.shape[0]
    if n_tokens == 0:
        return
    block_tokens, num_warps = shape or (INTERPRETER_SHAPE if INTERPRET.value else (1, 1))
    write_kernel[(triton.cdiv(n_tokens, block_tokens),)](
        latent,
        k_rope,
        pages,
        rows,
        slot_mapping,
        positions,
        row_slots,
        seq_ends,
        nonfinite,
        content_clip,
        rope_clip,
        rope_order,
        rope_feedback,
        n_tokens,
        pages.shape[0] * PAGE_TOKENS,
        rows.shape[0],
        sink_tokens,
        rows.shape[1] - sink_tokens,
        latent.stride(0),
        k_rope.stride(0),
        pages.stride(0),
        rows.stride(0),
        rows.stride(1),
        **constants(latent.shape[1], k_rope.shape[1], content_bits, rope_bits),
        BLOCK_TOKENS=block_tokens,
        num_warps=num_warps,
        maxnreg=REGISTERS_A_THREAD if (block_tokens, num_warps) == (1, 1) else None,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=["n_tokens", "pool_tokens", "n_row_slots", "sink_tokens", "ring_tokens"]
)
def write_kernel(
    latent_ptr,
    k_rope_ptr,
    pages_ptr,
    rows_ptr,
    slot_mapping_ptr,
    positions_ptr,
    row_slots_ptr,
    seq_ends_ptr,
    nonfinite_ptr,
    content_clip_ptr,
    rope_clip_ptr,
    rope_order_ptr,
    rope_feedback_ptr,
    n_tokens,
    pool_tokens,
    n_row_slots,
    sink_tokens,
    ring_tokens,
    latent_stride,
    k_rope_stride,
    page_stride,
    rows_slot_stride,
    rows_stride,
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
    BLOCK_TOKENS: tl.constexpr,
):
    """Write tokens program_id * BLOCK_TOKENS and following; see `ops.write`."""
    if BLOCK_TOKENS == 1:
        token = tl.full([1], tl.program_id(0), tl.int64)
        inside = tl.full([1], True, tl.int1)
    else:
        token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = token < n_tokens
    # no load waits for another one, so rows are also read of tokens that are not written
    index = _load_each(slot_mapping_ptr, token, inside, -1)
    content = _load_rows(latent_ptr, token, latent_stride, inside, R, R_PADDED)
    rope = _load_rows(k_rope_ptr, token, k_rope_stride, inside, P, P_PADDED)
    row_at, kept = _row_offset(
        token,
        inside,
        positions_ptr,
        row_slots_ptr,
        seq_ends_ptr,
        n_row_slots,
        sink_tokens,
        ring_tokens,
        rows_slot_stride,
        rows_stride,
    )
    written = (index >= 0) & (index < pool_tokens)
    kept = kept & written
    blob, slot = index // SLOTS, index % SLOTS
    byte = blob * page_stride  # where the blob of each token starts

    _store_rows(rows_ptr, row_at, content, kept, R)
    _store_rows(rows_ptr, row_at + R, rope, kept, P)
    if CONTENT_BITS == 16:
        _store_rows(pages_ptr, (byte + CONTENT_OFFSET) // 2 + slot * R, content, written, R)
    if ROPE_BITS == 16:
        _store_rows(pages_ptr, (byte + ROPE_OFFSET) // 2 + slot * P, rope, written, P)

    content_x, rope_x = _grouped(content, GROUP), _grouped(rope, GROUP)
    rope_kept = rope_x  # as the BF16 row holds it
    # One sum finds NaN, Inf and magnitudes of 2**126 and above in the whole tile: none of them
    # can leave it finite. A sum that overflows by itself only costs the time of the branch.
    total = tl.sum(content_x * 4.0) + tl.sum(rope_x * 4.0)
    if not (tl.abs(total) < _INF):
        content_x, rope_x = saturate(content_x), saturate(rope_x)
        content_row, rope_row = bf16_numbers(content), bf16_numbers(rope)
        bad = _count_nonfinite(content_row, written) + _count_nonfinite(rope_row, written)
        tl.atomic_add(nonfinite_ptr, bad.to(tl.int64), sem="relaxed")
        peak = tl.maximum(tl.max(finite(content_row), 1), tl.max(finite(rope_row), 1))
        content_safe = _bits_exactly(replace(content_row, peak[:, None]))
        rope_safe = _bits_exactly(replace(rope_row, peak[:, None]))
        rope_kept = _grouped(rope_safe, GROUP)
        tl.debug_barrier()  # the rows as they came are stored already
        _store_rows(rows_ptr, row_at, content_safe, kept, R)
        _store_rows(rows_ptr, row_at + R, rope_safe, kept, P)
        if CONTENT_BITS == 16:
            at = (byte + CONTENT_OFFSET) // 2 + slot * R
            _store_rows(pages_ptr, at, content_safe, written, R)
        if ROPE_BITS == 16:
            _store_rows(pages_ptr, (byte + ROPE_OFFSET) // 2 + slot * P, rope_safe, written, P)

    if CONTENT_BITS != 16:
        codes, scale, zero = quantise(content_x, content_clip_ptr, CONTENT_BITS, CONTENT_GROUPS)
        at = byte + CONTENT_OFFSET + slot * (R * CONTENT_BITS // 8)
        _store_codes(pages_ptr, at, codes, written, R, CONTENT_BITS)
        _store_scales(pages_ptr, byte + SCALE_OFFSET, slot, scale, written, 0, CONTENT_GROUPS)
        _store_zeros(pages_ptr, byte + ZERO_OFFSET, slot, zero, written, 0, CONTENT_GROUPS)
    if ROPE_BITS != 16:
        codes, scale, zero = quantise(rope_x, rope_clip_ptr, ROPE_BITS, ROPE_GROUPS)
        if rope_order_ptr is not None:
            codes = feed_back(
                rope_kept, codes, scale, zero, rope_order_ptr, rope_feedback_ptr, P, ROPE_BITS
            )
        at = byte + ROPE_OFFSET + slot * (P * ROPE_BITS // 8)
        _store_codes(pages_ptr, at, codes, written, P, ROPE_BITS)
        first: tl.constexpr = CONTENT_GROUPS
        _store_scales(pages_ptr, byte + SCALE_OFFSET, slot, scale, written, first, ROPE_GROUPS)
        _store_zeros(pages_ptr, byte + ZERO_OFFSET, slot, zero, written, first, ROPE_GROUPS)


@triton.jit
def _load_each(ptr, token, inside, other: tl.constexpr):
    """One number a token [T]. That of a single token is a scalar: whatever is computed from it is
    then computed once, not once for each layout that it is needed in."""
    if token.shape[0] == 1:
        return tl.full([1], tl.load(ptr + tl.program_id(0)), ptr.dtype.element_ty)
    else:
        return tl.load(ptr + token, mask=inside, other=other)


@triton.jit
def _load_rows(source_ptr, token, stride, inside, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    """BF16 bits [T, PADDED] of a path; 0 where there is no channel or token."""
    channel = tl.arange(0, PADDED)
    mask = cells(inside, PADDED, CHANNELS)
    x = tl.load(source_ptr + token[:, None] * stride + channel[None, :], mask=mask, other=0)
    if source_ptr.dtype.element_ty == tl.bfloat16:
        return x.to(tl.int16, bitcast=True)
    else:
        return bf16_bits(x.to(tl.float32))


@triton.jit
def _row_offset(
    token,
    inside,
    positions_ptr,
    row_slots_ptr,
    seq_ends_ptr,
    n_row_slots,
    sink_tokens,
    ring_tokens,
    slot_stride,
    row_stride,
):
    """Where in `rows` tokens go [T, elements], and which of them have a row there [T]."""
    position = _load_each(positions_ptr, token, inside, -1)
    row_slot = _load_each(row_slots_ptr, token, inside, -1)
    seq_end = _load_each(seq_ends_ptr, token, inside, 0)
    in_sink = (position >= 0) & (position < sink_tokens)
    # of the tokens of one call that share a ring row, only the last one writes it
    in_ring = (position >= sink_tokens) & (position >= seq_end - ring_tokens)
    in_ring = in_ring & (position < seq_end)  # never true without a ring
    ring_row = sink_tokens + (position - sink_tokens) % tl.maximum(ring_tokens, 1)
    row = tl.where(in_sink, position, ring_row)
    kept = (in_sink | in_ring) & (row_slot >= 0) & (row_slot < n_row_slots)
    return row_slot.to(tl.int64) * slot_stride + row.to(tl.int64) * row_stride, kept


@triton.jit
def _store_rows(target_ptr, at, bits, mask, CHANNELS: tl.constexpr):
    """Store BF16 bits [T, PADDED] as rows at offsets [T, elements of 2 bytes]."""
    target_ptr = target_ptr.to(tl.pointer_type(tl.int16))
    channel = tl.arange(0, bits.shape[1])
    mask = cells(mask, bits.shape[1], CHANNELS)
    tl.store(target_ptr + at[:, None] + channel[None, :], bits, mask=mask)


@triton.jit
def _grouped(bits, GROUP: tl.constexpr):
    """Numbers [T, G, n] of BF16 bits [T, PADDED]; zeros of the padding change no group."""
    CHANNELS: tl.constexpr = bits.shape[1]
    n: tl.constexpr = GROUP if CHANNELS > GROUP else CHANNELS
    return tl.reshape(bf16_numbers(bits), (bits.shape[0], CHANNELS // n, n))


@triton.jit
def _count_nonfinite(x, written):
    return tl.sum((~(tl.abs(x) < _INF) & written[:, None]).to(tl.int32))


@triton.jit
def _bits_exactly(x):
    """BF16 bits of fp32 numbers that are BF16 numbers."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def _store_codes(pages_ptr, at, codes, written, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Pack codes [T, G, n] and store them as words of a row that starts at byte `at` [T]."""
    if BITS == 4:
        word = pack(codes - INTEGER_BITS, 8, 4)
        _store_words(pages_ptr.to(tl.pointer_type(tl.int32)), at // 4, word, written, CHANNELS // 8)
    elif BITS == 8:
        word = pack(codes - INTEGER_BITS, 4, 8)
        _store_words(pages_ptr.to(tl.pointer_type(tl.int32)), at // 4, word, written, CHANNELS // 4)
    else:
        # 3 bits: the low two of every channel as 2-bit codes, then the high ones as 1-bit codes
        word = pack(codes & 3, 8, 2).to(tl.int16)
        _store_words(pages_ptr.to(tl.pointer_type(tl.int16)), at // 2, word, written, CHANNELS // 8)
        if BITS == 3:
            word = pack((codes >> 2) & 1, 8, 1).to(tl.uint8)
            _store_words(pages_ptr, at + CHANNELS // 4, word, written, CHANNELS // 8)


@triton.jit
def _store_words(target_ptr, at, word, written, WORDS: tl.constexpr):
    column = tl.arange(0, word.shape[1])
    mask = cells(written, word.shape[1], WORDS)
    tl.store(target_ptr + at[:, None] + column[None, :], word, mask=mask)


@triton.jit
def _store_scales(pages_ptr, at, slot, bits, written, FIRST: tl.constexpr, GROUPS: tl.constexpr):
    """Store [T, G] into the scale plane at byte `at` [T]; neighbouring tokens stand together."""
    group = tl.arange(0, bits.shape[1])
    target_ptr = pages_ptr.to(tl.pointer_type(tl.int16))
    entry = (at // 2 + slot)[None, :] + ((FIRST + group) * SLOTS)[:, None]
    mask = written[None, :] & (group < GROUPS)[:, None]
    tl.store(target_ptr + entry, tl.trans(bits), mask=mask)


@triton.jit
def _store_zeros(pages_ptr, at, slot, zero, written, FIRST: tl.constexpr, GROUPS: tl.constexpr):
    """Store [T, G] into the zero plane, as `_store_scales`."""
    group = tl.arange(0, zero.shape[1])
    entry = (at + zero_place(slot))[None, :] + ((FIRST + group) * SLOTS)[:, None]
    mask = written[None, :] & (group < GROUPS)[:, None]
    tl.store(pages_ptr + entry, tl.trans(zero).to(tl.uint8), mask=mask)
