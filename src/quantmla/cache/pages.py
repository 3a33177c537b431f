"""Which pages of a pool are free, who holds the others, and the index tensors that kernels take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from quantmla.errors import CacheError


@dataclass
class RequestState:
    """Where one request lies.

    Fields:
        slot: row of the BF16 tensors.
        pages: pages in the order of the sequence; just as many as hold its tokens.
        tokens: length.
        intact_from: oldest position behind the sinks whose ring row was not overwritten.
    """

    slot: int
    intact_from: int
    pages: array = field(default_factory=lambda: array("i"))
    tokens: int = 0


@dataclass(frozen=True)
class WritePlan:
    """Where the new tokens of one call go; token s is row s of what `write` is given.

    Fields:
        slot_mapping [S, int64]: page * page_tokens + offset in the page.
        positions [S, int32]: position in the sequence.
        row_slots [S, int32]: slot of the request.
        seq_ends [S, int32]: length of the sequence after the call.
    """

    slot_mapping: Tensor
    positions: Tensor
    row_slots: Tensor
    seq_ends: Tensor


@dataclass(frozen=True)
class ReadPlan:
    """Where the tokens of some requests are.

    Fields:
        block_table [B, max_pages, int32]: pages; entries past a sequence are 0.
        seq_lens [B, int32]: tokens of each sequence.
        row_slots [B, int32]: slot of each request.
        page_tokens: tokens of a page.
    """

    block_table: Tensor
    seq_lens: Tensor
    row_slots: Tensor
    page_tokens: int


class PageAllocator:
    """Reference counts of the pages of a pool, and the free ones.

    Args: n_pages: pages of the pool, ids 0..n_pages-1.
    Source: own.
    """

    def __init__(self, n_pages: int):
        self.holders = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    def offer(self, count: int, where: str) -> list[int]:
        """Return the pages that the next take of as many gets; their bytes may be written already.

        Args:
            count: pages needed.
            where: named in the error.
        Raises: CacheError if fewer pages are free.
        """
        if count > len(self._free):
            raise CacheError(
                "the pages of the cache are used up",
                where=where,
                expected=f"at most {len(self._free)} more pages",
                got=f"{count} pages needed, {len(self.holders)} in the pool",
                next_step="free or offload a request, or create the cache with more pages",
            )
        return self._free[len(self._free) - count :][::-1]

    def take(self, count: int) -> None:
        """Let the pages of offer have one holder each."""
        for _ in range(count):
            self.holders[self._free.pop()] = 1

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that have one."""
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from pages; those without one become free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free.append(page)


def write_plan(
    runs: list[tuple[RequestState, int]], page_tokens: int, device: torch.device
) -> WritePlan:
    """Return where the last tokens of some requests go.

    Args:
        runs: states and how many of their last tokens are meant, in the order of the rows.
        page_tokens: tokens of a page.
        device: of the result.
    Returns: WritePlan.
    Source: own.
    """
    counts = torch.tensor([count for _, count in runs], dtype=torch.int64)
    ends = torch.tensor([state.tokens for state, _ in runs], dtype=torch.int64)
    starts, stops = ends - counts, counts.cumsum(0)
    total = int(stops[-1]) if runs else 0
    row = torch.arange(total)
    positions = row + (starts - (stops - counts)).repeat_interleave(counts)
    # pages that are written, run behind run; entry position // page_tokens + shift is the page
    first_pages = [(state.tokens - count) // page_tokens for state, count in runs]
    written = [state.pages[first:] for (state, _), first in zip(runs, first_pages, strict=True)]
    sizes = torch.tensor([len(pages) for pages in written], dtype=torch.int64)
    shift = sizes.cumsum(0) - sizes - torch.tensor(first_pages, dtype=torch.int64)
    pages = torch.tensor(array("q", chain.from_iterable(written)), dtype=torch.int64)
    page = pages[positions // page_tokens + shift.repeat_interleave(counts)]
    slots = torch.tensor([state.slot for state, _ in runs], dtype=torch.int64)
    narrow = torch.stack(
        [positions, slots.repeat_interleave(counts), ends.repeat_interleave(counts)]
    )
    mapping = page * page_tokens + positions % page_tokens
    return WritePlan(mapping.to(device), *narrow.to(torch.int32).to(device).unbind())


def read_plan(states: list[RequestState], page_tokens: int, device: torch.device) -> ReadPlan:
    """Return where the tokens of some requests are.

    Args:
        states: the requests, in the order of the rows.
        page_tokens: tokens of a page.
        device: of the result.
    Returns: ReadPlan; the table has as many columns as the longest request has pages, at least 1.
    Source: own.
    """
    width = max((len(state.pages) for state in states), default=0) or 1
    rows = [state.pages.tobytes().ljust(4 * width, b"\0") for state in states]
    table = torch.zeros(0, width, dtype=torch.int32)
    if rows:
        table = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32).view(-1, width)
    pairs = torch.tensor([[s.tokens for s in states], [s.slot for s in states]], dtype=torch.int32)
    return ReadPlan(table.to(device), *pairs.to(device).unbind(), page_tokens)
