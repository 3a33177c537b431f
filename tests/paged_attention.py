"""A poisoned paged cache with written sequences, and the attention ops against their reference."""

import torch

from quantmla.cache.paged import PagedLatentCache
from quantmla.config import KVScheme
from quantmla.kernels import attention, attention_reference, ops
from quantmla.kernels.support import page_layout

SINK, WINDOW = 4, 128
NOWHERE = 2**31 - 1


class Sequences:
    """One cache layer of some sequences; `append` writes tokens as an engine would.

    Every byte that is not written reads as NaN or as a page that does not exist.
    """

    def __init__(
        self, lengths, *, rank=128, rope=32, bits=(4, 4), page_tokens=64, slack=7, device="cpu",
        sink=SINK, window=WINDOW, spare_pages=2,
    ):  # fmt: skip
        layout = page_layout(rank, rope, *bits)
        scheme = KVScheme(
            content_bits=bits[0], rope_bits=bits[1], sink_tokens=sink, window_tokens=window
        )
        layout = type(layout)(rank, rope, scheme)
        self.rank, self.rope, self.bits = rank, rope, bits
        self.sink, self.window, self.device = sink, window, device
        self.layout, self.page_tokens = layout, page_tokens
        n_pages = sum(-(-n // page_tokens) for n in lengths) + spare_pages
        self.cache = PagedLatentCache(
            [layout], n_pages=n_pages, n_slots=len(lengths) + 1, page_tokens=page_tokens,
            slack_tokens=slack, device=device, fingerprint="0" * 64,
        )  # fmt: skip
        self.pages, self.rows = self.cache.pool(0)
        self.pages.fill_(0xFF)
        self.rows.fill_(float("nan"))
        self.requests = list(range(len(lengths)))
        for request in reversed(self.requests):  # so that slots are not batch rows
            self.cache.add(request)

    def append(self, counts, seed=0):
        """Write new tokens of every sequence; return them [S, R+P, bf16] and the rows before."""
        generator = torch.Generator().manual_seed(seed)
        before = self.rows.clone()
        counts = {r: n for r, n in zip(self.requests, counts, strict=True) if n}
        total = sum(counts.values())
        new = torch.randn(total, self.rank + self.rope, generator=generator)
        new = (new * torch.rand(total, 1, generator=generator).add(0.2)).bfloat16().to(self.device)
        if total:
            plan = self.cache.extend(counts)
            ops.write(
                new[:, : self.rank], new[:, self.rank :], self.pages, self.rows,
                plan.slot_mapping, plan.positions, plan.row_slots, plan.seq_ends,
                torch.zeros(1, dtype=torch.int64, device=self.device), None, None,
                *self.bits, self.sink,
            )  # fmt: skip
            self._scramble(plan.slot_mapping)
        return new, before

    def _scramble(self, index):
        """Change the codes of tokens, so that a packed row has nothing to do with its BF16 row."""
        plane = self.layout.plane("content")
        column = torch.arange(plane.row_bytes, device=self.device)
        at = plane.offset_bytes + (index % 64)[:, None] * plane.row_bytes + column
        self.pages[(index // 64)[:, None], at] ^= 0x5A

    def tables(self):
        """Block table with pages that do not exist behind each sequence, lengths, row slots."""
        plan = self.cache.read(self.requests, query_tokens=0)
        table = plan.block_table.clone()
        pages = -(-plan.seq_lens // plan.page_tokens)
        column = torch.arange(table.shape[1], device=table.device)
        table[column >= pages[:, None]] = NOWHERE
        return table, plan.seq_lens, plan.row_slots

    def queries(self, *lead, seed=1):
        """Queries [*lead, R] and [*lead, P]."""
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(*lead, self.rank + self.rope, generator=generator).bfloat16()
        query = query.to(self.device)
        return query[..., : self.rank].contiguous(), query[..., self.rank :].contiguous()

    @property
    def scale(self):
        """Softmax scale that spreads the weights over many tokens but not evenly."""
        return 0.5 / (self.rank + self.rope) ** 0.5

    @property
    def formats(self):
        """The arguments that say what is stored and which rows are read in BF16."""
        return (*self.bits, self.sink, self.window)


def decode_both(cache, queries, heads, *, split_tokens=0, seed=1):
    """Decode with the op and with its reference: (out, lse) of each."""
    q = cache.queries(len(cache.requests), queries, heads, seed=seed)
    tables = cache.tables()
    page_tokens = cache.page_tokens
    settings = (cache.scale, *cache.formats, page_tokens, split_tokens, torch.float32)
    have = attention.decode(*q, cache.pages, cache.rows, *tables, *settings)
    want = attention_reference.decode(*q, cache.pages, cache.rows, *tables, *settings)
    return have, want


def prefill_both(cache, counts, heads, *, seed=1):
    """Append tokens and attend from them with the op and with its reference."""
    new, before = cache.append(counts, seed)
    q = cache.queries(len(new), heads, seed=seed + 1)
    tables = cache.tables()
    bounds = torch.tensor([0, *counts]).cumsum(0).to(cache.device, torch.int32)
    settings = (cache.scale, *cache.formats)
    last = (cache.page_tokens, torch.float32)
    most = max(counts)
    have = attention.prefill(*q, new, cache.pages, before, *tables, bounds, *settings, most, *last)
    want = attention_reference.prefill(
        *q, new, cache.pages, before, *tables, bounds, *settings, most, *last
    )  # fmt: skip
    return have, want


def assert_close(have, want, device):
    """Compare outputs and log-sum-exps of rows with tokens; the others are 0 and -inf.

    The interpreter cuts BF16 instead of rounding it, so weights are up to 2**-8 too small there.
    """
    bound, lse_bound = (1e-2, 2e-2) if device == "cpu" else (2e-3, 1e-3)
    live = want[1] > float("-inf")
    assert torch.equal(live, have[1] > float("-inf"))
    assert not have[0][~live].any()
    if live.any():
        out, expected = have[0][live].double(), want[0][live].double()
        assert float((out - expected).norm() / expected.norm()) <= bound
        assert float((have[1][live] - want[1][live]).abs().max()) <= lse_bound
