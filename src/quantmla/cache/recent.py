"""BF16 rows of one cache layer: the first tokens of each sequence and a ring of its recent ones."""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.cache.policy import ring_slot

GROWTH = 1.25  # spare capacity bought at each growth, of rows here and of pages in latent.py


class RecentRows:
    """Sink rows and ring rows of a rectangular batch.

    Row p of a sequence lies in `sink` at p if p < sink_tokens, else in `ring` at its ring slot,
    until a later row takes the slot. Without a window the ring grows and keeps every row. Both are
    views of `rows` [B, sink_tokens + ring_tokens, R+P], the form that kernels take.

    Args:
        batch: sequences.
        channels: R + P.
        sink_tokens, window_tokens [tokens]: policy; a window of None keeps every row.
        slack_tokens [tokens]: ring rows beyond the window, so that so many can be cropped.
        dtype, device: of the rows.
    Source: algorithms.md section 6.1.
    """

    def __init__(
        self,
        batch: int,
        channels: int,
        *,
        sink_tokens: int,
        window_tokens: int | None,
        slack_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.sink_tokens, self.window_tokens = sink_tokens, window_tokens
        ring_tokens = 0 if window_tokens is None else window_tokens + slack_tokens
        # no inference tensors: what inference_mode filled must stay writable outside of it
        with torch.inference_mode(False):
            shape = (batch, sink_tokens + ring_tokens, channels)
            self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.first = [sink_tokens] * batch  # oldest position whose ring row is intact

    @property
    def sink(self) -> Tensor:
        """Rows [B, sink_tokens, R+P] of the first tokens."""
        return self.rows[:, : self.sink_tokens]

    @property
    def ring(self) -> Tensor:
        """Rows [B, ring_tokens, R+P] of recent tokens."""
        return self.rows[:, self.sink_tokens :]

    def past(self, lengths: list[int]) -> Tensor:
        """Return the rows [B, window-1, R+P] before the next token; zero where there is none.

        Args: lengths [B]: tokens of each sequence.
        """
        past = max(self.window_tokens - 1, 0)
        if past == 0:
            return self.ring[:, :0]
        device = self.ring.device
        position = torch.tensor(lengths, device=device)[:, None] - past
        position = position + torch.arange(past, device=device)  # [B, window-1]
        slot = ring_slot(position, self.sink_tokens, self.ring.shape[1])
        rows = self.ring.gather(1, slot.unsqueeze(-1).expand(-1, -1, self.ring.shape[2]))
        missing = position < torch.tensor(self.first, device=device)[:, None]
        return rows.masked_fill_(missing.unsqueeze(-1), 0)

    def reserve(self, tokens: int) -> None:
        """Grow a ring that keeps every row to at least `tokens` rows."""
        if self.window_tokens is None:
            self.rows = grown(self.rows, self.sink_tokens + tokens)

    def write(self, batch: slice, start: int, rows: Tensor) -> None:
        """Write the rows of some sequences.

        Args:
            batch: the sequences.
            start: position of the first row, the same in all of them.
            rows [b, S, R+P].
        """
        end, ring = start + rows.shape[1], self.ring
        if start < self.sink_tokens:
            self.sink[batch, start:end] = rows[:, : self.sink_tokens - start]
        kept = max(start, self.sink_tokens, end - ring.shape[1])
        if kept < end:
            position = torch.arange(kept, end, device=rows.device)
            slot = ring_slot(position, self.sink_tokens, ring.shape[1])
            ring[batch, slot] = rows[:, kept - start :]

    def book(self, lengths: list[int]) -> None:
        """Note that rows up to these lengths [B] are written, here or by a kernel."""
        size = self.rows.shape[1] - self.sink_tokens
        rows = zip(self.first, lengths, strict=True)
        self.first = [max(first, length - size) for first, length in rows]

    def can_crop(self, lengths: list[int]) -> bool:
        """Tell whether every BF16 row that a query behind these lengths reads is still there."""
        if self.window_tokens is None:
            return True
        needed = [max(self.sink_tokens, n - self.window_tokens + 1) for n in lengths]
        rows = zip(needed, self.first, lengths, strict=True)
        return all(need >= min(first, length) for need, first, length in rows)

    def crop(self, lengths: list[int]) -> None:
        """Forget what lies behind these lengths [B]."""
        rows = zip(self.first, lengths, strict=True)
        self.first = [min(first, max(length, self.sink_tokens)) for first, length in rows]

    def select(self, index: Tensor) -> None:
        """Let sequence b be what sequence index[b] was."""
        self.rows = self.rows.index_select(0, index)
        self.first = [self.first[b] for b in index.tolist()]

    def to(self, device: torch.device | str) -> None:
        """Move the rows to a device."""
        self.rows = self.rows.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes


def grown(store: Tensor, size: int) -> Tensor:
    """Return a store [B, n, ..] with at least `size` entries: itself, or a larger zero-filled copy.

    Args:
        store: tensor [B, n, ..].
        size: entries needed.
    Source: own.
    """
    if size <= store.shape[1]:
        return store
    size = max(size, int(store.shape[1] * GROWTH))
    with torch.inference_mode(False):
        larger = store.new_zeros(store.shape[0], size, *store.shape[2:])
        larger[:, : store.shape[1]] = store
    return larger


def finite_rows(rows: Tensor) -> Tensor:
    """Return rows without NaN and Inf: NaN to 0, Inf to the largest finite magnitude of its row.

    Args: rows [.., R+P].
    Source: docs/layout.md.
    """
    bound = torch.where(rows.isfinite(), rows.abs(), 0).amax(-1, keepdim=True)
    return torch.where(rows.isnan(), 0, rows).clamp(-bound, bound)
