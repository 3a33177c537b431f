"""The ops of the paged cache, as torch sees them: `torch.ops.quantmla.write` and `.gather`.

Every op checks its arguments once and then calls its Triton kernel, or its reference in plain
torch where Triton does not run (`support.implementation` says which, and why). Importing this
module does not import triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.kernels import paged_reference
from quantmla.kernels.checks import check_gather, check_write
from quantmla.kernels.library import current_gpu, op
from quantmla.kernels.support import implementation


def _fake_write(*_) -> None:
    return None


def _fake_gather(pages, block_table, starts, ends, n_tokens, page_tokens, rank, rope, *_) -> Tensor:
    shape = (block_table.shape[0], n_tokens, rank + rope)
    return pages.new_empty(shape, dtype=torch.bfloat16)


@op(_fake_write, mutates_args=("pages", "rows", "nonfinite"))
def write(
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
    rope_order: Tensor | None = None,
    rope_feedback: Tensor | None = None,
) -> None:
    """Quantise, pack and store new tokens of one cache layer, and keep their BF16 rows.

    Shifts of a checkpoint are not applied here: latents and keys come without them, and attention
    adds the content shift to its output. Numbers are rounded to BF16 first. NaN and Inf are
    replaced as docs/layout.md says; in BF16 rows an infinity becomes the largest finite magnitude
    of its row. A slot outside the pool writes nothing at all, a row slot outside `rows` no BF16
    row. Two tokens of one call must not share a slot.

    Args:
        latent [S, R, bf16, fp16 or fp32]: latents after the norm; rows may be strided.
        k_rope [S, P, as latent]: keys after RoPE, in cache order; rows may be strided.
        pages [n_blobs, page_bytes, uint8]: pool of 64-token blobs; blobs may be strided.
        rows [n_slots, sink_tokens + ring_tokens, R+P, bf16]: BF16 rows of the request slots.
        slot_mapping [S, int64]: token index in the pool, -1 for none.
        positions [S, int32]: position of the token in its sequence.
        row_slots [S, int32]: request slot of the token.
        seq_ends [S, int32]: length of its sequence after this call; only the last ring_tokens
            tokens before it write a ring row.
        nonfinite [1, int64]: counter of NaN and Inf among the written tokens.
        content_clip, rope_clip [G, fp32]: clip ratios in (0, 1], or None.
        content_bits, rope_bits: 2, 3, 4, 8, or 16 for BF16 rows.
        sink_tokens [tokens]: of the policy.
        rope_order [P, int32]: channels of the key in the order of their coding, to round it with
            error feedback; None for plain rounding.
        rope_feedback [P, P, fp32]: row n is the share of the error of channel rope_order[n] that
            each channel gives way by, 0 for those coded before (`quant.feedback`).
    Raises: KernelUnavailableError for a format without kernels, CacheError for wrong tensors.
    Source: own; docs/layout.md.
    """
    inputs = (latent, k_rope, pages, rows, slot_mapping, positions, row_slots, seq_ends, nonfinite)
    settings = (content_clip, rope_clip, content_bits, rope_bits, sink_tokens)
    settings += (rope_order, rope_feedback)
    check_write(*inputs, *settings)
    if implementation(latent.device)[0] == "reference":
        paged_reference.write(*inputs, *settings)
        return
    from quantmla.kernels.write import launch

    with current_gpu(latent.device):
        launch(*inputs, *settings)


@op(_fake_gather)
def gather(
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
) -> Tensor:
    """Read packed tokens of one cache layer back as BF16 rows.

    Args:
        pages [n_blobs, page_bytes, uint8]: pool of 64-token blobs; blobs may be strided.
        block_table [B, max_pages, int32]: pages of each sequence; entries that are not needed may
            hold anything.
        starts, ends [B, int32]: positions to read are starts[b] .. ends[b] - 1.
        n_tokens [tokens]: rows to return for each sequence.
        page_tokens [64, 128 or 256 tokens]: size of a page.
        kv_lora_rank, qk_rope_head_dim [channels]: R and P.
        content_bits, rope_bits: 2, 3, 4, 8, or 16 for BF16 rows.
    Returns: rows [B, n_tokens, R+P, bf16]; row i of sequence b is position starts[b] + i, and 0
        from ends[b] on, as it is for a page that is not in the pool.
    Raises: KernelUnavailableError for a format without kernels, CacheError for wrong tensors.
    Source: own; docs/layout.md.
    """
    tensors = (pages, block_table, starts, ends)
    sizes = (n_tokens, page_tokens, kv_lora_rank, qk_rope_head_dim, content_bits, rope_bits)
    check_gather(*tensors, *sizes)
    if implementation(pages.device)[0] == "reference":
        return paged_reference.gather(*tensors, *sizes)
    from quantmla.kernels.gather import launch

    with current_gpu(pages.device):
        return launch(*tensors, *sizes)
