"""The attention ops in plain torch: same signatures, same rows, arithmetic in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.cache.policy import representation, ring_slot
from quantmla.kernels import paged_reference


def decode(
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
    """Attend from the newest tokens of each sequence.

    Args: those of `attention.decode`; split_tokens has no effect.
    Returns: out [B, S, H, R, out_dtype], lse [B, S, H, fp32, base e].
    Source: algorithms.md section 6.
    """
    queries, rank = q_latent.shape[1], q_latent.shape[-1]
    query = torch.cat([q_latent, q_rope], -1)
    out = torch.zeros_like(q_latent, dtype=torch.float64)
    lse = torch.full(q_latent.shape[:3], -torch.inf, dtype=torch.float64, device=out.device)
    for b, length in enumerate(seq_lens.tolist()):
        if length <= 0 or queries == 0:
            continue
        packed = _packed(
            pages, block_table[b : b + 1], length, rank, q_rope.shape[-1],
            content_bits, rope_bits, page_tokens,
        )  # fmt: skip
        exact = _kept(rows[row_slots[b]], length, sink_tokens)
        first = length - queries
        known = range(max(first, 0), length)
        picked = slice(known.start - first, queries)
        out[b, picked], lse[b, picked] = _attend(
            query[b, picked], packed, exact, known, scale, rank, sink_tokens, window_tokens
        )
    return out.to(out_dtype), lse.float()


def prefill(
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
    """Attend causally from the new tokens of each sequence.

    Args: those of `attention.prefill`; most_tokens has no effect.
    Returns: out [S, H, R, out_dtype], lse [S, H, fp32, base e].
    Source: algorithms.md section 6.3.
    """
    rank = q_latent.shape[-1]
    query = torch.cat([q_latent, q_rope], -1)
    out = torch.zeros_like(q_latent, dtype=torch.float64)
    lse = torch.full(q_latent.shape[:2], -torch.inf, dtype=torch.float64, device=out.device)
    bounds = starts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[b], bounds[b + 1]
        if begin == end:
            continue
        start = length - (end - begin)
        packed = _packed(
            pages, block_table[b : b + 1], length, rank, q_rope.shape[-1],
            content_bits, rope_bits, page_tokens,
        )  # fmt: skip
        exact = _kept(rows[row_slots[b]], start, sink_tokens)
        exact = torch.cat([exact, new_rows[begin:end].double()])
        out[begin:end], lse[begin:end] = _attend(
            query[begin:end], packed, exact, range(start, length), scale, rank,
            sink_tokens, window_tokens,
        )  # fmt: skip
    return out.to(out_dtype), lse.float()


def _packed(
    pages: Tensor,
    block_table: Tensor,
    length: int,
    rank: int,
    rope_dim: int,
    content_bits: int,
    rope_bits: int,
    page_tokens: int,
) -> Tensor:
    """Dequantised rows [length, R+P, fp64] of one sequence."""
    start = block_table.new_zeros(1)
    rows = paged_reference.gather(
        pages, block_table, start, start + length, length, page_tokens,
        rank, rope_dim, content_bits, rope_bits,
    )  # fmt: skip
    return rows[0].double()


def _kept(rows: Tensor, length: int, sink_tokens: int) -> Tensor:
    """BF16 rows [length, R+P, fp64] of one sequence; NaN where its slot holds none any more."""
    ring_tokens = rows.shape[0] - sink_tokens
    exact = rows.new_full((length, rows.shape[1]), torch.nan, dtype=torch.float64)
    sinks = min(sink_tokens, length)
    exact[:sinks] = rows[:sinks].double()
    first = max(sinks, length - ring_tokens)
    if first < length:
        position = torch.arange(first, length, device=rows.device)
        at = sink_tokens + ring_slot(position, sink_tokens, ring_tokens)
        exact[first:] = rows[at].double()
    return exact


def _attend(
    query: Tensor,
    packed: Tensor,
    exact: Tensor,
    positions: range,
    scale: float,
    rank: int,
    sink_tokens: int,
    window_tokens: int,
) -> tuple[Tensor, Tensor]:
    """One softmax over the rows that each query [s, H, R+P] may read; fp64."""
    key = torch.arange(packed.shape[0], device=packed.device)
    outs, sums = [], []
    for one, position in zip(query.double(), positions, strict=True):
        near = representation(key.new_tensor(position), key, sink_tokens, window_tokens)
        seen = torch.where(near[:, None], exact, packed)[: position + 1]
        score = one @ seen.T * scale  # [H, keys]
        outs.append(score.softmax(-1) @ seen[:, :rank])
        sums.append(score.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)
