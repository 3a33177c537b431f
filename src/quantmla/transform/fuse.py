"""Fold a layer's transforms into its weights, and check that the layer computes the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from quantmla.transform.rope import Pairing, apply_pairs, pair_indices

if TYPE_CHECKING:
    from quantmla.dims import MLADims
    from quantmla.transform.layer import LayerTransform

Weights = dict[str, torch.Tensor]
CHECK_TOKENS = 16
CHECK_ROPE_BASE = 1e4
CHECK_TOKEN_STRIDE = 7  # positions 0, 7, 14, ...: distances long enough to turn the slow pairs too


def changed_keys(keys: Iterable[str], transform: LayerTransform) -> set[str]:
    """Return which of a layer's tensors (keys of `fuse_layer`) the transforms change."""
    changed = set()
    if not transform.content_identity:
        changed |= {"kv_a_norm", "kv_b"}
    if transform.content_rotation is not None:
        changed |= {"kv_a", "kv_a_bias"}
    if not transform.rope_identity:
        changed |= {"kv_a", "kv_a_bias", "q"}
    return changed & set(keys)


def fuse_layer(
    weights: Weights,
    dims: MLADims,
    pairing: Pairing,
    transform: LayerTransform,
    *,
    cast: bool = True,
) -> Weights:
    """Return the tensors of one attention layer that the transforms change, in new coordinates.

    A scalar that a family multiplies the normed latent with commutes with all of this.

    Args:
        weights: HF (out x in) tensors `kv_a` [R+P, D], `kv_a_norm` [R], `kv_b` [H(N+V), R],
            `q` [H(N+P), in] and optionally `kv_a_bias` [R+P].
        dims: the model's dimensions.
        pairing: RoPE pairing in the weights (not in the cache).
        transform: what to fold in; an identity path leaves its tensors out of the result.
        cast: store each result in the dtype of its source tensor; False keeps float64.

    Returns:
        Changed tensors only, under the same keys. All arithmetic is float64.

    Raises:
        CalibrationError: the transform has a matrix that weights cannot hold.

    Source: QuantMLA study, content and RoPE transforms.
    """
    transform.check_foldable()
    changed: Weights = {}
    if not transform.content_identity:
        _fuse_content(weights, dims.kv_lora_rank, transform, changed, cast)
    if not transform.rope_identity:
        _fuse_rope(weights, dims, pairing, transform, changed)
    if not cast:
        return changed
    return {name: tensor.to(weights[name].dtype) for name, tensor in changed.items()}


def _fuse_content(
    weights: Weights, rank: int, transform: LayerTransform, changed: Weights, cast: bool
) -> None:
    scale, rotation = transform.content_scale, transform.content_rotation
    scale = torch.ones(rank, dtype=torch.float64) if scale is None else scale.double()
    if cast:
        # The norm weight is stored rounded; dividing kv_b by the rounded value cancels that error.
        scale = scale.to(weights["kv_a_norm"].dtype).double()
    changed["kv_a_norm"] = scale
    folded = weights["kv_b"].double() * weights["kv_a_norm"].double()  # Wkvb Gamma, [H(N+V), R]
    if rotation is not None:
        rotation = rotation.double()
        folded = folded @ rotation
        for name in ("kv_a", "kv_a_bias"):
            if name in weights:
                rows = weights[name].double()
                changed[name] = torch.cat((rotation.T @ rows[:rank], rows[rank:]))
    changed["kv_b"] = folded / scale


