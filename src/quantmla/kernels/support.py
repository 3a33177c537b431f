"""What the kernels can store, which implementation runs on a device, and why not another.

Nothing here imports triton.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache
from importlib.util import find_spec

import torch

from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme
from quantmla.errors import KernelUnavailableError

GROUP = 64
BITS = (2, 3, 4, 8, 16)
CHANNELS_MULTIPLE = 16  # so that the packed row of any width is made of whole 16-bit words
MAX_CHANNELS = 4096  # a program holds whole rows
MAX_RANK = 512  # of attention: a program keeps its sums in registers
MIN_CAPABILITY = (8, 0)


def unsupported(layout: PageLayout) -> list[str]:
    """List every reason why the kernels cannot work on pages of a layout; empty if they can.

    Args:
        layout: sizes and scheme.
    Returns: sentences without a final stop.
    Source: own.
    """
    scheme, reasons = layout.scheme, []
    if scheme.group != GROUP:
        reasons.append(f"groups have {scheme.group} channels, the kernels know {GROUP}")
    if scheme.zero != "zp8":
        reasons.append(f"the zero mode is {scheme.zero}, the kernels know zp8")
    return reasons + _unsupported_sizes(
        layout.kv_lora_rank, layout.qk_rope_head_dim, scheme.content_bits, scheme.rope_bits
    )


def unsupported_in_attention(layout: PageLayout) -> list[str]:
    """List every reason why the attention kernels cannot read pages of a layout.

    Args:
        layout: sizes and scheme.
    Returns: sentences without a final stop; empty if they can.
    Source: own.
    """
    scheme = layout.scheme
    return unsupported(layout) + _unsupported_in_attention(
        layout.kv_lora_rank, layout.qk_rope_head_dim, scheme.content_bits, scheme.rope_bits
    )


@lru_cache(maxsize=256)
def page_layout(
    kv_lora_rank: int, qk_rope_head_dim: int, content_bits: int, rope_bits: int
) -> PageLayout:
    """Return the page layout that the kernels use for these sizes and bits.

    Args:
        kv_lora_rank, qk_rope_head_dim [channels]: R and P.
        content_bits, rope_bits: code widths; 16 for BF16 rows.
    Returns: PageLayout with groups of 64 and zp8.
    Raises: KernelUnavailableError with every reason.
    Source: own.
    """
    sizes = (kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    _refuse(
        _unsupported_sizes(*sizes), f"R {sizes[0]}, P {sizes[1]}, bits {sizes[2]} and {sizes[3]}"
    )
    scheme = KVScheme(content_bits=content_bits, rope_bits=rope_bits, group=GROUP, zero="zp8")
    return PageLayout(kv_lora_rank, qk_rope_head_dim, scheme)


@lru_cache(maxsize=256)
def attention_layout(
    kv_lora_rank: int, qk_rope_head_dim: int, content_bits: int, rope_bits: int
) -> PageLayout:
    """Return the page layout of an attention kernel, which knows fewer sizes than the writer.

    Args:
        kv_lora_rank, qk_rope_head_dim [channels]: R and P.
        content_bits, rope_bits: code widths; 16 for a BF16 rotated key.
    Returns: PageLayout with groups of 64 and zp8.
    Raises: KernelUnavailableError with every reason.
    Source: own.
    """
    sizes = (kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    reasons = _unsupported_in_attention(*sizes)
    _refuse(reasons, f"R {sizes[0]}, P {sizes[1]}, bits {sizes[2]} and {sizes[3]}")
    return page_layout(*sizes)


def implementation(device: torch.device | str) -> tuple[str, list[str]]:
    """Say which implementation of the ops runs for tensors of a device, and why not Triton.

    Args:
        device: where the tensors are.
    Returns: "triton", "interpreter" (Triton's, for tests on a CPU) or "reference", and the reasons
        against Triton on this device; none if it runs there.
    Source: own.
    """
    device = torch.device(device)
    reasons = []
    if not _triton_installed():
        reasons.append("triton is not installed")
    if device.type == "cpu":
        if not reasons and interpreting():
            return "interpreter", ["Triton compiles for GPUs only"]
        reasons.append("Triton compiles for GPUs only, and TRITON_INTERPRET is not set")
    elif device.type != "cuda" or torch.version.hip is not None:
        reasons.append(f"the kernels are for NVIDIA GPUs, not for {device.type}")
    else:
        reasons += _too_old(device.index or 0)
    return ("reference", reasons) if reasons else ("triton", [])


def interpreting() -> bool:
    """Tell whether Triton runs kernels in its interpreter; set before triton is imported.

    Returns: True if TRITON_INTERPRET is on.
    Source: own.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


@cache
def _too_old(index: int) -> list[str]:
    capability = torch.cuda.get_device_capability(index)
    if capability >= MIN_CAPABILITY:
        return []
    major, minor = capability
    return [f"the GPU has compute capability {major}.{minor}, the kernels need 8.0 or later"]


def _unsupported_sizes(
    kv_lora_rank: int, qk_rope_head_dim: int, content_bits: int, rope_bits: int
) -> list[str]:
    reasons = []
    for name, channels in (("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)):
        if not 0 < channels <= MAX_CHANNELS or channels % CHANNELS_MULTIPLE:
            reasons.append(
                f"{name} is {channels}, the kernels know multiples of {CHANNELS_MULTIPLE}"
                f" up to {MAX_CHANNELS}"
            )
    for name, bits in (("content_bits", content_bits), ("rope_bits", rope_bits)):
        if bits not in BITS:
            reasons.append(f"{name} is {bits}, the kernels know {', '.join(map(str, BITS))}")
    return reasons


def _unsupported_in_attention(
    kv_lora_rank: int, qk_rope_head_dim: int, content_bits: int, rope_bits: int
) -> list[str]:
    reasons = []
    codes_a_word = {2: 8, 3: 8, 4: 4}.get(content_bits, 2)
    least = max(GROUP, 16 * codes_a_word)  # a matrix product has 16 terms or more
    if not least <= kv_lora_rank <= MAX_RANK or kv_lora_rank & (kv_lora_rank - 1):
        reasons.append(
            f"kv_lora_rank is {kv_lora_rank}, not a power of two from {least} to {MAX_RANK}"
        )
    if qk_rope_head_dim < 16 or qk_rope_head_dim & (qk_rope_head_dim - 1):
        reasons.append(f"qk_rope_head_dim is {qk_rope_head_dim}, not a power of two from 16 on")
    elif qk_rope_head_dim > GROUP and rope_bits != 16:
        reasons.append(f"qk_rope_head_dim is {qk_rope_head_dim}, more than one group of {GROUP}")
    if content_bits == 16:
        reasons.append("the latent has 16 bits: attention over a BF16 cache is not its purpose")
    return reasons


def _refuse(reasons: list[str], where: str) -> None:
    if reasons:
        raise KernelUnavailableError(
            "no kernel for this cache format",
            where=where,
            expected="a format that the kernels know",
            got="; ".join(reasons),
            next_step="choose another scheme, or use the cache of the Hugging Face engine",
        )
