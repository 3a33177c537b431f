"""Where every byte of a page is: planes of 64 tokens in one padded blob (docs/layout.md).

A page holds up to four planes: `content` (packed latent codes, or BF16 rows) and `rope` (the same
of the rotated key) with one row a token, `scale` (bf16) and `zero` (uint8 or bf16) with one run of
64 tokens a group, content groups then rope groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantmla.config import LAYOUT_VERSION, KVScheme
from quantmla.errors import CacheError, SchemeError
from quantmla.quant import Quantized, dequantize, group_count, pack, packed_bytes, unpack

PAGE_TOKENS = 64
PAGE_ALIGN_BYTES = 128

__all__ = [
    "LAYOUT_VERSION",
    "PAGE_ALIGN_BYTES",
    "PAGE_TOKENS",
    "PageLayout",
    "Plane",
    "pages_for_tokens",
]


@dataclass(frozen=True)
class Plane:
    """One array [entries, 64 tokens] of a page.

    Entry e of token slot t starts at byte offset_bytes + (e * 64 + place(t)) * entry_bytes of the
    page. A plane of codes or BF16 rows has one entry, the row; `scale` and `zero` have one a group.
    Places are slots, but in a plane of single bytes slots t and t + 32 are neighbours (`ways` 2):
    a kernel reads 16-bit words, and so finds the zero points of 32 slots in the same half of each.
    """

    name: str
    offset_bytes: int
    entry_bytes: int
    entries: int = 1
    ways: int = 1

    def place(self, slot: int | Tensor) -> int | Tensor:
        """Return where a token slot stands in its run of 64 places."""
        stride = PAGE_TOKENS // self.ways
        return slot % stride * self.ways + slot // stride

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in this plane, all entries together."""
        return self.entries * self.entry_bytes

    @property
    def end_bytes(self) -> int:
        """First byte after the plane."""
        return self.offset_bytes + PAGE_TOKENS * self.row_bytes