def _fuse_rope(
    weights: Weights, dims: MLADims, pairing: Pairing, transform: LayerTransform, changed: Weights
) -> None:
    def turned(rows: torch.Tensor, inverse_scale: bool) -> torch.Tensor:  # [.., P, in]
        moved = apply_pairs(
            rows.mT, transform.rope_angle, transform.rope_scale, pairing, inverse_scale
        )
        return moved.mT

    for name in ("kv_a", "kv_a_bias", "q"):
        if name not in weights:
            continue
        rows = changed.get(name, weights[name]).double()
        matrix = rows.reshape(rows.shape[0], -1)  # a bias is a matrix with one column
        if name.startswith("kv_a"):
            keep, rope = matrix[: dims.kv_lora_rank], matrix[dims.kv_lora_rank :]
            new = torch.cat((keep, turned(rope, inverse_scale=False)))
        else:
            heads = matrix.unflatten(0, (dims.num_heads, -1))  # [H, N+P, in]
            keep, rope = heads[:, : dims.qk_nope_head_dim], heads[:, dims.qk_nope_head_dim :]
            new = torch.cat((keep, turned(rope, inverse_scale=True)), dim=1)
        changed[name] = new.reshape(rows.shape)


def check_identity(
    weights: Weights, fused: Weights, dims: MLADims, pairing: Pairing, eps: float, seed: int = 0
) -> float:
    """Return the largest relative difference between a layer and its fused form, in float64.

    Content scores, RoPE scores (with RoPE applied) and values of random inputs are compared one by
    one, so that a large part cannot hide an error in a small one.

    Args:
        weights: original tensors, keyed as in `fuse_layer`.
        fused: tensors that replace some of them (missing ones are taken from `weights`).
        dims: the model's dimensions.
        pairing: RoPE pairing in the weights.
        eps: epsilon of the latent norm.
        seed: of the random inputs.

    Returns:
        max over the three parts of ||new - old||_F / ||old||_F.

    Source: own.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        name: torch.randn(
            CHECK_TOKENS, weights[name].shape[1], dtype=torch.float64, generator=generator
        )
        for name in ("kv_a", "q")
    }
    old = _pre_logits(weights, inputs, dims, pairing, eps)
    new = _pre_logits({**weights, **fused}, inputs, dims, pairing, eps)
    pairs = zip(old, new, strict=True)
    errors = torch.stack([(b - a).norm() / a.norm().clamp_min(1e-300) for a, b in pairs])
    return float(errors.max())  # unlike Python's max, never drops a NaN


def _pre_logits(
    weights: Weights, inputs: Weights, dims: MLADims, pairing: Pairing, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return content scores [H, T, T], RoPE scores [H, T, T] and values [T, H, V] in float64."""
    wide = {name: tensor.double() for name, tensor in weights.items()}
    down = inputs["kv_a"] @ wide["kv_a"].T + wide.get("kv_a_bias", 0.0)
    query = inputs["q"] @ wide["q"].T
    latent, k_rope = down.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
    latent = latent * (latent.square().mean(-1, keepdim=True) + eps).rsqrt() * wide["kv_a_norm"]
    expanded = (latent @ wide["kv_b"].T).unflatten(-1, (dims.num_heads, -1))  # [T, H, N+V]
    k_nope, value = expanded.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
    q_nope, q_rope = query.unflatten(-1, (dims.num_heads, -1)).split(
        [dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1
    )
    k_rope = _rotate_positions(k_rope, pairing)
    q_rope = _rotate_positions(q_rope.transpose(0, 1), pairing)  # [H, T, P]
    content = torch.einsum("ihn,jhn->hij", q_nope, k_nope)
    return content, q_rope @ k_rope.T, value


def _rotate_positions(x: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    """Apply RoPE to [.., T, P] at positions 0, stride, 2 stride, ..."""
    a, b = pair_indices(x.shape[-1], pairing)
    frequency = CHECK_ROPE_BASE ** (-torch.arange(a.numel(), dtype=x.dtype) / a.numel())
    position = torch.arange(x.shape[-2], dtype=x.dtype) * CHECK_TOKEN_STRIDE
    cos, sin = (position[:, None] * frequency).cos(), (position[:, None] * frequency).sin()
    rotated = torch.empty_like(x)
    rotated[..., a] = x[..., a] * cos - x[..., b] * sin
    rotated[..., b] = x[..., a] * sin + x[..., b] * cos
    return rotated
