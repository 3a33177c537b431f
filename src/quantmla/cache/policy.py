"""Which form of a key a query reads: first and most recent tokens in BF16, all others packed.

Positions count from the first real token of the sequence, not of the chunk. Strict: the recent
window ends at the query itself, so the answer does not depend on chunking. Fast: the window is
anchored at the start of the query's chunk, and the chunk itself is BF16.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quantmla.errors import CacheError


def representation(
    query_pos: Tensor,
    key_pos: Tensor,
    sink: int,
    window: int,
    chunk_starts: Sequence[int] | None = None,
) -> Tensor:
    """Tell which keys each query reads in BF16; causality is not included.

    Strict (chunk_starts None): key < sink or key > query - window.
    Fast: key < sink or key > chunk_start(query) - max(window, 1), so that the whole chunk
    is BF16; with a window and chunks of one token this is strict mode.

    Args:
        query_pos, key_pos [integer, broadcastable]: positions in the sequence.
        sink [tokens]: first tokens kept in BF16.
        window [tokens]: recent tokens kept in BF16, the query's own included; 0 in strict
            mode packs even that one.
        chunk_starts [positions, ascending from 0]: where prefill chunks begin; selects fast mode.
    Returns: mask [broadcast shape, bool], True for BF16.
    Raises: CacheError for negative sizes or chunk starts that do not ascend from 0.
    Source: sink and window policy of the QuantMLA study; the two modes are own.
    """
    _check(sink, window, chunk_starts)
    if chunk_starts is None:
        return (key_pos < sink) | (key_pos > query_pos - window)
    starts = torch.as_tensor(list(chunk_starts), dtype=query_pos.dtype, device=query_pos.device)
    # padding rows may carry negative positions: they count as part of the first chunk
    chunk = torch.searchsorted(starts, query_pos.contiguous(), right=True).sub(1).clamp(min=0)
    anchor = starts[chunk]
    return (key_pos < sink) | (key_pos > anchor - max(window, 1))


def partition(visible_tokens: int, sink: int, window: int) -> tuple[range, range, range]:
    """Split the keys that a query sees (itself included) into sink, packed and recent positions.

    Args:
        visible_tokens [tokens]: query position + 1.
        sink, window [tokens]: as in representation, strict mode.
    Returns: three adjacent ranges that cover 0..visible_tokens-1 once.
    Raises: CacheError for negative sizes.
    Source: sink and window policy of the QuantMLA study.
    """
    _check(sink, window, None)
    if visible_tokens < 0:
        raise CacheError(
            "negative length", where="partition", expected="visible_tokens >= 0", got=visible_tokens
        )
    sink_end = min(sink, visible_tokens)
    recent_start = max(sink_end, visible_tokens - window)
    return range(sink_end), range(sink_end, recent_start), range(recent_start, visible_tokens)


def packed_pairs(
    first_query_pos: int,
    n_queries: int,
    sink: int,
    window: int,
    chunk_starts: Sequence[int] | None = None,
) -> int:
    """Count the (query, packed key) pairs that causal attention of a run of queries reads.

    Args:
        first_query_pos [position], n_queries [tokens]: the queries.
        sink, window, chunk_starts: as in representation.
    Returns: count of pairs, for one sequence and one layer.
    Raises: CacheError for negative sizes.
    """
    _check(sink, window, chunk_starts)
    if first_query_pos < 0 or n_queries < 0:
        raise CacheError(
            "negative position or count",
            where="packed_pairs",
            expected="first_query_pos >= 0 and n_queries >= 0",
            got=f"{first_query_pos}, {n_queries}",
        )
    end = first_query_pos + n_queries
    if chunk_starts is None:
        # query i has max(0, i - lead) packed keys
        lead = sink + window - 1
        first = max(first_query_pos, lead + 1)
        n = max(0, end - first)
        return n * (first - lead) + n * (n - 1) // 2
    pairs, start = 0, first_query_pos
    while start < end:
        chunk = bisect_right(chunk_starts, start)
        stop = min(end, chunk_starts[chunk]) if chunk < len(chunk_starts) else end
        pairs += (stop - start) * max(0, chunk_starts[chunk - 1] - max(window, 1) + 1 - sink)
        start = stop
    return pairs


def ring_slot(pos: int | Tensor, sink: int, ring_tokens: int) -> int | Tensor:
    """Return the ring row of a token that is not a sink: (pos - sink) mod ring_tokens.

    Args:
        pos [position >= sink, integer or tensor]: token position.
        sink [tokens]: sinks have rows of their own, row = position.
        ring_tokens [tokens]: window plus slack.
    Returns: row, 0..ring_tokens-1, same form as pos.
    Raises: CacheError for an empty ring or an integer position inside the sinks.
    """
    if ring_tokens < 1 or (isinstance(pos, int) and pos < sink):
        raise CacheError(
            "this token has no ring row",
            where="ring_slot",
            expected="ring_tokens >= 1 and pos >= sink",
            got=f"pos {pos}, sink {sink}, ring_tokens {ring_tokens}",
        )
    return (pos - sink) % ring_tokens


def _check(sink: int, window: int, chunk_starts: Sequence[int] | None) -> None:
    if sink < 0 or window < 0:
        raise CacheError(
            "negative protection",
            where="policy",
            expected="sink >= 0 and window >= 0",
            got=f"{sink}, {window}",
        )
    if chunk_starts is not None:
        ascending = all(a < b for a, b in pairwise(chunk_starts))
        if not len(chunk_starts) or chunk_starts[0] != 0 or not ascending:
            raise CacheError(
                "chunk borders are not usable",
                where="policy",
                expected="ascending positions that start with 0",
                got=list(chunk_starts)[:16],
            )
