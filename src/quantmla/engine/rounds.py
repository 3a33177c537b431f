"""Index tensors for the kernels: where the tokens of a round go, and what their queries read.

A LatentLayer is a paged pool as it stands: page i of sequence b is blob b * n_pages + i, and its
BF16 rows are slot b. A round is a run of new columns that is written and attended at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS, pages_for_tokens

TABLE_COLUMNS = 16  # of a block table: strides that are no multiple compile kernels anew

_last = threading.local()


@dataclass(frozen=True)
class Round:
    """Where the tokens of one round go, and what their queries read.

    Fields:
        picked: (sequence [S], column [S]) of each token among the new ones; None if the round takes
            the same columns of every sequence.
        slots [S, int64]; positions, sequences, ends [S, int32]: of each token, as `write` wants
            them.
        table [B, pages, int32]; lengths, row_slots [B, int32]; starts [B+1, int32]: of each
            sequence, as `prefill` wants them.
        most: tokens of the sequence that has most.
    """

    picked: tuple[Tensor, Tensor] | None
    slots: Tensor
    positions: Tensor
    sequences: Tensor
    ends: Tensor
    table: Tensor
    lengths: Tensor
    row_slots: Tensor
    starts: Tensor
    most: int


def round_of(
    start: tuple[int, ...],
    count: tuple[int, ...],
    order: Tensor | None,
    columns: slice,
    n_pages: int,
    device: torch.device,
) -> Round:
    """Make a round, or return the last one of this thread: all layers of a model ask for the same.

    Args:
        start, count, order: as `LatentLayer.admit` returns them.
        columns: which of the new tokens of each sequence, padding not counted.
        n_pages: pages of each sequence, all of them included.
        device: of the layer.
    Returns: Round.
    Source: own.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = (start, count, columns.start, columns.stop, n_pages, device, stream)
    if order is None and getattr(_last, "key", None) == key:
        return _last.round
    made = _new_round(start, count, order, columns, n_pages, device)
    if order is None:
        _last.key, _last.round = key, made
    return made


def _new_round(
    start: tuple[int, ...],
    count: tuple[int, ...],
    order: Tensor | None,
    columns: slice,
    n_pages: int,
    device: torch.device,
) -> Round:
    batch, begin, new = len(start), torch.tensor(start), torch.tensor(count)
    known, length = (begin + new.clamp(max=end) for end in (columns.start, columns.stop))
    added = length - known
    bounds = torch.nn.functional.pad(added.cumsum(0), (1, 0))  # [B+1]
    sequence = torch.arange(batch).repeat_interleave(added)
    nth = torch.arange(len(sequence)) - bounds[sequence]
    position = known[sequence] + nth
    slot = sequence * (n_pages * PAGE_TOKENS) + position
    parts = [slot, position, sequence, length[sequence], length, torch.arange(batch), bounds]
    if order is not None:
        parts.append(order[sequence, columns.start + nth])
    wide = _to_device(parts, device)
    narrow = [part.to(torch.int32) for part in wide[1:7]]
    used = pages_for_tokens(int(length.max()))
    table = torch.arange(-(-used // TABLE_COLUMNS) * TABLE_COLUMNS, device=device)
    table = (table + wide[5][:, None] * n_pages).to(torch.int32)[:, :used]
    return Round(
        None if order is None else (wide[2], wide[7]),
        wide[0],
        *narrow[:3],
        table,
        *narrow[3:],
        int(added.max()),
    )


def _to_device(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Send integers to a device in one copy, without waiting for it."""
    together = torch.cat(parts)
    if device.type == "cuda":
        together = together.pin_memory()
    return list(together.to(device, non_blocking=True).split([len(part) for part in parts]))
