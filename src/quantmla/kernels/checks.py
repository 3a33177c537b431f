"""Arguments of the ops: everything that is wrong with a call, in one error."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantmla.cache.layout import PAGE_ALIGN_BYTES
from quantmla.cache.pools import PAGE_TOKENS_CHOICES
from quantmla.errors import CacheError
from quantmla.kernels.support import page_layout

INPUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_write(
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
    rope_order: Tensor | None,
    rope_feedback: Tensor | None,
) -> None:
    """Refuse arguments of `ops.write` that its kernel would misread; looks at no values.

    Args: those of `ops.write`.
    Raises: KernelUnavailableError or CacheError, with every problem.
    Source: own.
    """
    if latent.dim() != 2 or k_rope.dim() != 2:
        wrong = [
            f"latent {list(latent.shape)} and k_rope {list(k_rope.shape)} are not [S, channels]"
        ]
        refuse("write", wrong)
    (tokens, rank), rope = latent.shape, k_rope.shape[1]
    page_bytes, content_groups, rope_groups = _sizes(rank, rope, content_bits, rope_bits)
    device, wrong = latent.device, []
    expect(wrong, "latent", latent, device, INPUT_TYPES, (tokens, rank))
    expect(wrong, "k_rope", k_rope, device, INPUT_TYPES, (tokens, rope))
    if latent.dtype != k_rope.dtype:
        wrong.append(f"latent is {latent.dtype} and k_rope {k_rope.dtype}")
    expect_pages(wrong, pages, device, page_bytes)
    expect(wrong, "rows", rows, device, (torch.bfloat16,), (None, None, rank + rope))
    if rows.dim() == 3 and not 0 <= sink_tokens <= rows.shape[1]:
        wrong.append(f"sink_tokens is {sink_tokens}, rows has {rows.shape[1]} rows a slot")
    expect(wrong, "slot_mapping", slot_mapping, device, (torch.int64,), (tokens,))
    expect(wrong, "positions", positions, device, (torch.int32,), (tokens,))
    expect(wrong, "row_slots", row_slots, device, (torch.int32,), (tokens,))
    expect(wrong, "seq_ends", seq_ends, device, (torch.int32,), (tokens,))
    expect(wrong, "nonfinite", nonfinite, device, (torch.int64,), (1,))
    for name, clip, groups in (
        ("content_clip", content_clip, content_groups),
        ("rope_clip", rope_clip, rope_groups),
    ):
        if clip is not None and groups == 0:
            wrong.append(f"{name} is given for a path of 16 bits, which is not quantised")
        elif clip is not None:
            expect(wrong, name, clip, device, (torch.float32,), (groups,))
    if (rope_order is None) != (rope_feedback is None):
        wrong.append("rope_order and rope_feedback are given one without the other")
    elif rope_order is not None and rope_groups == 0:
        wrong.append("rope_feedback is given for a path of 16 bits, which is not quantised")
    elif rope_order is not None:
        expect(wrong, "rope_order", rope_order, device, (torch.int32,), (rope,))
        expect(wrong, "rope_feedback", rope_feedback, device, (torch.float32,), (rope, rope))
        if not (rope_order.is_contiguous() and rope_feedback.is_contiguous()):
            wrong.append("rope_order or rope_feedback is not contiguous")
    refuse("write", wrong)


def check_gather(
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
) -> None:
    """Refuse arguments of `ops.gather` that its kernel would misread; looks at no values.

    Args: those of `ops.gather`.
    Raises: KernelUnavailableError or CacheError, with every problem.
    Source: own.
    """
    page_bytes, _, _ = _sizes(kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    device, wrong = pages.device, []
    expect_pages(wrong, pages, device, page_bytes)
    expect_block_table(wrong, block_table, device, page_tokens)
    batch = block_table.shape[0] if block_table.dim() == 2 else None
    for name, tensor in (("starts", starts), ("ends", ends)):
        expect(wrong, name, tensor, device, (torch.int32,), (batch,))
    if n_tokens < 0:
        wrong.append(f"n_tokens is {n_tokens}")
    refuse("gather", wrong)


def expect_block_table(
    wrong: list[str], block_table: Tensor, device: torch.device, page_tokens: int
) -> None:
    """Note what is wrong with a block table [B, max_pages, int32] and the size of its pages.

    Args:
        wrong: problems so far; appended to.
        block_table: pages of each sequence.
        device: where it must be.
        page_tokens [tokens]: size of a page.
    Source: own.
    """
    expect(wrong, "block_table", block_table, device, (torch.int32,), (None, None))
    if page_tokens not in PAGE_TOKENS_CHOICES:
        choices = ", ".join(map(str, PAGE_TOKENS_CHOICES))
        wrong.append(f"page_tokens is {page_tokens}, not one of {choices}")


@lru_cache(maxsize=256)
def _sizes(rank: int, rope: int, content_bits: int, rope_bits: int) -> tuple[int, int, int]:
    """Bytes of a blob and groups of both paths; refuses formats without a kernel."""
    layout = page_layout(rank, rope, content_bits, rope_bits)
    return layout.page_bytes, layout.content_groups, layout.rope_groups


def expect_pages(wrong: list[str], pages: Tensor, device: torch.device, page_bytes: int) -> None:
    """Note what is wrong with a pool [n_blobs, page_bytes, uint8].

    Args:
        wrong: problems so far; appended to.
        pages: the pool; blobs may be strided.
        device: where it must be.
        page_bytes: of the layout.
    Source: own.
    """
    expect(wrong, "pages", pages, device, (torch.uint8,), (None, page_bytes))
    if pages.dim() != 2:
        return
    stride_bytes = pages.stride(0)
    if pages.shape[0] > 1 and (stride_bytes < page_bytes or stride_bytes % PAGE_ALIGN_BYTES):
        wrong.append(
            f"pages are {stride_bytes} bytes apart, not a multiple of {PAGE_ALIGN_BYTES} from"
            f" {page_bytes} on"
        )
    if pages.data_ptr() % 16:  # the widest access of a kernel
        wrong.append("pages do not start at a multiple of 16 bytes")


def expect(
    wrong: list[str],
    name: str,
    tensor: Tensor,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> None:
    """Note what differs from a shape (None: any size), and a last dimension with gaps.

    Args:
        wrong: problems so far; appended to.
        name, tensor: what is looked at.
        device, dtypes, shape: what is expected.
    Source: own.
    """
    fits = len(shape) == tensor.dim() and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    dense = tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if fits and dense and tensor.dtype in dtypes and tensor.device == device:
        return
    if tensor.device != device:
        wrong.append(f"{name} is on {tensor.device}, the first tensor on {device}")
    if tensor.dtype not in dtypes:
        wrong.append(f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        wrong.append(f"{name} has the shape {list(tensor.shape)}, not [{wanted}]")
    elif not dense:
        wrong.append(f"{name} has gaps in its last dimension (stride {tensor.stride(-1)})")


def refuse(op: str, wrong: list[str]) -> None:
    """Raise one error for all problems of a call.

    Args:
        op: name of the op.
        wrong: problems; nothing happens if there are none.
    Raises: CacheError.
    Source: own.
    """
    if wrong:
        raise CacheError(
            "these tensors do not fit the op",
            where=f"quantmla::{op}",
            expected="the shapes, types and strides of its documentation",
            got="; ".join(wrong),
        )
