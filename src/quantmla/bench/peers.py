"""BF16 decode kernels to measure against; they are measuring sticks, never dependencies.

FlashMLA and FlashAttention-3 come as shared libraries whose paths the user gives; the Triton kernel
is of the kind that serving engines fall back to; torch's SDPA is what every machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quantmla.errors import KernelUnavailableError

PAGE_TOKENS = 64
FA3_SPLITS = 32  # the bound that serving engines set under CUDA graphs


@dataclass(frozen=True)
class BF16Cache:
    """A BF16 cache of some sequences of one length, in shuffled pages.

    Fields:
        pages [n_pages, 64, 1, R+P, bf16].
        block_table [B, pages, int32], seq_lens [B, int32].
        query [B, S, H, R+P, bf16].
        scale: softmax scale.
        rank: R.
    """

    pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query: Tensor
    scale: float
    rank: int


def load_peers(flashmla: Path | None, fa3: Path | None) -> dict[str, Callable]:
    """Load the libraries that are given.

    Args:
        flashmla, fa3: shared libraries that register torch ops.
    Returns: name to a function that prepares a call for a BF16Cache; always "triton" and "sdpa".
    Raises: KernelUnavailableError if a library does not load.
    Source: own.
    """
    peers: dict[str, Callable] = {}
    for name, path, namespace, needed, prepare in (
        ("flashmla", flashmla, "flash_mla_legacy", ("dense_decode_fwd",), _flashmla),
        ("fa3", fa3, "_vllm_fa3_C", ("fwd", "get_scheduler_metadata"), _fa3),
    ):
        if path is None:
            continue
        try:
            torch.ops.load_library(str(path))
            for function in needed:
                getattr(getattr(torch.ops, namespace), function)
        except (OSError, AttributeError) as error:
            raise KernelUnavailableError(
                "a library to measure against does not load",
                where=path,
                expected=f"a shared library with the torch ops of {name}",
                got=str(error).splitlines()[0],
                next_step="give another path, or leave the option out",
            ) from error
        peers[name] = prepare
    return peers | {"triton": _triton, "sdpa": _sdpa}


def _flashmla(cache: BF16Cache) -> Callable[[], Tensor]:
    op = torch.ops.flash_mla_legacy.dense_decode_fwd
    args = (cache.query, cache.pages, cache.rank, cache.seq_lens, cache.block_table, cache.scale)
    _, _, plan, splits = op(*args, True, None, None)
    return lambda: op(*args, True, plan, splits)[0]


def _fa3(cache: BF16Cache) -> Callable[[], Tensor]:
    ops = torch.ops._vllm_fa3_C
    batch, queries, heads, width = cache.query.shape
    rank, device = cache.rank, cache.query.device
    longest = int(cache.seq_lens.max())
    bounds = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=device)
    plan = ops.get_scheduler_metadata(
        batch, queries, longest, heads, 1, width - rank, rank, torch.bfloat16, cache.seq_lens,
        bounds, None, None, None, None, PAGE_TOKENS, 0, True, -1, -1, False, FA3_SPLITS, None, 0,
    )  # fmt: skip
    flat = cache.query.reshape(batch * queries, heads, width)
    q_latent, q_rope = flat[..., :rank].contiguous(), flat[..., rank:].contiguous()
    latent, rope = cache.pages[..., :rank], cache.pages[..., rank:]
    none = (None,) * 8

    def call() -> Tensor:
        return ops.fwd(
            q_rope, rope, latent, None, None, q_latent, None, bounds, None, None, None,
            cache.seq_lens, queries, longest, cache.block_table, *none, cache.scale, True, -1, -1,
            0.0, True, plan, FA3_SPLITS, None, 0, None, 1, 0, None,
        )[0].view(batch, queries, heads, rank)  # fmt: skip

    return call


def _triton(cache: BF16Cache) -> Callable[[], Tensor]:
    from quantmla.bench.bf16_decode import prepare

    return prepare(cache)


def _sdpa(cache: BF16Cache) -> Callable[[], Tensor]:
    """torch's attention over keys that already lie in one piece: no gather is timed."""
    batch, queries, heads, width = cache.query.shape
    if queries > 1:
        return None  # rows of one request differ in what they may read
    length = int(cache.seq_lens[0])
    keys = cache.pages[cache.block_table.long()].view(batch, 1, -1, width)[:, :, :length]
    query = cache.query.view(batch, 1, heads, width)
    return lambda: F.scaled_dot_product_attention(
        query, keys, keys[..., : cache.rank], scale=cache.scale
    ).view(batch, 1, heads, cache.rank)
