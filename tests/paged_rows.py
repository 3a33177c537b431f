"""Real rows for a paged cache on the CPU: a plain writer, and checks of what the pools hold."""

from itertools import pairwise

import torch

from page_rows import numbers
from quantmla.cache.layout import PAGE_TOKENS, PageLayout
from quantmla.cache.paged import PagedLatentCache
from quantmla.config import KVScheme
from quantmla.quant import Quantized, quantize

SINK, WINDOW, SLACK = 2, 5, 3
N_ROWS = 400
FINGERPRINT = "a" * 64


def layout_of(name, rank=16, rope=8, **fields):
    settings = {"group": 8, "sink_tokens": SINK, "window_tokens": WINDOW} | fields
    return PageLayout(rank, rope, KVScheme.parse(name, **settings))


LAYOUTS = (layout_of("c4r2"), layout_of("c3r16", rank=24))


def paged(n_pages=8, n_slots=4, layouts=LAYOUTS, **settings):
    """A cache whose memory reads as NaN until it is written."""
    settings = {"slack_tokens": SLACK, "device": "cpu", "fingerprint": FINGERPRINT} | settings
    cache = PagedLatentCache(layouts, n_pages=n_pages, n_slots=n_slots, **settings)
    for layer in range(len(layouts)):
        pages, rows = cache.pool(layer)
        pages.fill_(0xFF)
        rows.fill_(float("nan"))
    return cache


def token_bytes(layout, blobs):
    """All bytes of each token in a run of blobs, [64 * n, payload bytes of a token]."""
    parts = []
    for plane in layout.planes:
        part = blobs[:, plane.offset_bytes : plane.end_bytes]
        part = part.unflatten(1, (plane.entries, PAGE_TOKENS, plane.entry_bytes))
        part = part[:, :, plane.place(torch.arange(PAGE_TOKENS))]
        parts.append(part.permute(0, 2, 1, 3).reshape(-1, plane.row_bytes))
    return torch.cat(parts, 1)


class LayerRows:
    """N_ROWS rows of one layer, and the bytes that storing all of them at once gives."""

    def __init__(self, layout, seed):
        self.layout, scheme = layout, layout.scheme
        parts = (
            numbers(N_ROWS, layout.kv_lora_rank, seed),
            numbers(N_ROWS, layout.qk_rope_head_dim, seed + 1),
        )
        self.parts = [
            x if bits == 16 else quantize(x, bits, group=scheme.group)
            for x, bits in zip(parts, (scheme.content_bits, scheme.rope_bits), strict=True)
        ]
        self.rows = torch.cat(parts, -1).bfloat16()
        pages = layout.allocate(n_pages=-(-N_ROWS // PAGE_TOKENS))
        layout.store(pages, 0, *self.parts)
        self.bytes = token_bytes(layout, pages)[:N_ROWS]

    def store(self, page, slot, tokens):
        parts = [
            Quantized(*(x[tokens] for x in (p.codes, p.scale, p.zero)))
            if isinstance(p, Quantized)
            else p[tokens]
            for p in self.parts
        ]
        self.layout.store(page, slot, *parts)


ROWS = [LayerRows(layout, 10 * i) for i, layout in enumerate(LAYOUTS)]


def write(cache, plan, tokens):
    """Do what the write kernel does; `tokens` are row numbers, one for each row of the plan."""
    mapping = plan.slot_mapping.tolist()
    assert len(mapping) == len(tokens)
    starts = [
        i
        for i, index in enumerate(mapping)
        if i == 0 or index != mapping[i - 1] + 1 or index % PAGE_TOKENS == 0
    ]
    position, slot, end = (x.long() for x in (plan.positions, plan.row_slots, plan.seq_ends))
    ring = WINDOW + cache.pools.slack_tokens
    kept = (position < SINK) | (position >= end - ring)
    row = torch.where(position < SINK, position, SINK + (position - SINK) % ring)
    tokens = torch.tensor(tokens, dtype=torch.int64)
    for layer, source in enumerate(ROWS):
        pages, rows = cache.pool(layer)
        for first, stop in pairwise([*starts, len(mapping)]):
            blob, offset = divmod(mapping[first], PAGE_TOKENS)
            source.store(pages[blob : blob + 1], offset, tokens[first:stop])
        rows[slot[kept], row[kept]] = source.rows[tokens[kept]]


def append(cache, request, tokens):
    write(cache, cache.extend({request: len(tokens)}), tokens)


def blobs_of(cache, request):
    """Blobs of a request, read from the block table."""
    plan = cache.read([request])
    per_page = plan.page_tokens // PAGE_TOKENS
    table = plan.block_table[0, : -(-int(plan.seq_lens[0]) // plan.page_tokens)]
    return (table.long()[:, None] * per_page + torch.arange(per_page)).flatten()


def check_tokens(cache, request, tokens):
    """Compare every byte of a request with storing its tokens at once, and its BF16 rows."""
    assert cache.tokens(request) == len(tokens)
    blobs, slot = blobs_of(cache, request), int(cache.read([request]).row_slots[0])
    ring, index = WINDOW + cache.pools.slack_tokens, torch.tensor(tokens, dtype=torch.int64)
    recent = [p for p in range(len(tokens)) if p < SINK or p > len(tokens) - WINDOW]
    row = [p if p < SINK else SINK + (p - SINK) % ring for p in recent]
    for layer, source in enumerate(ROWS):
        pages, rows = cache.pool(layer)
        stored = token_bytes(source.layout, pages[blobs])[: len(tokens)]
        assert torch.equal(stored, source.bytes[index])
        assert torch.equal(rows[slot, row], source.rows[index[recent]])
