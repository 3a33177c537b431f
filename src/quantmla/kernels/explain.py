"""Which implementation decodes a cache on a device, how it is launched, and why not another."""

from __future__ import annotations

import torch

from quantmla.cache.layout import PAGE_TOKENS, PageLayout
from quantmla.config import KVScheme
from quantmla.kernels.launch import device_limits, launch_of, split_blobs
from quantmla.kernels.support import implementation, unsupported_in_attention


def explain_decode(
    scheme: KVScheme,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    heads: int,
    queries: int,
    batch: int,
    context: int,
    device: str,
) -> dict:
    """Say how one decode step would run.

    Args:
        scheme: bits, group, zero mode and policy.
        kv_lora_rank, qk_rope_head_dim [channels]: R and P.
        heads: query heads of this rank.
        queries: new tokens of a request.
        batch: requests.
        context [tokens]: of each request.
        device: torch device name.
    Returns: plain data: `kernel` (None: every op refuses the format), the reasons against it and
        against Triton on this device, and for a Triton kernel the `launch`,
        the `programs` of its first launch and `tokens_a_part`.
    Source: own.
    """
    name, reasons = implementation(device)
    refused = _format_reasons(scheme, kv_lora_rank, qk_rope_head_dim)
    result = {
        "scheme": scheme.name,
        "device": device,
        "kernel": None if refused else name,
        "reasons_against_the_format": refused,
        "reasons_against_triton": reasons,
        "hopper_kernel": "none yet: the portable Triton kernel serves every architecture",
    }
    if result["kernel"] != "triton":
        return result
    capability, sms = device_limits(torch.device(device).index or 0)
    plan = launch_of("decode", heads * queries, scheme.content_bits, scheme.rope_bits, capability)
    row_tiles = -(-heads * queries // plan.rows)
    blobs = -(-context // PAGE_TOKENS)
    size = split_blobs(batch, row_tiles, blobs, sms, plan.programs_an_sm)
    parts = -(-blobs // size) + 1
    return result | {
        "launch": vars(plan),
        "parts": parts,
        "tokens_a_part": size * PAGE_TOKENS,
        "programs": batch * row_tiles * parts,
    }


def _format_reasons(scheme: KVScheme, kv_lora_rank: int, qk_rope_head_dim: int) -> list[str]:
    return unsupported_in_attention(PageLayout(kv_lora_rank, qk_rope_head_dim, scheme))
