"""The packed attention by the kernels of `quantmla.kernels`: nothing of the history is unpacked.

Each call writes its tokens with one op and attends to them with another. A long prompt takes
several such rounds, which changes nothing in strict mode and bounds the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from quantmla.cache.latent import LatentLayer
from quantmla.cache.policy import packed_pairs
from quantmla.cache.recent import finite_rows
from quantmla.engine.rounds import Round, round_of
from quantmla.errors import KernelUnavailableError
from quantmla.kernels.attention import decode, prefill
from quantmla.kernels.ops import write
from quantmla.kernels.support import implementation, unsupported_in_attention

Kernels = Literal["auto", "never", "require"]

MOST_DECODE_QUERIES = 8
CHUNK_TOKENS = 4096  # tokens of a round: their queries in the latent are 67 MB for 16 heads of 512
QUERY_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def choose(
    kernels: Kernels,
    layer: LatentLayer,
    query: Tensor,
    chunk_tokens: int | None = None,
    rope_online: str | None = None,
) -> tuple[str, list[str]]:
    """Say what runs the attention of a call, and every reason against the kernels.

    Args:
        kernels: "auto" takes compiled kernels where they can run, "require" refuses anything else
            but Triton's interpreter, "never" takes plain torch.
        layer: cache layer.
        query: queries of the call.
        chunk_tokens, rope_online: as in HandOff.
    Returns: "triton", "interpreter" or "torch", and the reasons; none if kernels run.
    Raises: KernelUnavailableError with every reason if kernels are required.
    Source: own.
    """
    if kernels == "never":
        return "torch", ["kernels='never'"]
    name, reasons = implementation(query.device)
    if name == "interpreter":
        reasons = [] if kernels == "require" else ["Triton's interpreter runs only where required"]
    reasons = reasons + unsupported_in_attention(layer.layout)
    if layer.row_dtype != torch.bfloat16:
        reasons.append(f"the recent rows are {layer.row_dtype}, the kernels keep torch.bfloat16")
    rounded = kernels == "auto" and query.dtype == torch.float32
    if rounded or query.dtype not in QUERY_TYPES:
        reasons.append(f"the queries are {query.dtype}, the kernels round them to torch.bfloat16")
    if chunk_tokens is not None:
        reasons.append("prefill is 'fast', the kernels know strict mode")
    if rope_online is not None:
        reasons.append(f"rope_online is {rope_online!r}")
    if not reasons:
        return name, []
    if kernels == "require":
        raise KernelUnavailableError(
            "the kernels cannot run the attention of this cache",
            where=f"cache layer {layer.layer_idx}",
            expected="a GPU, a scheme and settings that they know, since kernels='require'",
            got="; ".join(reasons),
            next_step="change what is named, or create the cache with kernels='auto'",
        )
    return "torch", reasons


def attend(
    weight: Tensor,
    query: Tensor,
    layer: LatentLayer,
    latent: Tensor,
    k_rope: Tensor,
    mask: Tensor | None,
    scale: float,
    given_back: Callable[[Tensor], Tensor] = lambda out: out,
) -> Tensor:
    """Store the new rows of a layer and attend to all of it.

    Args:
        weight [H, N+V, R]: of kv_b_proj, keys first.
        query [B, H, S, N+P]: queries, rotated.
        layer: LatentLayer for which `choose` chose kernels.
        latent [B, S, R], k_rope [B, S, P]: new rows.
        mask [B, columns + S] or None: as in `LatentLayer.append`.
        scale: softmax scale.
        given_back: adds to an output in the latent what was taken from the rows.
    Returns: output [B, S, H, V, dtype of query]; 0 on padding.
    Raises: CacheError as `LatentLayer.append`.
    Source: algorithms.md sections 1.1 and 6.
    """
    device, (batch, _, tokens, _) = query.device, query.shape
    scheme, rank, rope = layer.layout.scheme, latent.shape[-1], k_rope.shape[-1]
    start, count, order = layer.admit(latent, k_rope, mask)
    runs = tuple(start), tuple(count)
    layer.packed_rows_read += _pairs(*runs, scheme.sink_tokens, scheme.window_tokens)
    rows = torch.cat([latent, k_rope], -1).to(layer.row_dtype)
    queries = query.transpose(1, 2)  # [B, S, H, N+P]
    up_key, up_value = weight.tensor_split([query.shape[-1] - rope], 1)
    decodes = order is None and tokens <= min(MOST_DECODE_QUERIES, layer.slack_tokens + 1)
    step = tokens if decodes else max(1, CHUNK_TOKENS // batch)
    output = query.new_zeros(*queries.shape[:3], up_value.shape[1])
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for first in range(0, max(count), step):
            columns = slice(first, min(first + step, max(count)))
            here = round_of(*runs, order, columns, layer.pages.shape[1], device)
            new = _pick(rows, here, columns)  # [n, R+P]
            old = None if decodes else layer.recent.rows.clone()
            _store(layer, new, here, rank)
            absorbed = _absorb(_pick(queries, here, columns), up_key)
            if decodes:
                absorbed = [part.unflatten(0, (batch, tokens)) for part in absorbed]
                out = _read(decode, layer, absorbed, here, weight.dtype, scale=scale)
            else:
                given = {"new_rows": finite_rows(new), "starts": here.starts}
                given |= {"most_tokens": here.most, "scale": scale}
                out = _read(prefill, layer, absorbed, here, weight.dtype, old, **given)
            values = _expand(given_back(out), up_value).to(query.dtype)  # [n, H, V]
            if here.picked is not None:
                output[here.picked] = values
            else:
                output[:, columns] = values.unflatten(0, (batch, -1))
    return output


@lru_cache(maxsize=8)
def _pairs(start: tuple[int, ...], count: tuple[int, ...], sink: int, window: int) -> int:
    """(query, packed key) pairs of a call; the same for all layers of a model."""
    return sum(packed_pairs(s, n, sink, window) for s, n in zip(start, count, strict=True))


def _pick(values: Tensor, here: Round, columns: slice) -> Tensor:
    """Entries [n, ..] of the tokens of a round, out of [B, S, ..]."""
    return values[:, columns].flatten(0, 1) if here.picked is None else values[here.picked]


def _store(layer: LatentLayer, new: Tensor, here: Round, rank: int) -> None:
    scheme, counter = layer.layout.scheme, layer.nonfinite
    if not isinstance(counter, Tensor) or counter.device != new.device or counter.dim() != 1:
        with torch.inference_mode(False):
            counter = torch.full((1,), int(counter), dtype=torch.int64, device=new.device)
        layer.nonfinite = counter
    write(
        new[:, :rank],
        new[:, rank:],
        layer.pages.view(-1, layer.layout.page_bytes),
        layer.recent.rows,
        here.slots,
        here.positions,
        here.sequences,
        here.ends,
        counter,
        content_bits=scheme.content_bits,
        rope_bits=scheme.rope_bits,
        sink_tokens=scheme.sink_tokens,
        **layer.writer_on(new.device),
    )


def _absorb(queries: Tensor, up_key: Tensor) -> list[Tensor]:
    """Queries [n, H, N+P] to [n, H, R] and [n, H, P], both bf16."""
    (n, heads, _), (_, nope, rank) = queries.shape, up_key.shape
    queries = queries.to(up_key.dtype)
    latent = queries.new_empty(n, heads, rank)
    torch.bmm(queries[..., :nope].transpose(0, 1), up_key, out=latent.transpose(0, 1))
    return [part.to(torch.bfloat16).contiguous() for part in (latent, queries[..., nope:])]


def _read(
    op: Callable, layer: LatentLayer, absorbed: list[Tensor], here: Round, dtype: torch.dtype,
    rows: Tensor | None = None, **given,
) -> Tensor:  # fmt: skip
    """Run an attention op; out [n, H, R] in a type that it knows."""
    scheme = layer.layout.scheme
    out, _ = op(
        *absorbed,
        pages=layer.pages.view(-1, layer.layout.page_bytes),
        rows=layer.recent.rows if rows is None else rows,
        block_table=here.table,
        seq_lens=here.lengths,
        row_slots=here.row_slots,
        content_bits=scheme.content_bits,
        rope_bits=scheme.rope_bits,
        sink_tokens=scheme.sink_tokens,
        window_tokens=scheme.window_tokens,
        out_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
        **given,
    )
    return out.flatten(0, -3)


def _expand(out: Tensor, up_value: Tensor) -> Tensor:
    """Attention output [n, H, R] to values [n, H, V]."""
    values = out.new_empty(*out.shape[:2], up_value.shape[1], dtype=up_value.dtype)
    weight = up_value.mT
    torch.bmm(out.to(weight.dtype).transpose(0, 1), weight, out=values.transpose(0, 1))
    return values