@dataclass(frozen=True)
class PageLayout:
    """The byte layout of a page for one pair of path sizes and one scheme.

    Args:
        kv_lora_rank [channels]: latent size R.
        qk_rope_head_dim [channels]: rotated key size P.
        scheme: bits, group and zero mode.
    Raises: SchemeError if a path does not fill whole bytes or a size is not positive.
    Source: own.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    scheme: KVScheme

    def __post_init__(self) -> None:
        if self.kv_lora_rank < 1 or self.qk_rope_head_dim < 1:
            raise SchemeError(
                "a path needs at least one channel",
                where="PageLayout",
                expected="kv_lora_rank >= 1 and qk_rope_head_dim >= 1",
                got=f"{self.kv_lora_rank} and {self.qk_rope_head_dim}",
            )
        _ = self.planes  # refuse sizes that do not pack now, not at the first write

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Planes in byte order; a BF16 path has no groups: C16R16 has no scale and zero planes."""
        zero_bytes = 1 if self.scheme.zero == "zp8" else 2
        parts = {
            "content": (_row_bytes(self.kv_lora_rank, self.scheme.content_bits), 1),
            "rope": (_row_bytes(self.qk_rope_head_dim, self.scheme.rope_bits), 1),
            "scale": (2, self.groups),
            "zero": (zero_bytes, self.groups),
        }
        planes, offset_bytes = [], 0
        for name, (entry_bytes, entries) in parts.items():
            if entries:
                ways = 2 if name == "zero" and entry_bytes == 1 else 1
                planes.append(Plane(name, offset_bytes, entry_bytes, entries, ways))
                offset_bytes = planes[-1].end_bytes
        return tuple(planes)

    @property
    def content_groups(self) -> int:
        """Groups of the latent that have a scale; 0 at 16 bits."""
        coded = self.scheme.content_bits != 16
        return group_count(self.kv_lora_rank, self.scheme.group) if coded else 0

    @property
    def rope_groups(self) -> int:
        """Groups of the rotated key that have a scale; 0 at 16 bits."""
        coded = self.scheme.rope_bits != 16
        return group_count(self.qk_rope_head_dim, self.scheme.group) if coded else 0

    @property
    def groups(self) -> int:
        """Entries of a token in the scale plane and in the zero plane."""
        return self.content_groups + self.rope_groups

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page before padding."""
        return self.planes[-1].end_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, padded to a multiple of 128; also the stride between dense pages."""
        return -(-self.payload_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    @property
    def token_bytes(self) -> int:
        """Stored bytes of one token with its share of the padding; whole, as 64 divides 128."""
        return self.page_bytes // PAGE_TOKENS

    def plane(self, name: str) -> Plane:
        """Return the plane called `name`.

        Raises: CacheError if this scheme has no such plane.
        """
        for plane in self.planes:
            if plane.name == name:
                return plane
        raise CacheError(
            f"this page has no {name} plane",
            where=f"PageLayout {self.scheme.name}",
            expected=f"one of {', '.join(p.name for p in self.planes)}",
            got=name,
        )

    def allocate(
        self, *batch: int, n_pages: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Return zeroed pages [*batch, n_pages, page_bytes, uint8]."""
        return torch.zeros(*batch, n_pages, self.page_bytes, dtype=torch.uint8, device=device)

    def store(
        self, pages: Tensor, first_token: int, content: Quantized | Tensor, rope: Quantized | Tensor
    ) -> None:
        """Write the rows of a run of tokens; no other byte of the pages is touched.

        Args:
            pages [..., n_pages, page_bytes, uint8]: written in place; pages may be strided.
            first_token: position of the first row, counted from the first page.
            content [..., S, R]: Quantized, or a floating tensor (cast to bf16) at 16 bits.
            rope [..., S, P]: Quantized, or a floating tensor at 16 bits.
        Raises: CacheError if shapes, dtypes or the capacity of the pages do not fit.
        """
        self._check_pages(pages)
        n_tokens = (content.codes if isinstance(content, Quantized) else content).shape[-2]
        self._check_range(pages, first_token, first_token + n_tokens)
        entries = self._entries((*pages.shape[:-2], n_tokens), content, rope)
        for plane in self.planes:
            target, source = _plane_entries(pages, plane), entries[plane.name]
            for page, slot, run in _runs(first_token, first_token + n_tokens):
                target[..., page, :, _places(plane, slot, pages), :] = _by_page(source, page, run)

    def load(self, pages: Tensor, start_token: int, end_token: int) -> tuple[Tensor, Tensor]:
        """Read the tokens start_token..end_token-1 back as numbers.

        Args:
            pages [..., n_pages, page_bytes, uint8]: pages of store.
            start_token, end_token: positions, counted from the first page.
        Returns: latent [..., S, R, bf16] and k_rope [..., S, P, bf16].
        Raises: CacheError if the range is not inside the pages.
        """
        self._check_pages(pages)
        self._check_range(pages, start_token, end_token)
        entries = {p.name: _read_entries(pages, p, start_token, end_token) for p in self.planes}
        return self._numbers(entries, "content"), self._numbers(entries, "rope")

    def wipe(self, page: Tensor, used_tokens: int) -> None:
        """Zero what holds no token of a page, so that nothing of an earlier owner leaves with it.

        Args:
            page [page_bytes, uint8]: written in place.
            used_tokens: slots that are kept, 0..64.
        """
        page[self.payload_bytes :] = 0
        for plane in self.planes:
            unused = _places(plane, slice(used_tokens, PAGE_TOKENS), page)
            _plane_entries(page, plane)[:, unused] = 0

    def _path(self, name: str) -> tuple[int, int, slice]:
        """Return channels, bits and the groups of a path."""
        if name == "content":
            groups = slice(0, self.content_groups)
            return self.kv_lora_rank, self.scheme.content_bits, groups
        groups = slice(self.content_groups, self.groups)
        return self.qk_rope_head_dim, self.scheme.rope_bits, groups

    @property
    def _zero_dtype(self) -> torch.dtype:
        return torch.uint8 if self.scheme.zero == "zp8" else torch.bfloat16

    def _entries(
        self, lead: tuple[int, ...], content: Quantized | Tensor, rope: Quantized | Tensor
    ) -> dict[str, Tensor]:
        """Return the bytes of every plane, [..., entries, S, entry_bytes]; lead is (..., S)."""
        entries, scales, zeros = {}, [], []
        for name, value in (("content", content), ("rope", rope)):
            self._check_path(lead, name, value)
            if isinstance(value, Quantized):
                row = pack(value.codes, self._path(name)[1])
                scales.append(value.scale)
                zeros.append(value.zero)
            else:
                row = _as_bytes(value.to(torch.bfloat16))
            entries[name] = row.unsqueeze(-3)
        if scales:
            entries["scale"] = _group_major(torch.cat(scales, -1))
            entries["zero"] = _group_major(torch.cat(zeros, -1))
        return entries

    def _numbers(self, entries: dict[str, Tensor], name: str) -> Tensor:
        """Turn the bytes of one path back into numbers [..., S, channels, bf16]."""
        channels, bits, groups = self._path(name)
        row = entries[name].squeeze(-3)
        if bits == 16:
            return row.view(torch.bfloat16)
        q = Quantized(
            unpack(row, bits, channels),
            _token_major(entries["scale"][..., groups, :, :], torch.bfloat16),
            _token_major(entries["zero"][..., groups, :, :], self._zero_dtype),
        )
        return dequantize(q, group=self.scheme.group, zero=self.scheme.zero)

    def _check_path(self, lead: tuple[int, ...], name: str, value: Quantized | Tensor) -> None:
        """Refuse what does not fit before the first byte changes."""
        channels, bits, groups = self._path(name)
        n_groups = groups.stop - groups.start
        if bits == 16:
            expected = f"floating tensor {[*lead, channels]}"
        else:
            expected = (
                f"Quantized {[*lead, channels]} with {n_groups} {torch.bfloat16} scales"
                f" and {self._zero_dtype} zeros ({self.scheme.zero})"
            )
        if isinstance(value, Quantized):
            fits = (
                bits != 16
                and value.codes.shape == (*lead, channels)
                and value.scale.shape == value.zero.shape == (*lead, n_groups)
                and (value.scale.dtype, value.zero.dtype) == (torch.bfloat16, self._zero_dtype)
            )
            got = (
                f"Quantized {list(value.codes.shape)} with {value.scale.shape[-1]}"
                f" {value.scale.dtype} scales and {value.zero.dtype} zeros"
            )
        else:
            fits = bits == 16 and value.is_floating_point() and value.shape == (*lead, channels)
            got = f"tensor {list(value.shape)} {value.dtype}"
        if not fits:
            raise CacheError(
                f"the {name} rows do not fit these pages",
                where=f"PageLayout.store, scheme {self.scheme.name}",
                expected=expected,
                got=got,
                next_step="quantize with the bits, group and zero mode of the scheme",
            )

    def _check_pages(self, pages: Tensor) -> None:
        if pages.dtype != torch.uint8 or pages.dim() < 2 or pages.shape[-1] != self.page_bytes:
            raise CacheError(
                "these are not pages of this layout",
                where=f"PageLayout {self.scheme.name} {self.kv_lora_rank}+{self.qk_rope_head_dim}",
                expected=f"uint8 [..., n_pages, {self.page_bytes}]",
                got=f"{pages.dtype} {list(pages.shape)}",
            )

    def _check_range(self, pages: Tensor, start_token: int, end_token: int) -> None:
        capacity_tokens = pages.shape[-2] * PAGE_TOKENS
        if not 0 <= start_token <= end_token <= capacity_tokens:
            raise CacheError(
                "tokens outside the pages",
                where=f"PageLayout {self.scheme.name}",
                expected=f"0 <= start <= end <= {capacity_tokens} ({pages.shape[-2]} pages)",
                got=f"{start_token}..{end_token}",
                next_step="grow the pages first",
            )


def pages_for_tokens(tokens: int) -> int:
    """Return the number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def _row_bytes(channels: int, bits: int) -> int:
    return 2 * channels if bits == 16 else packed_bytes(channels, bits)


def _as_bytes(values: Tensor) -> Tensor:
    """View values as bytes in memory order (little endian on every supported host)."""
    return values.contiguous().view(torch.uint8)


def _group_major(values: Tensor) -> Tensor:
    """Bytes of [..., S, G] values in the order of their plane, [..., G, S, entry_bytes]."""
    return _as_bytes(values.transpose(-1, -2).unsqueeze(-1))


def _token_major(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., S, G] from the bytes of _group_major."""
    return entries.view(dtype).squeeze(-1).transpose(-1, -2)


def _plane_entries(pages: Tensor, plane: Plane) -> Tensor:
    """View a plane as [..., n_pages, entries, 64, entry_bytes]."""
    return pages[..., plane.offset_bytes : plane.end_bytes].unflatten(
        -1, (plane.entries, PAGE_TOKENS, plane.entry_bytes)
    )


def _places(plane: Plane, slots: slice, pages: Tensor) -> slice | Tensor:
    """Index of a run of slots in a plane: the run itself where places are slots."""
    if plane.ways == 1:
        return slots
    return plane.place(torch.arange(slots.start, slots.stop, device=pages.device))


def _by_page(entries: Tensor, page: slice, run: slice) -> Tensor:
    """View a run of tokens of [..., entries, S, entry_bytes] with the axes of _plane_entries."""
    n_pages = page.stop - page.start
    return entries[..., run, :].unflatten(-2, (n_pages, -1)).transpose(-4, -3)


def _read_entries(pages: Tensor, plane: Plane, start_token: int, end_token: int) -> Tensor:
    """Copy a run of tokens to a dense tensor [..., entries, S, entry_bytes]."""
    source = _plane_entries(pages, plane)
    shape = (plane.entries, end_token - start_token, plane.entry_bytes)
    entries = pages.new_empty(*pages.shape[:-2], *shape)
    for page, slot, run in _runs(start_token, end_token):
        places = _places(plane, slot, pages)
        _by_page(entries, page, run).copy_(source[..., page, :, places, :])
    return entries


def _runs(start_token: int, end_token: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut a run of tokens into at most three (pages, slots, tokens): page end, pages, start."""
    token = start_token
    while token < end_token:
        page, slot = divmod(token, PAGE_TOKENS)
        whole_pages = (end_token - token) // PAGE_TOKENS if slot == 0 else 0
        if whole_pages:
            n_pages, stop_slot = whole_pages, PAGE_TOKENS
        else:
            n_pages, stop_slot = 1, min(PAGE_TOKENS, slot + end_token - token)
        n_tokens = n_pages * (stop_slot - slot)
        rows = slice(token - start_token, token - start_token + n_tokens)
        yield slice(page, page + n_pages), slice(slot, stop_slot), rows
        token += n_tokens
