"""What is kept of one attention layer while windows run through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quantmla.errors import CalibrationError


@dataclass(frozen=True)
class LayerCapture:
    """Activations and weights of one cached MLA attention; n windows of T tokens.

    Args:
        layer: cache layer index.
        prefix: checkpoint prefix of the attention, for messages.
        latent_unit [n, T, R, float32]: latent after the norm without its weight, times the latent
            scale of the family, so that the cached content is `latent_unit * gamma`.
        k_rope [n, T, P, float32]: key after RoPE, in the channel order of the cache.
        q_nope [n, H, T, N, storage dtype]: queries of the content path.
        q_rope [n, H, T, P, storage dtype]: queries after RoPE, in the order of `k_rope`.
        scaling: softmax scale.
        kv_b [H, N + V, R, float32]: up-projection.
        o_proj [D, H * V, float32]: output projection.
        o_bias [D, float32]: its bias, or None.
        gamma [R, float32]: norm weight.
    """

    layer: int
    prefix: str
    latent_unit: torch.Tensor
    k_rope: torch.Tensor
    q_nope: torch.Tensor
    q_rope: torch.Tensor
    scaling: float
    kv_b: torch.Tensor
    o_proj: torch.Tensor
    o_bias: torch.Tensor | None
    gamma: torch.Tensor


class Recorder:
    """Collects one attention module's queries, RoPE key and unit latent, window by window.

    Args:
        module: transformers attention module; each forward pass holds one window.
        prefix: its checkpoint prefix, which names the layer in errors.
        eps: epsilon of the latent norm.
        latent_scale: factor of the family on the normed latent.
        windows_shape: (windows, tokens).
        storage_dtype: dtype of the stored queries.
        limit: largest magnitude that may occur.
    """

    def __init__(
        self,
        module: nn.Module,
        prefix: str,
        eps: float,
        latent_scale: float,
        windows_shape: tuple[int, int],
        storage_dtype: torch.dtype,
        limit: float,
    ) -> None:
        n, tokens = windows_shape
        heads, rope_dim = module.num_heads, module.qk_rope_head_dim
        self.module, self.prefix, self.limit = module, prefix, limit
        self.eps, self.latent_scale = eps, latent_scale
        self.nope_dim = module.qk_nope_head_dim
        self.latent_unit = torch.empty(n, tokens, module.kv_lora_rank)
        self.k_rope = torch.empty(n, tokens, rope_dim)
        self.q_nope = torch.empty(n, heads, tokens, self.nope_dim, dtype=storage_dtype)
        self.q_rope = torch.empty(n, heads, tokens, rope_dim, dtype=storage_dtype)
        self.scaling = 1.0
        self.seen = 0
        module.kv_a_layernorm.register_forward_pre_hook(self._see_latent)
        module.quantmla_record = self._see_attention

    def _see_latent(self, _norm: nn.Module, args: tuple) -> None:
        latent = args[0][0].float()  # [T, R]
        check_finite(latent, self.limit, self.prefix, "latent before its norm")
        unit = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + self.eps)
        self.latent_unit[self.seen] = unit * self.latent_scale

    def _see_attention(self, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        check_finite(query, self.limit, self.prefix, "query")
        check_finite(key, self.limit, self.prefix, "key")
        self.q_nope[self.seen] = query[0, ..., : self.nope_dim]
        self.q_rope[self.seen] = query[0, ..., self.nope_dim :]
        self.k_rope[self.seen] = key[0, 0, :, self.nope_dim :]  # one RoPE key serves all heads
        self.scaling = float(scaling)
        self.seen += 1

    def finish(self) -> LayerCapture:
        """Return what was seen, with float32 copies of the weights that turn it into an output."""
        module, bias = self.module, self.module.o_proj.bias
        kv_b = _weight(module.kv_b_proj.weight)
        return LayerCapture(
            layer=module.layer_idx,
            prefix=self.prefix,
            latent_unit=self.latent_unit,
            k_rope=self.k_rope,
            q_nope=self.q_nope,
            q_rope=self.q_rope,
            scaling=self.scaling,
            kv_b=kv_b.view(module.num_heads, -1, kv_b.shape[-1]),
            o_proj=_weight(module.o_proj.weight),
            o_bias=None if bias is None else _weight(bias),
            gamma=_weight(module.kv_a_layernorm.weight),
        )


def check_finite(x: torch.Tensor, limit: float, where: str, what: str) -> None:
    """Raise CalibrationError when a tensor holds a NaN or a magnitude beyond `limit`."""
    peak = float(x.abs().max())
    if not peak <= limit:  # also true for NaN
        raise CalibrationError(
            f"a value does not fit during capture: {what}",
            where=where,
            expected=f"finite numbers of magnitude at most {limit:g}",
            got=f"{peak:g}",
            next_step="run in bfloat16 or float32, and look for NaN in the weights of this layer",
        )


def _weight(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True)
