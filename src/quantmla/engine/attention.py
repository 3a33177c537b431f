"""The transformers attention function that reads the packed cache.

A stock MLA forward gives the new latents to `cache.update`, expands what comes back to per-head
keys and values and calls the attention function with them. Here `update` hands the new rows over
in a thread-local slot and returns only them; `packed_attention` takes them from the slot, ignores
the expanded ones, stores the rows and attends in the latent: the history is never expanded.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from quantmla.cache.latent import LatentLayer
from quantmla.dims import MLADims
from quantmla.engine import kernel_path
from quantmla.errors import CacheError
from quantmla.kernels.reference import attend
from quantmla.transform.content import hadamard

ATTENTION_NAME = "quantmla"

_slot = threading.local()


class Shifts:
    """Constants that are subtracted from the rows of a layer before they are cached.

    A constant in every key adds the same to all scores of a query, which its softmax does not see;
    the latent is also the value, so attention adds the content shift to its output.

    Args:
        content [R, fp32], rope [P, fp32]: in the coordinates of the cache; None for none.
    Source: algorithms.md section 2.3.
    """

    def __init__(self, content: Tensor | None = None, rope: Tensor | None = None):
        self.content, self.rope = content, rope

    def taken(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [B, S, R] and [B, S, P] without the shifts, fp32 where there is one."""
        compute = torch.promote_types(latent.dtype, torch.float32)
        if self.content is not None:
            self.content = self.content.to(latent.device)
            latent = latent.to(compute) - self.content
        if self.rope is not None:
            self.rope = self.rope.to(k_rope.device)
            k_rope = k_rope.to(compute) - self.rope
        return latent, k_rope

    def given_back(self, out_latent: Tensor) -> Tensor:
        """Return attention output in the latent [.., R] with the content shift."""
        return out_latent if self.content is None else out_latent + self.content.to(out_latent)


@dataclass(frozen=True)
class HandOff:
    """New rows of one layer, on their way from `cache.update` to the attention function.

    Fields:
        layer: LatentLayer that will store them.
        latent [B, S, R], k_rope [B, S, P]: new rows.
        chunk_tokens [tokens]: None for strict mode; in fast mode the length of a chunk.
        rope_online: transform of keys and queries after RoPE, or None.
        kernels: which kernels may run, as in `kernel_path.choose`.
        shifts: taken from the rows, in the coordinates that `rope_online` makes.
    """

    layer: LatentLayer
    latent: Tensor
    k_rope: Tensor
    chunk_tokens: int | None
    rope_online: str | None
    kernels: kernel_path.Kernels = "auto"
    shifts: Shifts = field(default_factory=Shifts)


