"""The tensors of a paged cache: packed pages and BF16 rows of every layer, of fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS, PageLayout
from quantmla.config import LAYOUT_VERSION
from quantmla.errors import CacheError

PAGE_TOKENS_CHOICES = (64, 128, 256)


class LatentPools:
    """Pages [n_blobs, page_bytes, uint8] and rows [n_slots, row_tokens, R+P, bf16] of each layer.

    Position p of a sequence has row p of its slot if p < sink_tokens, else row
    sink_tokens + (p - sink_tokens) % ring_tokens, until a later position takes that row.

    Args:
        layouts: page layout of each cache layer.
        n_pages, n_slots: sizes.
        page_tokens [64, 128 or 256]: a page is 1, 2 or 4 consecutive blobs of 64 tokens.
        slack_tokens: ring rows beyond the window.
        device: of the tensors.
    Raises: CacheError for arguments that cannot be used.
    Source: own.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        *,
        n_pages: int,
        n_slots: int,
        page_tokens: int,
        slack_tokens: int,
        device: torch.device | str,
    ):
        self.layouts, self.device = tuple(layouts), torch.device(device)
        self.n_pages, self.n_slots = n_pages, n_slots
        self.page_tokens, self.slack_tokens = page_tokens, slack_tokens
        self._check_arguments()
        scheme = self.layouts[0].scheme
        self.sink_tokens, self.window_tokens = scheme.sink_tokens, scheme.window_tokens
        self.ring_tokens = scheme.window_tokens + slack_tokens
        self.row_tokens = self.sink_tokens + self.ring_tokens
        self.blobs_per_page = page_tokens // PAGE_TOKENS
        # One allocation: an allocator rounds each of many, by more than a percent of a small cache.
        # Not zeroed: a reader depends on written tokens only. No inference tensors: what
        # inference_mode filled must stay writable outside of it.
        with torch.inference_mode(False):
            self.storage = torch.empty(
                self._pages_bytes() + self._rows_bytes(), dtype=torch.uint8, device=self.device
            )
            self.pages, self.rows = self._carve()

    def _check_arguments(self) -> None:
        protected = {(x.scheme.sink_tokens, x.scheme.window_tokens) for x in self.layouts}
        if len(protected) != 1:
            _refuse(
                "the layers do not have one sink and window",
                "layouts of at least one layer, the same sink and window in all",
                f"{len(self.layouts)} layers, (sink, window) {sorted(protected)}",
            )
        if self.page_tokens not in PAGE_TOKENS_CHOICES:
            choices = ", ".join(map(str, PAGE_TOKENS_CHOICES))
            _refuse("no page of this size", f"page_tokens in {choices}", self.page_tokens)
        sizes = {"n_pages": (1, 2**31), "n_slots": (1, 2**31), "slack_tokens": (0, 2**20)}
        for name, (least, end) in sizes.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value < end:
                _refuse(f"{name} cannot be used", f"{least} <= {name} < {end}", repr(value))

    def _pages_bytes(self) -> int:
        return self.n_pages * self.page_bytes

    def _rows_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    def _carve(self) -> tuple[list[Tensor], list[Tensor]]:
        """Cut the storage into pages of all layers, whose sizes keep them aligned, and rows."""
        blobs = self.n_pages * self.blobs_per_page
        page_sizes = [blobs * layout.page_bytes for layout in self.layouts]
        row_sizes = [self.n_slots * self.row_tokens * _row_bytes(x) for x in self.layouts]
        parts = self.storage.split(page_sizes + row_sizes)
        pages = [part.view(blobs, -1) for part in parts[: len(page_sizes)]]
        shape = (self.n_slots, self.row_tokens, -1)
        rows = [part.view(torch.bfloat16).view(shape) for part in parts[len(page_sizes) :]]
        return pages, rows

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers together."""
        return self.blobs_per_page * sum(layout.page_bytes for layout in self.layouts)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the BF16 rows of one slot in all layers together."""
        return self.row_tokens * sum(_row_bytes(layout) for layout in self.layouts)

    def resident_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.storage.untyped_storage().nbytes()

    def geometry(self) -> dict:
        """What decides the bytes of pages and rows apart from the checkpoint, as plain JSON."""
        return {
            "layout": LAYOUT_VERSION,
            "slack_tokens": self.slack_tokens,
            "layers": [
                {
                    "kv_lora_rank": layout.kv_lora_rank,
                    "qk_rope_head_dim": layout.qk_rope_head_dim,
                    **layout.scheme.model_dump(mode="json"),
                }
                for layout in self.layouts
            ],
        }

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def blobs(self, pages: Sequence[int], tokens: int) -> list[int]:
        """Return the blobs that hold the first `tokens` tokens of a run of pages, in order."""
        per_page = self.blobs_per_page
        found = [page * per_page + i for page in pages for i in range(per_page)]
        return found[: -(-tokens // PAGE_TOKENS)]

    def used_rows(self, tokens: int) -> int:
        """Return how many rows of a slot a sequence of `tokens` tokens has touched."""
        return min(tokens, self.row_tokens)

    def copy_blobs(self, source: list[int], target: list[int]) -> None:
        """Copy blobs inside the pool, in every layer."""
        if source:
            source, target = self.index(source), self.index(target)
            for pages in self.pages:
                pages.index_copy_(0, target, pages.index_select(0, source))

    def copy_rows(self, source_slot: int, target_slot: int, tokens: int) -> None:
        """Copy the rows of a sequence of `tokens` tokens to another slot, in every layer."""
        used = self.used_rows(tokens)
        for rows in self.rows:
            rows[target_slot, :used] = rows[source_slot, :used]

    def index(self, blobs: list[int]) -> Tensor:
        """Return blob numbers as an index tensor [n, int64] on the device of the pool."""
        return torch.tensor(blobs, dtype=torch.int64, device=self.device)

    def host_blobs(self, layer: int, blobs: list[int], used_tokens: list[int]) -> Tensor:
        """Copy blobs of a layer to the host, with zeros where they hold no token.

        What an earlier owner of a page left behind stays here.

        Args:
            layer: cache layer index.
            blobs: rows of the pool.
            used_tokens: tokens in each of them, 1..64.
        Returns: pages [n, page_bytes, uint8], on the CPU.
        """
        layout = self.layouts[layer]
        host = self.pages[layer].index_select(0, self.index(blobs)).cpu()
        host[:, layout.payload_bytes :] = 0
        for page, used in zip(host, used_tokens, strict=True):
            if used < PAGE_TOKENS:
                layout.wipe(page, used)
        return host


def _row_bytes(layout: PageLayout) -> int:
    """Bytes of one BF16 row of a layer."""
    return 2 * (layout.kv_lora_rank + layout.qk_rope_head_dim)


def _refuse(what: str, expected: str, got: object) -> None:
    raise CacheError(what, where="PagedLatentCache", expected=expected, got=got)
