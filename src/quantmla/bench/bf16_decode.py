"""A BF16 split-KV decode kernel of the usual kind, in Triton: 16 heads a program, 32 tokens a step.

Serving engines fall back to such a kernel where no tuned library runs. Every tile of 16 heads
reads all keys again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantmla.kernels.decode import merge_parts
from quantmla.kernels.packed_loop import LOG2_E

if TYPE_CHECKING:
    from quantmla.bench.peers import BF16Cache

HEADS, TILE, WARPS, STAGES = 16, 32, 4, 2
SPLITS = (4, 16, 64)  # the fastest is taken


@triton.jit
def bf16_parts(
    query, pages, block_table, seq_lens, out, lse, heads, parts, table_stride, scale_log2,
    R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend from 16 heads of a request to one part of its tokens."""
    request, part = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    c, p, t = tl.arange(0, R), tl.arange(0, P), tl.arange(0, TILE)
    row = query + (request * heads + head)[:, None] * (R + P)
    q_latent = tl.load(row + c[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(row + R + p[None, :], mask=real[:, None], other=0.0)
    length = tl.load(seq_lens + request)
    size = tl.cdiv(tl.cdiv(length, parts), TILE) * TILE
    first, last = part * size, tl.minimum((part + 1) * size, length)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, R], tl.float32)
    for start in range(first, last, TILE):
        key = start + t
        live = key < last
        page = tl.load(block_table + request * table_stride + key // PAGE, mask=live, other=0)
        base = pages + (page.to(tl.int64) * PAGE + key % PAGE)[:, None] * (R + P)
        latent = tl.load(base + c[None, :], mask=live[:, None], other=0.0)
        rope = tl.load(base + R + p[None, :], mask=live[:, None], other=0.0)
        score = (tl.dot(q_latent, tl.trans(latent)) + tl.dot(q_rope, tl.trans(rope))) * scale_log2
        score = tl.where(live[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shift, weight = tl.exp2(top - new), tl.exp2(score - new[:, None])
        total = total * shift + tl.sum(weight, 1)
        acc = tl.dot(weight.to(tl.bfloat16), latent, acc * shift[:, None])
        top = new
    target = (part * tl.num_programs(0) + request).to(tl.int64) * heads + head
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(out + target[:, None] * R + c[None, :], acc * inverse[:, None], mask=real[:, None])
    tl.store(lse + target, top + tl.log2(total), mask=real)


def prepare(cache: BF16Cache) -> Callable[[], Tensor] | None:
    """Return a call of the kernel with the fastest number of splits, None for several queries."""
    if cache.query.shape[1] > 1:
        return None
    calls = {splits: _call(cache, splits) for splits in SPLITS}
    times = {splits: triton.testing.do_bench(call, 2, 5) for splits, call in calls.items()}
    return calls[min(times, key=times.get)]


def _call(cache: BF16Cache, parts: int) -> Callable[[], Tensor]:
    batch, queries, heads, width = cache.query.shape
    rank = cache.rank
    out_parts = cache.query.new_empty(parts, batch * heads, rank, dtype=torch.float32)
    lse_parts = cache.query.new_empty(parts, batch * heads, dtype=torch.float32)
    out = cache.query.new_empty(batch, queries, heads, rank)
    lse = cache.query.new_empty(batch, heads, dtype=torch.float32)

    def call() -> Tensor:
        bf16_parts[(batch, triton.cdiv(heads, HEADS), parts)](
            cache.query, cache.pages, cache.block_table, cache.seq_lens, out_parts, lse_parts,
            heads, parts, cache.block_table.stride(0), cache.scale * LOG2_E,
            R=rank, P=width - rank, PAGE=cache.pages.shape[1], HEADS=HEADS, TILE=TILE,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        merge_parts[(batch * heads, rank // 128)](
            out_parts, lse_parts, out, lse, parts, R=rank, N=1, COLUMNS=128, CHUNK=64,
            EARLY=False, num_warps=4,
        )  # fmt: skip
        return out

    return call
