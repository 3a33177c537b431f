"""What a cached token costs: bytes of a format, resident bytes, and the study's own bookkeeping.

All functions count bytes of one cache layer unless their name says model. Ratios are BF16 bytes /
our bytes; KB means 1000 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantmla.cache.layout import PAGE_TOKENS, PageLayout, pages_for_tokens
from quantmla.config import KVScheme
from quantmla.dims import BF16_BYTES, MLADims
from quantmla.quant import group_count

MAP_ENTRY_BYTES = 4  # one int32 a page in the page table, one int32 a BF16 row in the slot map


@dataclass(frozen=True)
class StoredPath:
    """How one path is stored: `bits` a channel and `meta_bytes` for every `group` channels."""

    bits: int
    group: int = 1
    meta_bytes: int = 0

    def code_bytes(self, channels: int) -> int:
        """Bytes of the codes of `channels` channels."""
        return -(-channels * self.bits // 8)

    def metadata_bytes(self, channels: int) -> int:
        """Bytes of scales and zeros of `channels` channels."""
        return group_count(channels, self.group) * self.meta_bytes


@dataclass(frozen=True)
class TokenFormat:
    """How one token is stored in one layer: a format for the latent and one for the rotated key."""

    content: StoredPath
    rope: StoredPath

    @classmethod
    def from_scheme(cls, scheme: KVScheme) -> TokenFormat:
        """Return the format of a scheme: a bf16 scale and a u8 or bf16 zero a group."""
        meta_bytes = 3 if scheme.zero == "zp8" else 4

        def path(bits: int) -> StoredPath:
            return BF16_PATH if bits == 16 else StoredPath(bits, scheme.group, meta_bytes)

        return cls(path(scheme.content_bits), path(scheme.rope_bits))

    def code_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Bytes of the codes of a token."""
        return self.content.code_bytes(kv_lora_rank) + self.rope.code_bytes(qk_rope_head_dim)

    def metadata_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Bytes of the scales and zeros of a token."""
        return self.content.metadata_bytes(kv_lora_rank) + self.rope.metadata_bytes(
            qk_rope_head_dim
        )

    def logical_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Bytes of a token without any padding."""
        sizes = (kv_lora_rank, qk_rope_head_dim)
        return self.code_bytes(*sizes) + self.metadata_bytes(*sizes)

    def record_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int, align_bytes: int = 64) -> int:
        """Bytes of a token stored as a record of its own, padded to align_bytes."""
        return -(-self.logical_bytes(kv_lora_rank, qk_rope_head_dim) // align_bytes) * align_bytes


BF16_PATH = StoredPath(16)

# Formats of other systems, for comparison rows only; padding of their records is not counted.
OTHER_FORMATS = {
    "bf16": TokenFormat(BF16_PATH, BF16_PATH),
    "fp8 flat": TokenFormat(StoredPath(8), StoredPath(8)),
    "fp8 tile128, rope bf16": TokenFormat(StoredPath(8, 128, 4), BF16_PATH),
    "nvfp4": TokenFormat(StoredPath(4, 16, 1), StoredPath(4, 16, 1)),
    "mxfp4": TokenFormat(StoredPath(4, 32, 1), StoredPath(4, 32, 1)),
    "nvfp4, rope bf16": TokenFormat(StoredPath(4, 16, 1), BF16_PATH),
}


@dataclass(frozen=True)
class Resident:
    """Bytes that one sequence of `tokens` tokens keeps in one layer, by part."""

    tokens: int
    packed_bytes: int
    bf16_rows_bytes: int
    map_bytes: int
    bf16_cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """Packed tokens, BF16 rows and maps together."""
        return self.packed_bytes + self.bf16_rows_bytes + self.map_bytes

    @property
    def ratio(self) -> float:
        """BF16 cache bytes / resident bytes; 1 for an empty sequence."""
        return self.bf16_cache_bytes / self.total_bytes if self.tokens else 1.0


def resident(layout: PageLayout, tokens: int, slack_tokens: int = 0) -> Resident:
    """Count what one sequence needs in planar pages: whole pages, BF16 rows and both maps.

    Every token is packed, and protected tokens are kept in BF16 as well. At 16 bits on both paths
    there are no pages and no maps: all rows are BF16.

    This is the need of a paged pool. The Hugging Face cache (LatentLayer) has no maps, takes sinks
    and ring for all their rows with the first token, and grows pages, or rows at 16 bits, to 1.25
    times what it had. After one call of at least sink + window + slack tokens it holds exactly
    packed_bytes + bf16_rows_bytes a sequence.

    Args:
        layout: page layout; its scheme gives sink and window.
        tokens: length of the sequence.
        slack_tokens: ring rows beyond the window (speculative decoding).
    Returns: Resident.
    Source: own.
    """
    if layout.scheme.content_bits == layout.scheme.rope_bits == 16:
        rows_bytes = tokens * BF16_BYTES * (layout.kv_lora_rank + layout.qk_rope_head_dim)
        return Resident(tokens, 0, rows_bytes, 0, rows_bytes)
    pages = pages_for_tokens(tokens)
    protected_tokens = layout.scheme.sink_tokens + layout.scheme.window_tokens + slack_tokens
    row_bytes = BF16_BYTES * (layout.kv_lora_rank + layout.qk_rope_head_dim)
    return _resident(tokens, pages * layout.page_bytes, pages, protected_tokens, row_bytes)


def pool_bytes(
    layouts: Sequence[PageLayout],
    *,
    n_pages: int,
    n_slots: int,
    page_tokens: int = PAGE_TOKENS,
    slack_tokens: int = 0,
) -> int:
    """Count what a PagedLatentCache of these sizes keeps resident, in all layers together.

    A pool with just the pages of one sequence holds the packed and the BF16 bytes of `resident`
    a layer; maps are made for each call and are not part of it.

    Args:
        layouts: page layout of each cache layer.
        n_pages, n_slots: pages and request slots.
        page_tokens: tokens of a page.
        slack_tokens: ring rows beyond the window.
    Returns: bytes.
    Source: own.
    """
    total_bytes = 0
    for layout in layouts:
        row_tokens = layout.scheme.sink_tokens + layout.scheme.window_tokens + slack_tokens
        row_bytes = BF16_BYTES * (layout.kv_lora_rank + layout.qk_rope_head_dim)
        total_bytes += n_pages * (page_tokens // PAGE_TOKENS) * layout.page_bytes
        total_bytes += n_slots * row_tokens * row_bytes
    return total_bytes


def study_resident(dims: MLADims, scheme: KVScheme, tokens: int) -> Resident:
    """Count as the QuantMLA study does: one padded record a token instead of planar pages.

    Args:
        dims: sizes of both paths.
        scheme: bits, group, zero mode, sink and window.
        tokens: length of the sequence.
    Returns: Resident; c4r4 at 512+64 gives the published 3.22 at 4,096 and 3.59 at 131,072 tokens.
    Source: resident memory of the QuantMLA study; the 320-byte record is inferred from its ratios.
    """
    record = TokenFormat.from_scheme(scheme).record_bytes(dims.kv_lora_rank, dims.qk_rope_head_dim)
    protected_tokens = scheme.sink_tokens + scheme.window_tokens
    pages = pages_for_tokens(tokens)
    return _resident(tokens, tokens * record, pages, protected_tokens, dims.bf16_bytes_per_token)


def _resident(
    tokens: int, packed_bytes: int, pages: int, protected_tokens: int, row_bytes: int
) -> Resident:
    return Resident(
        tokens=tokens,
        packed_bytes=packed_bytes,
        bf16_rows_bytes=min(tokens, protected_tokens) * row_bytes,
        map_bytes=MAP_ENTRY_BYTES
        * (pages + protected_tokens),  # the slot map has its full size from the start
        bf16_cache_bytes=tokens * row_bytes,
    )


def model_bytes_per_token(dims: MLADims, scheme: KVScheme | None = None) -> int:
    """Return the bytes a token of a whole model: page bytes under a scheme, BF16 without one."""
    if scheme is None:
        return dims.num_cache_layers * dims.bf16_bytes_per_token
    layout = PageLayout(dims.kv_lora_rank, dims.qk_rope_head_dim, scheme)
    return dims.num_cache_layers * layout.token_bytes


def scheme_table(
    dims: MLADims, schemes: list[KVScheme], contexts_tokens: tuple[int, ...] = (4096, 131072)
) -> list[dict]:
    """Return one row a scheme with the sizes that a reader compares, ready for JSON.

    Args:
        dims: the model.
        schemes: rows of the table.
        contexts_tokens: lengths at which the resident ratio is given.
    Returns: rows with scheme, zero, logical_bytes, bytes_per_token (per layer, page padding
        included), page_bytes, model_bytes_per_token, ratio and resident_ratio by context, and as
        the study counts record_bytes and study_ratio by context.
    """
    rows, sizes = [], (dims.kv_lora_rank, dims.qk_rope_head_dim)
    for scheme in schemes:
        layout, form = PageLayout(*sizes, scheme), TokenFormat.from_scheme(scheme)
        rows.append(
            {
                "scheme": scheme.name,
                "zero": scheme.zero,
                "logical_bytes": form.logical_bytes(*sizes),
                "bytes_per_token": layout.token_bytes,
                "page_bytes": layout.page_bytes,
                "model_bytes_per_token": model_bytes_per_token(dims, scheme),
                "ratio": dims.bf16_bytes_per_token / layout.token_bytes,
                "resident_ratio": {str(n): resident(layout, n).ratio for n in contexts_tokens},
                "record_bytes": form.record_bytes(*sizes),
                "study_ratio": {
                    str(n): study_resident(dims, scheme, n).ratio for n in contexts_tokens
                },
            }
        )
    return rows


def other_formats(dims: MLADims) -> list[dict]:
    """Return what a token costs in one layer in the formats of other systems, ready for JSON.

    Args: dims: the model.
    Returns: rows with format, bytes_per_token (logical: padding is not counted) and ratio.
    """
    return [
        {"format": name, "bytes_per_token": size, "ratio": dims.bf16_bytes_per_token / size}
        for name, form in OTHER_FORMATS.items()
        for size in (form.logical_bytes(dims.kv_lora_rank, dims.qk_rope_head_dim),)
    ]
