"""Writer and gather of the paged cache in plain torch: what the kernels must equal to the bit.

The functions take the arguments of the ops of the same name (`ops.py`) and run on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS, PageLayout, Plane
from quantmla.kernels.support import page_layout
from quantmla.quant import Quantized, dequantize, pack, quantize, unpack
from quantmla.quant.feedback import Feedback, feed_back


def write(
    latent: Tensor,
    k_rope: Tensor,
    pages: Tensor,
    rows: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    seq_ends: Tensor,
    nonfinite: Tensor,
    content_clip: Tensor | None,
    rope_clip: Tensor | None,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    rope_order: Tensor | None = None,
    rope_feedback: Tensor | None = None,
) -> None:
    """Quantise, pack and store new tokens, and keep the BF16 rows of sinks and ring.

    Args: those of `ops.write`.
    Source: own; docs/layout.md.
    """
    layout = page_layout(latent.shape[1], k_rope.shape[1], content_bits, rope_bits)
    written = (slot_mapping >= 0) & (slot_mapping < pages.shape[0] * PAGE_TOKENS)
    index = slot_mapping[written]
    raw = torch.cat([part[written].to(torch.bfloat16) for part in (latent, k_rope)], -1)
    nonfinite += (~raw.isfinite()).sum()
    safe = _finite(raw)
    _keep_rows(rows, safe, positions[written], row_slots[written], seq_ends[written], sink_tokens)
    rank = latent.shape[1]
    for name, bits, clip, channels, groups in (
        ("content", content_bits, content_clip, slice(0, rank), slice(0, layout.content_groups)),
        ("rope", rope_bits, rope_clip, slice(rank, None), slice(layout.content_groups, None)),
    ):
        if bits == 16:
            _put(layout, pages, name, index, safe[:, None, channels])
            continue
        settings = {"group": layout.scheme.group, "zero": layout.scheme.zero}
        q = quantize(raw[:, channels], bits, clip=clip, **settings)
        if name == "rope" and rope_order is not None:
            feedback = Feedback(rope_order.long(), rope_feedback[:, rope_order.long()])
            q = feed_back(safe[:, channels], q, bits, feedback, **settings)
        _put(layout, pages, name, index, pack(q.codes, bits)[:, None])
        _put(layout, pages, "scale", index, q.scale[..., None], groups)
        _put(layout, pages, "zero", index, q.zero[..., None], groups)


def gather(
    pages: Tensor,
    block_table: Tensor,
    starts: Tensor,
    ends: Tensor,
    n_tokens: int,
    page_tokens: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    content_bits: int,
    rope_bits: int,
) -> Tensor:
    """Read packed tokens back as BF16 rows.

    Args: those of `ops.gather`.
    Returns: rows [B, n_tokens, R+P, bf16].
    Source: own; docs/layout.md.
    """
    layout = page_layout(kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    channels = kv_lora_rank + qk_rope_head_dim
    out = pages.new_zeros(block_table.shape[0], n_tokens, channels, dtype=torch.bfloat16)
    token = starts[:, None].long() + torch.arange(n_tokens, device=pages.device)
    column = token // page_tokens
    readable = (token >= 0) & (token < ends[:, None]) & (column < block_table.shape[1])
    batch = torch.arange(len(starts), device=pages.device)[:, None].expand_as(token)[readable]
    token = token[readable]
    page = block_table[batch, column[readable]].long()
    blob = page * (page_tokens // PAGE_TOKENS) + token % page_tokens // PAGE_TOKENS
    inside = (blob >= 0) & (blob < pages.shape[0])
    values = torch.zeros_like(out[readable])
    index = blob[inside] * PAGE_TOKENS + token[inside] % PAGE_TOKENS
    values[inside] = torch.cat(
        [
            _read(layout, pages, index, "content", slice(0, layout.content_groups)),
            _read(layout, pages, index, "rope", slice(layout.content_groups, None)),
        ],
        -1,
    )
    out[readable] = values
    return out


def _finite(rows: Tensor) -> Tensor:
    """NaN becomes 0, an infinity the largest finite magnitude of its row with its own sign."""
    finite = rows.isfinite()
    bound = torch.where(finite, rows.abs(), 0).amax(-1, keepdim=True)
    return torch.where(finite, rows, torch.where(rows.isnan(), 0, torch.copysign(bound, rows)))


def _keep_rows(
    rows: Tensor,
    values: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    seq_ends: Tensor,
    sink_tokens: int,
) -> None:
    """Write sink and ring rows; of the tokens that share a ring row only the last is written."""
    ring_tokens = rows.shape[1] - sink_tokens
    in_sink = (positions >= 0) & (positions < sink_tokens)
    in_ring = (positions >= sink_tokens) & (positions >= seq_ends - ring_tokens)
    in_ring &= positions < seq_ends
    kept = (in_sink | in_ring) & (row_slots >= 0) & (row_slots < rows.shape[0])
    position, slot = positions[kept].long(), row_slots[kept].long()
    ring_row = sink_tokens + (position - sink_tokens) % max(ring_tokens, 1)
    rows[slot, torch.where(position < sink_tokens, position, ring_row)] = values[kept]


def _put(
    layout: PageLayout,
    pages: Tensor,
    name: str,
    index: Tensor,
    values: Tensor,
    entries: slice = slice(None),
) -> None:
    """Write entries [S, E, ...] of a plane for the tokens index [S] of the pool."""
    at = _bytes(layout.plane(name), index % PAGE_TOKENS, entries)
    pages[(index // PAGE_TOKENS)[:, None, None], at] = values.contiguous().view(torch.uint8)


def _read(layout: PageLayout, pages: Tensor, index: Tensor, name: str, groups: slice) -> Tensor:
    """Numbers [S, channels, bf16] of one path of the tokens index [S] of the pool."""
    content = name == "content"
    bits = layout.scheme.content_bits if content else layout.scheme.rope_bits
    channels = layout.kv_lora_rank if content else layout.qk_rope_head_dim
    blob, slot = (index // PAGE_TOKENS)[:, None, None], index % PAGE_TOKENS
    packed = pages[blob, _bytes(layout.plane(name), slot, slice(None))].flatten(1)
    if bits == 16:
        return packed.view(torch.bfloat16)
    scale = pages[blob, _bytes(layout.plane("scale"), slot, groups)].flatten(1)
    zero = pages[blob, _bytes(layout.plane("zero"), slot, groups)].flatten(1)
    q = Quantized(unpack(packed, bits, channels), scale.view(torch.bfloat16), zero)
    return dequantize(q, group=layout.scheme.group)


def _bytes(plane: Plane, slot: Tensor, entries: slice) -> Tensor:
    """Bytes [S, E, entry_bytes] of a page that hold some entries of the tokens in slots [S]."""
    entry = torch.arange(plane.entries, device=slot.device)[entries, None]
    within = torch.arange(plane.entry_bytes, device=slot.device)
    row = entry * PAGE_TOKENS + plane.place(slot)[:, None, None]  # [S, E, 1]
    return plane.offset_bytes + row * plane.entry_bytes + within