def use_packed_attention(model: PreTrainedModel) -> str:
    """Switch a model to the attention function that reads the packed cache.

    Args: model: a transformers model of a supported MLA family.
    Returns: the name of the attention implementation that was active; give it to
        `model.set_attn_implementation` to go back.
    Raises: UnsupportedModelError for a refused family; CacheError if transformers cannot switch.
    Source: own.
    """
    MLADims.from_config(model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise CacheError(
            "the attention of this model cannot be replaced",
            where=type(model).__name__,
            expected="a model that calls the attention interface of transformers",
            got=model.config._attn_implementation,
            next_step="load the model with attn_implementation='eager', without remote code",
        )
    return before


def offer(handoff: HandOff) -> None:
    """Put new rows into the slot of this thread.

    Raises: CacheError if the rows before were never read.
    """
    require_empty_slot()
    _slot.handoff = handoff


def require_empty_slot() -> None:
    """Refuse to go on, and empty the slot, if rows were never read.

    Raises: CacheError: another attention function is active, or a forward stopped half-way.
    """
    stale = _empty_slot()
    if stale is not None:
        raise CacheError(
            "rows were given to the packed cache, but no packed attention read them",
            where=f"cache layer {stale.layer.layer_idx}",
            expected=f"attention implementation {ATTENTION_NAME!r}",
            got="another attention function, or a forward that stopped half-way",
            next_step="call use_packed_attention(model) and start with a new cache",
        )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """Store the new rows of this layer and attend to the packed cache (attention interface).

    Args:
        module: the MLA attention module; its kv_b_proj is read.
        query [B, H, S, N+P]: queries, rotated.
        key, value: new rows expanded by the module; not read.
        attention_mask [B, T+S, bool] or None: 2-D padding mask, as `packed_mask` returns it.
        scaling: softmax scale.
        dropout: must be 0.
    Returns: output [B, S, H, V, dtype of query], None.
    Raises: CacheError if no packed cache was given, or the call asks for what it cannot do;
        KernelUnavailableError if kernels are required and cannot run.
    Source: algorithms.md section 1.1, absorbed form.
    """
    handoff = _take(module)
    _check_call(module, attention_mask, dropout, kwargs)
    weight = _up_projection(module, query, handoff)  # [H, N+V, R]
    layer, chunk, turned = handoff.layer, handoff.chunk_tokens, handoff.rope_online
    layer.attention_kernel, _ = kernel_path.choose(handoff.kernels, layer, query, chunk, turned)
    mask = _on_host(attention_mask, layer.layer_idx)
    with torch.no_grad():
        if layer.attention_kernel == "torch":
            return _plain_attention(handoff, weight, query, mask, scaling), None
        rows = handoff.shifts.taken(handoff.latent, handoff.k_rope)
        back = handoff.shifts.given_back
        return kernel_path.attend(weight, query, layer, *rows, mask, scaling, back), None


def _empty_slot() -> HandOff | None:
    handoff = getattr(_slot, "handoff", None)
    _slot.handoff = None
    return handoff


def _take(module: torch.nn.Module) -> HandOff:
    handoff = _empty_slot()
    layer_idx = getattr(module, "layer_idx", None)
    if handoff is None or handoff.layer.layer_idx != layer_idx:
        raise CacheError(
            "the packed attention was called without rows from a packed cache",
            where=f"attention layer {layer_idx}",
            expected="a QuantMLACache as the cache of this call",
            got="no cache or another kind of cache"
            if handoff is None
            else f"rows of cache layer {handoff.layer.layer_idx}",
            next_step="pass **cache.as_kwargs(model) with use_cache=True, or go back with "
            "model.set_attn_implementation('sdpa')",
        )
    return handoff


def _check_call(module, attention_mask: Tensor | None, dropout: float, kwargs: dict) -> None:
    reasons = []
    if module.training or dropout:
        reasons.append("training or dropout: call model.eval()")
    if attention_mask is not None and attention_mask.dim() != 2:
        reasons.append(f"a {attention_mask.dim()}-D mask: pass the 2-D padding mask")
    if kwargs.get("sliding_window") is not None:
        reasons.append("a sliding window")
    if kwargs.get("cu_seq_lens_q") is not None:
        reasons.append("several sequences packed in one row")
    if reasons:
        raise CacheError(
            "the packed attention cannot do what this call asks for",
            where=f"attention layer {module.layer_idx}",
            expected="causal inference with a 2-D padding mask or none",
            got="; ".join(reasons),
        )


def _up_projection(module, query: Tensor, handoff: HandOff) -> Tensor:
    """Weight of kv_b_proj [H, N+V, R]: what makes keys first, then what makes values."""
    weight = module.kv_b_proj.weight
    plain = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
    if not plain or getattr(module.kv_b_proj, "bias", None) is not None:
        raise CacheError(
            "queries cannot be absorbed through this kv_b_proj",
            where=f"attention layer {module.layer_idx}, kv_b_proj",
            expected="a plain floating-point weight without bias",
            got=f"{weight.dtype} on {weight.device}",
            next_step="load the model in bfloat16 or float32, without offloading weights",
        )
    return weight.detach().view(query.shape[1], -1, handoff.latent.shape[-1])


def _on_host(mask: Tensor | None, layer_idx: int) -> Tensor | None:
    """The mask on the host; the first layer of a forward copies it for all of them."""
    if mask is None or mask.device.type == "cpu":
        return mask
    source, copied = getattr(_slot, "mask", (None, None))
    if layer_idx == 0 or source is None or source() is not mask:
        copied = mask.cpu()
        _slot.mask = (weakref.ref(mask), copied)
    return copied


def _plain_attention(
    handoff: HandOff, weight: Tensor, query: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Store the new rows and attend in plain torch, in fp32: output [B, S, H, V]."""
    compute = torch.promote_types(query.dtype, torch.float32)
    k_rope = handoff.k_rope
    nope = query.shape[-1] - k_rope.shape[-1]
    up_key, up_value = weight.to(compute).tensor_split([nope], 1)  # [H, N, R] and [H, V, R]
    q_nope, q_rope = query.to(compute).split([nope, k_rope.shape[-1]], -1)
    if handoff.rope_online is not None:
        turn = hadamard(k_rope.shape[-1]).to(q_rope)
        q_rope, k_rope = q_rope @ turn, k_rope.to(compute) @ turn
    shifted = handoff.shifts.taken(handoff.latent, k_rope)
    rows = handoff.layer.append(*shifted, mask, handoff.chunk_tokens)
    out_latent, _, pairs = attend(q_nope @ up_key, q_rope, rows, scale=scaling, need_lse=False)
    handoff.layer.packed_rows_read += pairs
    out_latent = handoff.shifts.given_back(out_latent.to(compute))
    output = out_latent @ up_value.mT  # [B, H, S, V]
    return output.transpose(1, 2).to(query.dtype).contiguous()


def packed_mask(
    kv_length: int,
    attention_mask: Tensor | None = None,
    mask_function=causal_mask_function,
    **kwargs,
) -> Tensor | None:
    """Let the 2-D padding mask through (mask interface): the packed attention is causal by itself.

    Args:
        kv_length [tokens]: cached and new columns.
        attention_mask [B, T+S, bool] or None.
        mask_function: must be the plain causal one.
    Returns: attention_mask.
    Raises: CacheError for any other pattern, or a mask of another length.
    Source: own.
    """
    problem = None
    if mask_function is not causal_mask_function:
        problem = "a mask pattern other than plain causal"
    elif attention_mask is not None and attention_mask.shape[-1] != kv_length:
        problem = f"a mask of {attention_mask.shape[-1]} columns for {kv_length} tokens"
    if problem is not None:
        raise CacheError(
            "the packed attention cannot follow this mask",
            where="attention_mask",
            expected=f"None or a 2-D mask of {kv_length} columns, cached tokens included",
            got=problem,
        )
    return attention_mask


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)
