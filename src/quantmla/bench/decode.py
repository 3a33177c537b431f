"""Time the decode op beside BF16 kernels, and check its output, at a list of points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantmla.bench.peers import PAGE_TOKENS, BF16Cache, load_peers
from quantmla.bench.timing import interleaved, require_gpu
from quantmla.config import KVScheme
from quantmla.kernels import attention, attention_reference
from quantmla.kernels.support import attention_layout

RANK, ROPE = 512, 64
L2_BYTES = 60 << 20
CHECKED_TOKENS = 20000  # the float64 reference of longer sequences takes too long
LIBRARIES = ("flashmla", "fa3")  # the bar is the faster of these


@dataclass(frozen=True)
class Point:
    """One point of the benchmark.

    Fields:
        scheme: for example "c4r4".
        heads: query heads of this rank.
        queries: new tokens of a request.
        batch: requests.
        context [tokens]: length of each.
    """

    scheme: str
    heads: int
    queries: int
    batch: int
    context: int


# What docs/performance.md shows.
SUITE = [
    *(
        Point("c4r4", 16, 1, batch, context)
        for batch, context in (
            (1, 16384),
            (1, 65536),
            (8, 4096),
            (8, 16384),
            (8, 131072),
            (32, 4096),
            (32, 16384),
            (128, 16384),
        )
    ),
    *(Point("c2r4", 16, 1, batch, 16384) for batch in (8, 32, 128)),
    *(Point(name, 16, 1, 32, 16384) for name in ("c3r4", "c4r8", "c8r8", "c4r16")),
    Point("c4r4", 16, 2, 32, 16384),
    *(Point("c4r4", heads, 1, 32, 16384) for heads in (8, 20, 32, 64, 128)),
]


def run_decode(
    points: list[Point],
    *,
    flashmla: Path | None,
    fa3: Path | None,
    rounds: int,
    seed: int,
    tell: Callable[[str, int, int], None],
) -> list[dict]:
    """Measure every point.

    Args:
        points: what to measure.
        flashmla, fa3: libraries to measure against.
        rounds: interleaved bursts of each kernel.
        seed: of the random cache.
        tell: called with (what, done, total).
    Returns: one row a point: kernel, scheme, h, s_q, batch, context, ours_us, pool_doubled_us (the
        same in a pool twice as large), bf16_us, ratio (the faster library's time over ours) and
        error (relative, against float64; None if unchecked).
    Raises: KernelUnavailableError without a GPU that runs the kernels.
    Source: own.
    """
    require_gpu()
    peers = load_peers(flashmla, fa3)
    rows = []
    for number, point in enumerate(points):
        tell(f"{point.scheme} h={point.heads} {point.batch} x {point.context}", number, len(points))
        rows.append(_measure(point, peers, rounds, seed))
        torch.cuda.empty_cache()
    tell("decode", len(points), len(points))
    return rows


def _measure(point: Point, peers: dict[str, Callable], rounds: int, seed: int) -> dict:
    scheme = KVScheme.parse(point.scheme)
    tokens = point.batch * point.context
    layout = attention_layout(RANK, ROPE, scheme.content_bits, scheme.rope_bits)
    sets = _sets(tokens * layout.token_bytes)
    ours = [_packed_call(point, scheme, seed + i) for i in range(sets)]
    doubled = [_packed_call(point, scheme, seed + i, pool_factor=2) for i in range(sets)]
    calls = {"ours": [call for call, _ in ours], "doubled": [call for call, _ in doubled]}
    caches = [_bf16_cache(point, seed + i) for i in range(_sets(tokens * 2 * (RANK + ROPE)))]
    for name, prepare in peers.items():
        made = [prepare(cache) for cache in caches]
        if made[0] is not None:
            calls[name] = made
    times = interleaved(calls, rounds)
    bf16_us = {name: times.get(name) for name in peers}
    bar = [bf16_us[name] for name in LIBRARIES if bf16_us.get(name)]
    return {
        "kernel": "triton",
        "scheme": point.scheme,
        "h": point.heads,
        "s_q": point.queries,
        "batch": point.batch,
        "context": point.context,
        "ours_us": times["ours"],
        "pool_doubled_us": times["doubled"],
        "bf16_us": bf16_us,
        "ratio": min(bar) / times["ours"] if bar else None,
        "error": ours[0][1]() if point.context <= CHECKED_TOKENS else None,
    }


def _sets(n_bytes: int) -> int:
    """How many inputs of so many bytes a burst goes through, so that none stays in the L2 cache."""
    return 1 if n_bytes >= 4 * L2_BYTES else 1 + -(-2 * L2_BYTES // n_bytes)


def _packed_call(
    point: Point, scheme: KVScheme, seed: int, pool_factor: int = 1
) -> tuple[Callable[[], Tensor], Callable[[], float]]:
    """Return a decode call on a random packed cache, and one that measures its error.

    The pages of the requests lie scattered over a pool `pool_factor` times as large.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    layout = attention_layout(RANK, ROPE, scheme.content_bits, scheme.rope_bits)
    n_pages = -(-point.context // PAGE_TOKENS)
    n_blobs = pool_factor * point.batch * n_pages
    pages = torch.randint(
        0, 256, (n_blobs, layout.page_bytes), dtype=torch.uint8, device="cuda", generator=generator
    )
    scale_plane, zero_plane = layout.plane("scale"), layout.plane("zero")
    steps = torch.rand(
        n_blobs, layout.groups * PAGE_TOKENS, device="cuda", generator=generator
    ).mul_(0.1).add_(0.02)  # fmt: skip
    pages[:, scale_plane.offset_bytes : scale_plane.end_bytes] = steps.bfloat16().view(torch.uint8)
    if scheme.rope_bits == 16:  # numbers, where random bytes would hold NaN
        plane = layout.plane("rope")
        keys = torch.randn(n_blobs, plane.row_bytes // 2 * PAGE_TOKENS, device="cuda")
        pages[:, plane.offset_bytes : plane.end_bytes] = keys.bfloat16().view(torch.uint8)
    lowest = 2 ** min(scheme.content_bits, scheme.rope_bits) - 1
    pages[:, zero_plane.offset_bytes : zero_plane.end_bytes] &= lowest
    ring_tokens = scheme.window_tokens + point.queries - 1
    rows = torch.randn(
        point.batch, scheme.sink_tokens + ring_tokens, RANK + ROPE, device="cuda",
        dtype=torch.bfloat16, generator=generator,
    )  # fmt: skip
    table = torch.randperm(n_blobs, device="cuda", generator=generator).to(torch.int32)
    table = table[: point.batch * n_pages]
    query = torch.randn(
        point.batch, point.queries, point.heads, RANK + ROPE, device="cuda",
        dtype=torch.bfloat16, generator=generator,
    )  # fmt: skip
    args = (
        query[..., :RANK].contiguous(),
        query[..., RANK:].contiguous(),
        pages,
        rows,
        table.view(point.batch, n_pages),
        torch.full((point.batch,), point.context, dtype=torch.int32, device="cuda"),
        torch.arange(point.batch, dtype=torch.int32, device="cuda"),
    )
    formats = (scheme.content_bits, scheme.rope_bits, scheme.sink_tokens, scheme.window_tokens)
    scale = 1.0 / (RANK + ROPE) ** 0.5

    def error() -> float:
        """Relative error of the first request in fp32 output: beyond the quantisation itself."""
        first = [x[:1] if i in (0, 1, 4, 5, 6) else x for i, x in enumerate(args)]
        have = attention.decode(*first, scale, *formats, out_dtype=torch.float32)[0].double()
        want = attention_reference.decode(*first, scale, *formats, 64, 0, torch.float32)[0].double()
        return float((have - want).norm() / want.norm())

    return lambda: attention.decode(*args, scale, *formats)[0], error


def _bf16_cache(point: Point, seed: int) -> BF16Cache:
    generator = torch.Generator("cuda").manual_seed(seed)
    n_pages = -(-point.context // PAGE_TOKENS)
    width = RANK + ROPE
    pages = torch.randn(
        point.batch * n_pages, PAGE_TOKENS, 1, width, device="cuda", dtype=torch.bfloat16,
        generator=generator,
    )  # fmt: skip
    query = torch.randn(
        point.batch, point.queries, point.heads, width, device="cuda", dtype=torch.bfloat16,
        generator=generator,
    )  # fmt: skip
    table = torch.randperm(len(pages), device="cuda", generator=generator).to(torch.int32)
    lens = torch.full((point.batch,), point.context, dtype=torch.int32, device="cuda")
    return BF16Cache(pages, table.view(point.batch, n_pages), lens, query, width**-0.5, RANK)
