"""Time the writer, and the copy that bounds it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantmla.bench.timing import interleaved, require_gpu
from quantmla.config import KVScheme
from quantmla.kernels import ops
from quantmla.kernels.support import page_layout

RANK, ROPE = 512, 64
BLOB_TOKENS = 64
SETS = 4


def run_write(schemes: list[str], sizes: list[int], *, rounds: int, seed: int) -> list[dict]:
    """Measure one write of each size: as many requests with one token each, or one long prefill.

    Args:
        schemes: for example "c4r4".
        sizes [tokens]: up to 256 tokens are one each of so many requests, more are one prefill.
        rounds: interleaved bursts.
        seed: of the numbers.
    Returns: one row a scheme and size: tokens, us, bytes read and written, TB/s, and the TB/s of a
        plain copy of as many bytes in the same run.
    Raises: KernelUnavailableError without a GPU that runs the kernels.
    Source: own.
    """
    require_gpu()
    rows = []
    for scheme in schemes:
        for tokens in sizes:
            parsed = KVScheme.parse(scheme)
            layout = page_layout(RANK, ROPE, parsed.content_bits, parsed.rope_bits)
            moved_bytes = tokens * (2 * (RANK + ROPE) + layout.token_bytes)
            calls = {
                "write": [_write_call(parsed, tokens, seed + i) for i in range(SETS)],
                "copy": [_copy_call(moved_bytes // 2) for _ in range(SETS)],
            }
            times = interleaved(calls, rounds)
            rows.append(
                {
                    "scheme": scheme,
                    "tokens": tokens,
                    "us": times["write"],
                    "moved_bytes": moved_bytes,
                    "tb_s": moved_bytes / times["write"] / 1e6,
                    "copy_tb_s": moved_bytes / times["copy"] / 1e6,
                }
            )
            torch.cuda.empty_cache()
    return rows


def _write_call(scheme: KVScheme, tokens: int, seed: int) -> Callable[[], object]:
    generator = torch.Generator("cuda").manual_seed(seed)
    layout = page_layout(RANK, ROPE, scheme.content_bits, scheme.rope_bits)
    new = torch.randn(tokens, RANK + ROPE, device="cuda", dtype=torch.bfloat16, generator=generator)
    index = torch.arange(tokens, device="cuda")
    decode = tokens <= 256  # one token of each of so many requests
    n_blobs = tokens if decode else -(-tokens // BLOB_TOKENS)
    pages = torch.zeros(n_blobs, layout.page_bytes, dtype=torch.uint8, device="cuda")
    kept = scheme.sink_tokens + scheme.window_tokens
    rows = torch.zeros(
        tokens if decode else 1, kept, RANK + ROPE, dtype=torch.bfloat16, device="cuda"
    )
    position = torch.full_like(index, 999) if decode else index
    end = position + 1 if decode else torch.full_like(index, tokens)
    args = (
        new[:, :RANK],
        new[:, RANK:],
        pages,
        rows,
        index * BLOB_TOKENS + 7 if decode else index,
        position.int(),
        (index if decode else torch.zeros_like(index)).int(),
        end.int(),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        None,
        None,
        scheme.content_bits,
        scheme.rope_bits,
        scheme.sink_tokens,
    )
    return lambda: ops.write(*args)


def _copy_call(n_bytes: int) -> Callable[[], object]:
    source = torch.zeros(n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # as an elementwise kernel: in a graph, copy_ becomes a slower memory-copy node
    return lambda: torch.bitwise_not(source, out=target)
