"""What a paged cache takes on the device, beside its accounting and beside BF16."""

from __future__ import annotations

import torch

from quantmla.cache.accounting import pool_bytes
from quantmla.cache.layout import PAGE_TOKENS
from quantmla.cache.paged import PagedLatentCache
from quantmla.config import KVScheme
from quantmla.kernels.support import page_layout

RANK, ROPE = 512, 64


def run_memory(
    schemes: list[str], contexts: list[int], *, layers: int, requests: int, device: str
) -> list[dict]:
    """Allocate a cache for each scheme and context, and count what it takes.

    Args:
        schemes: for example "c4r4".
        contexts [tokens]: of each request.
        layers: cache layers.
        requests: that fit at once.
        device: a CUDA device, whose allocator is asked; on a CPU the tensors are counted.
    Returns: one row a scheme and context: allocated_bytes, accounted_bytes, bf16_bytes, and ratio
        (BF16 over allocated), BF16 rows of sinks and window included.
    Source: own.
    """
    rows = []
    for scheme in schemes:
        for context in contexts:
            parsed = KVScheme.parse(scheme)
            layout = page_layout(RANK, ROPE, parsed.content_bits, parsed.rope_bits)
            sizes = {"n_pages": requests * -(-context // PAGE_TOKENS), "n_slots": requests}
            before_bytes = _allocated_bytes(device)
            cache = PagedLatentCache(
                [layout] * layers, **sizes, device=device, fingerprint="0" * 64
            )
            taken_bytes = _allocated_bytes(device) - before_bytes
            if not device.startswith("cuda"):
                taken_bytes = cache.resident_bytes()
            bf16_bytes = 2 * (RANK + ROPE) * context * requests * layers
            rows.append(
                {
                    "scheme": scheme,
                    "context": context,
                    "requests": requests,
                    "layers": layers,
                    "allocated_bytes": taken_bytes,
                    "accounted_bytes": pool_bytes([layout] * layers, **sizes),
                    "bf16_bytes": bf16_bytes,
                    "ratio": bf16_bytes / taken_bytes,
                }
            )
            del cache
    return rows


def _allocated_bytes(device: str) -> int:
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0
