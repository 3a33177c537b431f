"""Attention over the paged cache, as torch sees it: `torch.ops.quantmla.decode` and `.prefill`.

Queries are absorbed through kv_b_proj, so all heads share one key of R+P channels and one value of
R channels. Both ops follow strict mode: query i reads BF16 keys where j < sink_tokens or
j > i - window_tokens and dequantised keys elsewhere, in one softmax. Importing this module does not
import triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantmla.errors import CacheError
from quantmla.kernels import attention_reference
from quantmla.kernels.attention_checks import check_decode, check_prefill
from quantmla.kernels.library import current_gpu, op
from quantmla.kernels.support import implementation


def _fake_decode(
    q_latent, q_rope, pages, rows, block_table, seq_lens, row_slots, scale, content_bits, rope_bits,
    sink_tokens, window_tokens, page_tokens=64, split_tokens=0, out_dtype=torch.bfloat16,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake_results(q_latent, out_dtype, q_rope, pages, rows, block_table, seq_lens, row_slots)


def _fake_prefill(
    q_latent, q_rope, new_rows, pages, rows, block_table, seq_lens, row_slots, starts, scale,
    content_bits, rope_bits, sink_tokens, window_tokens, most_tokens, page_tokens=64,
    out_dtype=torch.bfloat16,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    others = (q_rope, new_rows, pages, rows, block_table, seq_lens, row_slots, starts)
    return _fake_results(q_latent, out_dtype, *others)


def _fake_results(q_latent: Tensor, out_dtype: torch.dtype, *others: Tensor):
    if any(tensor.device != q_latent.device for tensor in others):  # torch may pick a fake then
        raise CacheError(
            "the tensors of an attention op are on several devices",
            where="quantmla::decode or prefill",
            expected=f"all of them on {q_latent.device}",
            got=", ".join(sorted({str(tensor.device) for tensor in others})),
        )
    lse = q_latent.new_empty(q_latent.shape[:-1], dtype=torch.float32)
    return torch.empty_like(q_latent, dtype=out_dtype), lse


@op(_fake_decode)
def decode(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    scale: float,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    page_tokens: int = 64,
    split_tokens: int = 0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to all of it; two launches, none a copy.

    Args:
        q_latent [B, S, H, R, bf16]: queries absorbed through kv_b_proj; query s of sequence b is at
            position seq_lens[b] - S + s.
        q_rope [B, S, H, P, bf16]: rotated queries.
        pages [n_blobs, page_bytes, uint8]: pool; every token of a sequence is in it.
        rows [n_slots, sink_tokens + ring_tokens, R+P, bf16]: BF16 rows of the request slots, with
            ring_tokens >= window_tokens + S - 1.
        block_table [B, max_pages, int32]: pages of each sequence; entries that are not needed may
            hold anything.
        seq_lens [B, int32]: tokens of each sequence, new ones included; 0 for padding.
        row_slots [B, int32]: request slots; those of padding must be inside `rows`.
        scale: softmax scale.
        content_bits, rope_bits: code widths of the pool.
        sink_tokens, window_tokens [tokens]: of the policy.
        page_tokens [64, 128 or 256 tokens]: size of a page.
        split_tokens [tokens]: tokens of a part, a multiple of 64; the result of a sequence is then
            the same to the last bit in any batch. 0 lets the cost model choose.
        out_dtype: bfloat16 or float32.
    Returns: out [B, S, H, R, out_dtype] and lse [B, S, H, fp32, base e]; 0 and -inf where a query
        has no token.
    Raises: KernelUnavailableError for a format without kernels, CacheError for wrong tensors.
    Source: own; algorithms.md section 6.
    """
    tensors = (q_latent, q_rope, pages, rows, block_table, seq_lens, row_slots)
    formats = (content_bits, rope_bits, sink_tokens, window_tokens, page_tokens)
    check_decode(*tensors, *formats, split_tokens, out_dtype)
    if implementation(q_latent.device)[0] == "reference":
        return attention_reference.decode(*tensors, scale, *formats, split_tokens, out_dtype)
    from quantmla.kernels.decode import launch

    with current_gpu(q_latent.device):
        return launch(*tensors, scale, *formats, split_tokens, out_dtype)


@op(_fake_prefill)
def prefill(
    q_latent: Tensor,
    q_rope: Tensor,
    new_rows: Tensor,
    pages: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    starts: Tensor,
    scale: float,
    content_bits: int,
    rope_bits: int,
    sink_tokens: int,
    window_tokens: int,
    most_tokens: int,
    page_tokens: int = 64,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Attend causally from any number of new tokens of each sequence, in strict mode.

    Args:
        q_latent [S, H, R, bf16]: absorbed queries of all sequences, one sequence after the other.
        q_rope [S, H, P, bf16]: rotated queries.
        new_rows [S, R+P, bf16]: latents and rotated keys of the new tokens.
        pages [n_blobs, page_bytes, uint8]: pool; the new tokens are already in it.
        rows [n_slots, sink_tokens + ring_tokens, R+P, bf16]: BF16 rows as they were before the
            new tokens were written (a clone made before the write), with ring_tokens >=
            window_tokens - 1.
        block_table [B, max_pages, int32], seq_lens [B, int32], row_slots [B, int32]: as in decode.
        starts [B+1, int32]: first new token of each sequence in S, and their end.
        scale: softmax scale.
        content_bits, rope_bits, sink_tokens, window_tokens, page_tokens: as in decode.
        most_tokens [tokens]: new tokens of the sequence that has most, or a larger number; tokens
            of a sequence beyond it get no result.
        out_dtype: bfloat16 or float32.
    Returns: out [S, H, R, out_dtype] and lse [S, H, fp32, base e].
    Raises: KernelUnavailableError for a format without kernels, CacheError for wrong tensors.
    Source: own; algorithms.md section 6.3.
    """
    tensors = (q_latent, q_rope, new_rows, pages, rows, block_table, seq_lens, row_slots, starts)
    formats = (content_bits, rope_bits, sink_tokens, window_tokens, most_tokens, page_tokens)
    check_prefill(*tensors, *formats, out_dtype)
    if implementation(q_latent.device)[0] == "reference":
        return attention_reference.prefill(*tensors, scale, *formats, out_dtype)
    from quantmla.kernels.prefill import launch

    with current_gpu(q_latent.device):
        return launch(*tensors, scale, *formats, out_dtype)
