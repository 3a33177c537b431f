"""Arguments of the attention ops: everything that is wrong with a call, in one error."""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS
from quantmla.kernels.checks import expect, expect_block_table, expect_pages, refuse
from quantmla.kernels.support import attention_layout

OUT_TYPES = (torch.bfloat16, torch.float32)


def check_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    page_tokens: int,
    split_tokens: int,
    out_dtype: torch.dtype,
) -> None:
    """Refuse arguments of `attention.decode` that its kernel would misread; looks at no values.

    Args: those of `attention.decode`.
    Raises: KernelUnavailableError or CacheError, with every problem.
    Source: own.
    """
    wrong: list[str] = []
    if q_latent.dim() != 4 or q_rope.dim() != 4:
        refuse("decode", ["q_latent and q_rope are not [B, S, H, channels]"])
    batch, queries, heads, rank = q_latent.shape
    _check_queries(wrong, q_latent, q_rope, (batch, queries, heads))
    ring_tokens = window_tokens + queries - 1
    _check_cache(
        wrong, q_latent.device, rank, q_rope.shape[-1],
        pages, rows, block_table, seq_lens, row_slots, batch,
        content_bits, rope_bits, sink_tokens, window_tokens, page_tokens, ring_tokens,
    )  # fmt: skip
    if split_tokens < 0 or split_tokens % PAGE_TOKENS:
        wrong.append(f"split_tokens is {split_tokens}, not 0 or a multiple of {PAGE_TOKENS}")
    _check_out(wrong, out_dtype)
    refuse("decode", wrong)


def check_prefill(
    q_latent: Tensor,
    q_rope: Tensor,
    new_rows: Tensor,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    starts: Tensor,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    most_tokens: int,
    page_tokens: int,
    out_dtype: torch.dtype,
) -> None:
    """Refuse arguments of `attention.prefill` that its kernel would misread; looks at no values.

    Args: those of `attention.prefill`.
    Raises: KernelUnavailableError or CacheError, with every problem.
    Source: own.
    """
    wrong: list[str] = []
    if q_latent.dim() != 3 or q_rope.dim() != 3:
        refuse("prefill", ["q_latent and q_rope are not [S, H, channels]"])
    tokens, heads, rank = q_latent.shape
    _check_queries(wrong, q_latent, q_rope, (tokens, heads))
    width = rank + q_rope.shape[-1]
    expect(wrong, "new_rows", new_rows, q_latent.device, (torch.bfloat16,), (tokens, width))
    if not new_rows.is_contiguous():
        wrong.append("new_rows is not contiguous")
    batch = seq_lens.shape[0] if seq_lens.dim() == 1 else None
    _check_cache(
        wrong, q_latent.device, rank, q_rope.shape[-1],
        pages, rows, block_table, seq_lens, row_slots, batch,
        content_bits, rope_bits, sink_tokens, window_tokens, page_tokens, window_tokens - 1,
    )  # fmt: skip
    bounds = None if batch is None else batch + 1
    expect(wrong, "starts", starts, q_latent.device, (torch.int32,), (bounds,))
    if not 0 <= most_tokens <= tokens:
        wrong.append(f"most_tokens is {most_tokens}, there are {tokens} new tokens")
    _check_out(wrong, out_dtype)
    refuse("prefill", wrong)


def _check_queries(wrong: list[str], q_latent: Tensor, q_rope: Tensor, lead: tuple) -> None:
    for name, query in (("q_latent", q_latent), ("q_rope", q_rope)):
        shape = (*lead, query.shape[-1])
        expect(wrong, name, query, q_latent.device, (torch.bfloat16,), shape)
        if not query.is_contiguous():
            wrong.append(f"{name} is not contiguous")


def _check_cache(
    wrong: list[str],
    device: torch.device,
    rank: int,
    rope_dim: int,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    batch: int | None,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    page_tokens: int,
    least_ring_tokens: int,
) -> None:
    layout = attention_layout(rank, rope_dim, content_bits, rope_bits)
    expect_pages(wrong, pages, device, layout.page_bytes)
    expect(wrong, "rows", rows, device, (torch.bfloat16,), (None, None, rank + rope_dim))
    if rows.dim() == 3:
        ring_tokens = rows.shape[1] - sink_tokens
        if sink_tokens < 0 or window_tokens < 0 or ring_tokens < max(least_ring_tokens, 0):
            wrong.append(
                f"rows has {rows.shape[1]} rows a slot, not {sink_tokens} sinks and at least"
                f" {max(least_ring_tokens, 0)} recent ones"
            )
        if rows.shape[0] and rows.stride(1) != rows.shape[2]:
            wrong.append("the rows of a slot have gaps")
    expect_block_table(wrong, block_table, device, page_tokens)
    if block_table.dim() == 2 and batch is not None and block_table.shape[0] != batch:
        wrong.append(f"block_table has {block_table.shape[0]} rows for {batch} sequences")
    for name, tensor in (("seq_lens", seq_lens), ("row_slots", row_slots)):
        expect(wrong, name, tensor, device, (torch.int32,), (batch,))


def _check_out(wrong: list[str], out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_TYPES:
        wrong.append(f"out_dtype is {out_dtype}, not {' or '.join(map(str, OUT_TYPES))}")
