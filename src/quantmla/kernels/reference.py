"""Reference attention over packed and BF16 keys in plain torch: one softmax, fp32 accumulation.

Works in the latent: queries are absorbed through kv_b_proj, and all heads share one key of R+P
channels and one value of R channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.cache.latent import VisibleRows
from quantmla.cache.policy import packed_pairs

TILE_SCORES = 1 << 20  # scores held at once, 4 MiB in fp32: fits a core's share of the cache
GPU_TILE_SCORES = 1 << 25  # there, few large operations cost less than many small ones
MIN_TILE_TOKENS, MAX_TILE_TOKENS = 16, 256


def attend(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: VisibleRows,
    *,
    scale: float,
    need_lse: bool = True,
    tile_scores: int | None = None,
) -> tuple[Tensor, Tensor | None, int]:
    """Attend from the new tokens of one call to everything that they may read.

    Args:
        q_latent [B, H, S, R]: queries absorbed through kv_b_proj, in the order of the call.
        q_rope [B, H, S, P]: rotated queries.
        rows: VisibleRows of the same call.
        scale: softmax scale.
        need_lse: False saves the time of the log-sum-exp.
        tile_scores: about how many scores are held at once; no effect beyond rounding. None for
            what suits the device.
    Returns:
        out_latent [B, H, S, R, fp32] (fp64 if the queries are), lse [B, H, S] in base e or None,
        and the number of (query, packed key) pairs over all sequences. Padding gives 0 and -inf.
    Source: algorithms.md sections 6.2 and 6.3.
    """
    compute = torch.promote_types(q_latent.dtype, torch.float32)
    if tile_scores is None:
        tile_scores = TILE_SCORES if q_latent.device.type == "cpu" else GPU_TILE_SCORES
    queries = [part.to(compute) for part in (q_latent, q_rope)]
    if rows.order is not None:
        queries = [_gather(part, rows.order) for part in queries]
    batch, heads, tokens, rank = q_latent.shape
    out = queries[0].new_empty(batch, heads, tokens, rank)
    lse = queries[0].new_empty(batch, heads, tokens) if need_lse else None
    sinks, packed_tokens, width = rows.sink.shape[1], rows.packed.shape[1], rows.band.shape[1]
    fixed = sinks + packed_tokens
    keys = queries[0].new_empty(batch, fixed + width, rank + q_rope.shape[-1])
    keys[:, :sinks], keys[:, sinks:fixed] = rows.sink, rows.packed
    columns = fixed + min(rows.window_tokens + MIN_TILE_TOKENS, width)
    tile = tile_scores // (batch * heads * max(columns, 1))
    tile = min(max(tile, MIN_TILE_TOKENS), MAX_TILE_TOKENS)
    # From the last tile to the first: a tile needs fewer packed keys than the one after it, so its
    # band may overwrite the rest.
    for first in reversed(range(0, tokens, tile)):
        last = min(first + tile, tokens)
        end, hidden = _place_band(rows, keys, first, last)
        query = torch.cat([part[:, :, first:last] for part in queries], -1).mul_(scale)
        score = torch.bmm(query.flatten(1, 2), keys[:, :end].mT)
        score = score.view(batch, heads, last - first, end)
        for column, mask in hidden:
            part = score[..., column : column + mask.shape[-1]]
            part.masked_fill_(mask.unsqueeze(1), -torch.inf)
        weight = score.softmax(-1)
        if need_lse:
            lse[:, :, first:last] = score.logsumexp(-1)
        empty = _empty_queries(hidden, end)
        if empty is not None:
            weight.masked_fill_(empty.unsqueeze(1), 0)
        value = torch.bmm(weight.flatten(1, 2), keys[:, :end, :rank])
        out[:, :, first:last] = value.view(batch, heads, last - first, rank)
    _clear_padding(rows, out, lse)
    if rows.order is not None:
        out = _scatter(out, rows.order)
        lse = None if lse is None else _scatter(lse.unsqueeze(-1), rows.order).squeeze(-1)
    return out, lse, _count_packed_pairs(rows)


def _place_band(
    rows: VisibleRows, keys: Tensor, first: int, last: int
) -> tuple[int, list[tuple[int, Tensor]]]:
    """Put the band of queries first..last-1 behind the packed keys that they may see.

    Returns the number of keys, and (column, mask) of those that some query must not see.
    """
    chunk, window, sinks = rows.chunk_tokens, rows.window_tokens, rows.sink.shape[1]
    low, high = min(rows.start), max(rows.start)
    anchor = first - first % chunk
    last_anchor = (last - 1) - (last - 1) % chunk
    packed_tokens = min(max(high + last_anchor - window + 1 - sinks, 0), rows.packed.shape[1])
    # the first of them are seen by every query of the tile and need no mask
    shared_tokens = min(max(low + anchor - window + 1 - sinks, 0), packed_tokens)
    starts = list(zip(rows.start, rows.band_start, strict=True))
    band_last = min(max(s + last - b for s, b in starts), rows.band.shape[1])
    band_first = min(max(sinks, s + anchor - window + 1) - b for s, b in starts)
    band_first = min(max(band_first, 0), band_last)
    begin = sinks + packed_tokens
    end = begin + band_last - band_first
    keys[:, begin:end] = rows.band[:, band_first:band_last]

    device = keys.device
    distinct = starts if low != high else starts[:1]
    start, band_start = torch.tensor(distinct, device=device).T[..., None, None]  # [B or 1, 1, 1]
    step = torch.arange(first, last, device=device)[:, None]
    position = start + step  # newest visible key of each query
    seen = position - step % chunk - window  # newest packed key of each query
    hidden = []
    if low + first < sinks - 1:
        hidden.append((0, torch.arange(sinks, device=device) > position))
    if shared_tokens < packed_tokens:
        key = torch.arange(sinks + shared_tokens, begin, device=device)
        hidden.append((sinks + shared_tokens, key > seen))
    key = band_start + torch.arange(band_first, band_last, device=device)
    hidden.append((begin, (key > position) | (key <= seen) | (key < sinks)))
    return end, hidden


def _empty_queries(hidden: list[tuple[int, Tensor]], columns: int) -> Tensor | None:
    """Mask [B or 1, s, 1] of queries that see no key at all, or None if there are none."""
    if sum(mask.shape[-1] for _, mask in hidden) < columns:
        return None
    empty = torch.cat([mask for _, mask in hidden], -1).all(-1, keepdim=True)
    return empty if bool(empty.any()) else None


def _clear_padding(rows: VisibleRows, out: Tensor, lse: Tensor | None) -> None:
    tokens = out.shape[2]
    if min(rows.count) == tokens:
        return
    count = torch.tensor(rows.count, device=out.device)[:, None]
    padding = (torch.arange(tokens, device=out.device) >= count)[:, None]  # [B, 1, S]
    out.masked_fill_(padding.unsqueeze(-1), 0)
    if lse is not None:
        lse.masked_fill_(padding, -torch.inf)


def _gather(values: Tensor, order: Tensor) -> Tensor:
    """Move tokens to the front: values [B, H, S, C] by order [B, S]."""
    return values.gather(2, order[:, None, :, None].expand_as(values))


def _scatter(values: Tensor, order: Tensor) -> Tensor:
    """Undo `_gather`."""
    index = order[:, None, :, None].expand_as(values)
    return torch.empty_like(values).scatter_(2, index, values)


def _count_packed_pairs(rows: VisibleRows) -> int:
    sinks, window, chunk = rows.sink.shape[1], rows.window_tokens, rows.chunk_tokens
    total = 0
    for start, count in zip(rows.start, rows.count, strict=True):
        borders = None if chunk == 1 else sorted({0, *range(start, start + count, chunk)})
        total += packed_pairs(start, count, sinks, window, borders)
    return total
