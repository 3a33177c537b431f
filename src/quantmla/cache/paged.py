"""Paged storage of all cache layers: one block table, shared pages, BF16 rows by request slot.

Positions, pages and slots are the same in every layer, so that one plan serves a whole model step.
The cache books tokens; kernels write and read them (`pool`). Nothing here may be called from two
threads at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantmla.cache.hostcopy import HostCopy, check_copy, copy_to_host, copy_to_pool
from quantmla.cache.layout import PAGE_TOKENS, PageLayout
from quantmla.cache.pages import (
    PageAllocator,
    ReadPlan,
    RequestState,
    WritePlan,
    read_plan,
    write_plan,
)
from quantmla.cache.pools import LatentPools
from quantmla.cache.saved import load_requests, save_requests
from quantmla.errors import CacheError

MAX_TOKENS = 2**31 - 1  # positions are int32


class PagedLatentCache:
    """Packed pages and BF16 rows of many requests, in pools of a fixed size.

    Position p of a request lies in its page p // page_tokens, and while it is among the first or
    the most recent tokens also in a BF16 row of its slot: row p if p < sink_tokens, else row
    sink_tokens + (p - sink_tokens) % ring_tokens, with ring_tokens = window_tokens + slack_tokens.

    Args:
        layouts: page layout of each cache layer; sink and window must be the same in all.
        n_pages: pages of the pool.
        n_slots: requests that can be held at a time.
        page_tokens: 64, 128 or 256; a page is so many tokens, in consecutive blobs of 64.
        slack_tokens: ring rows beyond the window, so that so many tokens can be rolled back.
        device: of pools and plans.
        fingerprint: of the checkpoint; copies and files of another one are refused.
    Raises: CacheError for arguments that cannot be used.
    Source: algorithms.md sections 6.1 and 6.4.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        *,
        n_pages: int,
        n_slots: int,
        page_tokens: int = PAGE_TOKENS,
        slack_tokens: int = 0,
        device: torch.device | str,
        fingerprint: str,
    ):
        if not isinstance(fingerprint, str) or not fingerprint:
            self._refuse("the cache has no fingerprint", "a text", repr(fingerprint))
        self.fingerprint = fingerprint
        self.pools = LatentPools(
            layouts,
            n_pages=n_pages,
            n_slots=n_slots,
            page_tokens=page_tokens,
            slack_tokens=slack_tokens,
            device=device,
        )
        self.allocator = PageAllocator(n_pages)
        self.free_slots = list(range(n_slots - 1, -1, -1))
        self.states: dict[Hashable, RequestState] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers together."""
        return self.pools.page_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the BF16 rows of one slot in all layers together."""
        return self.pools.slot_bytes

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return self.allocator.free

    def resident_bytes(self) -> int:
        """Bytes of all tensors that the cache holds.

        They are n_pages * page_bytes + n_slots * slot_bytes, which `accounting.pool_bytes` counts
        beforehand. Plans are the caller's, and live as long as he keeps them.
        """
        return self.pools.resident_bytes()

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the tensors of a layer that kernels write and read.

        Args: layer: cache layer index.
        Returns: pages [n_blobs, page_bytes, uint8] and rows [n_slots, row_tokens, R+P, bf16].
        """
        return self.pools.pages[layer], self.pools.rows[layer]

    def __contains__(self, request: Hashable) -> bool:
        return request in self.states

    def tokens(self, request: Hashable) -> int:
        """Return the length of a request.

        Raises: CacheError for an unknown request.
        """
        return self.state(request, "tokens").tokens

    def add(self, request: Hashable) -> None:
        """Give a new request a slot; it has no tokens yet.

        Args: request: any hashable id that is not in use.
        Raises: CacheError if the id is in use or no slot is free.
        """
        self.check_new([request], "add")
        self.states[request] = RequestState(self.free_slots.pop(), self.pools.sink_tokens)

    def free(self, request: Hashable) -> None:
        """Give back the slot of a request, and its pages where no fork holds them.

        Raises: CacheError for an unknown request, such as one that was freed before.
        """
        state = self.state(request, "free")
        del self.states[request]
        self.free_slots.append(state.slot)
        self.allocator.release(state.pages)

    def extend(self, counts: Mapping[Hashable, int]) -> WritePlan:
        """Make room for new tokens behind some requests; the caller writes them next.

        A last page that a fork holds as well is copied first, in all layers.

        Args: counts: new tokens by request, in the order of the rows that will be written.
        Returns: WritePlan for the rows of all requests, one request behind the other.
        Raises: CacheError for an unknown request, a count that is no natural number, a sequence
            that gets too long, or too few free pages; nothing is changed then.
        Source: own; vLLM block tables and slot mapping.
        """
        runs = [(self.state(request, "extend"), count) for request, count in counts.items()]
        for request, count in counts.items():
            limit = MAX_TOKENS - self.states[request].tokens
            if type(count) is not int or not 0 <= count <= limit:
                self._refuse(
                    "a request cannot be extended by this",
                    f"0 to {limit} new tokens",
                    repr(count),
                    where=f"PagedLatentCache.extend, request {request!r}",
                )
        shared = self._shared_last_pages(runs)
        pages_for = self.pools.pages_for
        needed = [pages_for(state.tokens + count) - len(state.pages) for state, count in runs]
        n_new = len(shared) + sum(needed)
        new = self.allocator.offer(n_new, "PagedLatentCache.extend")
        self._copy_last_pages(shared, new)
        # nothing can fail from here on
        self.allocator.take(n_new)
        for state, page in zip(shared, new, strict=False):
            self.allocator.release([state.pages[-1]])
            state.pages[-1] = page
        taken = len(shared)
        for (state, count), n_pages in zip(runs, needed, strict=True):
            state.pages.extend(new[taken : taken + n_pages])
            taken += n_pages
            state.tokens += count
            state.intact_from = max(state.intact_from, state.tokens - self.pools.ring_tokens)
        return write_plan(runs, self.pools.page_tokens, self.pools.device)

    def _shared_last_pages(self, runs: list[tuple[RequestState, int]]) -> list[RequestState]:
        """Return the states that would write into a page which others hold."""
        shared, leaving = [], {}
        for state, count in runs:
            if count == 0 or state.tokens % self.pools.page_tokens == 0:
                continue
            page = state.pages[-1]
            # the last of several holders that all leave keeps the page
            if self.allocator.holders[page] - leaving.get(page, 0) > 1:
                leaving[page] = leaving.get(page, 0) + 1
                shared.append(state)
        return shared

    def _copy_last_pages(self, states: list[RequestState], targets: list[int]) -> None:
        """Copy the blobs in use of the last page of each state to another page."""
        source, target = [], []
        for state, page in zip(states, targets, strict=False):
            used_tokens = state.tokens % self.pools.page_tokens
            source += self.pools.blobs(state.pages[-1:], used_tokens)
            target += self.pools.blobs([page], used_tokens)
        self.pools.copy_blobs(source, target)

    def fork(self, request: Hashable, child: Hashable) -> None:
        """Make a new request with the tokens of another one; they share pages until one writes.

        Args:
            request: what is continued.
            child: id of the new request.
        Raises: CacheError for an unknown request, a child id in use, or no free slot.
        """
        state = self.state(request, "fork")
        self.check_new([child], "fork")
        slot = self.free_slots[-1]
        self.pools.copy_rows(state.slot, slot, state.tokens)
        self.free_slots.pop()
        self.allocator.share(state.pages)
        pages = state.pages[:]
        self.states[child] = RequestState(slot, state.intact_from, pages, state.tokens)

    def truncate(self, request: Hashable, tokens: int) -> None:
        """Roll a request back to its first tokens; pages behind them are given back.

        Args:
            request: what is rolled back.
            tokens: length that is kept.
        Raises: CacheError for an unknown request, a length beyond the present one, or if BF16 rows
            that the next query needs were overwritten in the ring; nothing is changed then.
        Source: own; ring rule of algorithms.md section 6.1.
        """
        state = self.state(request, "truncate")
        where = f"PagedLatentCache.truncate, request {request!r}"
        if type(tokens) is not int or not 0 <= tokens <= state.tokens:
            expected = f"0 to {state.tokens} tokens"
            self._refuse("no such length to go back to", expected, repr(tokens), where=where)
        if not self._intact(state, tokens + 1, min(state.intact_from, tokens)):
            self._refuse(
                "BF16 rows that the next token needs were overwritten",
                f"at least {state.intact_from + self.pools.window_tokens - 1} tokens kept"
                f" with slack_tokens={self.pools.slack_tokens},"
                f" or at most {self.pools.sink_tokens}",
                tokens,
                f"compute the request again, or create the cache with more than"
                f" {self.pools.slack_tokens} slack_tokens",
                where=where,
            )
        keep = self.pools.pages_for(tokens)
        self.allocator.release(state.pages[keep:])
        del state.pages[keep:]
        state.tokens = tokens
        state.intact_from = min(state.intact_from, max(tokens, self.pools.sink_tokens))

    def _intact(self, state: RequestState, visible_tokens: int, intact_from: int) -> bool:
        """Tell whether the last of so many tokens finds the BF16 rows that it reads."""
        pools = self.pools
        return max(pools.sink_tokens, visible_tokens - pools.window_tokens) >= intact_from

    def read(self, requests: Sequence[Hashable], query_tokens: int = 1) -> ReadPlan:
        """Return where the tokens of some requests are.

        Args:
            requests: in the order of the rows of the batch.
            query_tokens: how many of the last tokens of each are queries that read BF16 rows; 0 if
                only pages are read.
        Returns: ReadPlan.
        Raises: CacheError for an unknown request, or if BF16 rows which these queries read were
            overwritten. With slack_tokens >= query_tokens - 1 that happens only after truncate,
            until as many tokens as were rolled back were given again.
        """
        states = [self.state(request, "read") for request in requests]
        for request, state in zip(requests, states, strict=True):
            first_query = max(state.tokens - query_tokens + 1, 0)
            if not self._intact(state, first_query, min(state.intact_from, state.tokens)):
                self._refuse(
                    "BF16 rows that these queries read were overwritten",
                    f"the last {self.pools.window_tokens + query_tokens - 1} rows"
                    f" in a ring of {self.pools.ring_tokens}",
                    f"rows from position {state.intact_from} of {state.tokens}",
                    "use fewer queries, or create the cache with more slack_tokens",
                    where=f"PagedLatentCache.read, request {request!r}",
                )
        return read_plan(states, self.pools.page_tokens, self.pools.device)

    def offload(self, request: Hashable) -> HostCopy:
        """Move a request to the memory of the host; its slot and pages are given back.

        Raises: CacheError for an unknown request.
        """
        copy = copy_to_host(self.pools, self.state(request, "offload"), self.fingerprint)
        self.free(request)
        return copy

    def restore(self, request: Hashable, copy: HostCopy) -> None:
        """Bring back what offload returned.

        Args:
            request: id, the same as before or another one.
            copy: unchanged result of offload, of this cache or one with the same fingerprint,
                layouts and slack.
        Raises: CacheError if the copy is of another checkpoint or incomplete, the id is in use, or
            slots or pages are used up; nothing is changed then.
        """
        check_copy(self.pools, copy, self.fingerprint)
        self.check_new([request], "restore")
        pages = self.allocator.offer(self.pools.pages_for(copy.tokens), "PagedLatentCache.restore")
        state = RequestState(self.free_slots[-1], copy.intact_from, tokens=copy.tokens)
        state.pages.extend(pages)
        copy_to_pool(self.pools, state, copy)
        self.allocator.take(len(pages))
        self.free_slots.pop()
        self.states[request] = state

    def save(self, path: str | Path) -> None:
        """Write all requests to one safetensors file, whole or not at all; forks stay shared.

        Args: path: target; its folder must exist.
        Raises: CacheError if the file cannot be written, or an id is neither text nor int.
        Source: own; docs/layout.md section 6.
        """
        save_requests(self, path)

    def load(self, path: str | Path) -> dict[Hashable, int]:
        """Add the requests of a file to those that are here.

        Args: path: file of save, by a cache with the same fingerprint, layouts, slack and page
            size.
        Returns: tokens by request.
        Raises: CacheError if the file is damaged or of another checkpoint, an id is in use, or
            slots or pages do not suffice; requests that are here are left alone then.
        Source: own; docs/layout.md section 6.
        """
        return load_requests(self, path)

    def state(self, request: Hashable, method: str) -> RequestState:
        """Return the record of a request; `method` is named in the CacheError for unknown ones."""
        if request not in self.states:
            self._refuse(
                "this request is not in the cache",
                "a request that was added and not freed or offloaded",
                repr(request),
                where=f"PagedLatentCache.{method}",
            )
        return self.states[request]

    def check_new(self, requests: Sequence[Hashable], method: str) -> None:
        """Refuse ids in use, and more requests than there are free slots."""
        where = f"PagedLatentCache.{method}"
        for request in requests:
            if request in self.states:
                self._refuse(
                    "this request is already in the cache",
                    "a new id",
                    repr(request),
                    "free it first, or choose another id",
                    where=where,
                )
        if len(requests) > len(self.free_slots):
            self._refuse(
                "the request slots of the cache are used up",
                f"at most {len(self.free_slots)} more requests",
                f"{len(requests)} of {self.pools.n_slots} slots needed",
                "free or offload a request, or create the cache with more slots",
                where=where,
            )

    def _refuse(self, what, expected, got, next_step=None, where="PagedLatentCache") -> None:
        raise CacheError(what, where=where, expected=expected, got=got, next_step=next_step)
