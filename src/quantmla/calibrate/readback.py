"""What a cache stores of a layer under given transforms, and what it gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantmla.quant.affine import fake_quantize
from quantmla.quant.feedback import quantize_with
from quantmla.transform.content import hadamard
from quantmla.transform.rope import Pairing, apply_pairs

if TYPE_CHECKING:
    from quantmla.config import KVScheme
    from quantmla.quant.feedback import Feedback
    from quantmla.transform.layer import LayerTransform


def store_content(
    transform: LayerTransform, gamma: torch.Tensor, latent_unit: torch.Tensor
) -> torch.Tensor:
    """Return the latent that the fused model would cache.

    Args:
        transform: of the layer.
        gamma [R]: norm weight of the original checkpoint, which an identity path keeps.
        latent_unit [.., R]: normed latent without the norm weight.

    Returns:
        [.., R] in the dtype of `latent_unit`.

    Source: own.
    """
    if transform.content_rotation is not None:
        latent_unit = latent_unit @ transform.content_rotation.to(latent_unit)
    stored = latent_unit * _content_factor(transform, gamma).to(latent_unit)
    return _times(_minus(stored, transform.content_shift), transform.content_matrix)


def restore_content(
    transform: LayerTransform, gamma: torch.Tensor, stored: torch.Tensor
) -> torch.Tensor:
    """Undo `store_content`; a channel whose norm weight is 0 comes back as 0."""
    stored = _undone(stored, transform.content_matrix)
    if transform.content_shift is not None:
        stored = stored + transform.content_shift.to(stored)
    factor = _content_factor(transform, gamma).to(stored)
    unit = stored * torch.where(factor == 0, 0, 1 / factor)
    if transform.content_rotation is not None:
        unit = unit @ transform.content_rotation.to(stored).T
    return unit


def store_rope(
    transform: LayerTransform, pairing_cache: Pairing, k_rope: torch.Tensor
) -> torch.Tensor:
    """Return the RoPE key that the cache of the fused model would hold.

    Args:
        transform: of the layer.
        pairing_cache: pairing of the cached key.
        k_rope [.., P]: original key after RoPE.

    Returns:
        [.., P] in the dtype of `k_rope`.

    Source: own.
    """
    if not transform.rope_identity:
        k_rope = apply_pairs(k_rope, transform.rope_angle, transform.rope_scale, pairing_cache)
    stored = _minus(_turn_online(transform, k_rope), transform.rope_shift)
    return _times(stored, transform.rope_matrix)


def restore_rope(
    transform: LayerTransform, pairing_cache: Pairing, stored: torch.Tensor
) -> torch.Tensor:
    """Undo `store_rope`."""
    stored = _undone(stored, transform.rope_matrix)
    if transform.rope_shift is not None:
        stored = stored + transform.rope_shift.to(stored)
    stored = _turn_online(transform, stored)  # the Hadamard matrix is its own inverse
    if transform.rope_identity:
        return stored
    angle, scale = transform.rope_angle, transform.rope_scale
    angle = None if angle is None else -angle
    return apply_pairs(stored, angle, scale, pairing_cache, inverse_scale=True)


def read_content(
    transform: LayerTransform, scheme: KVScheme, gamma: torch.Tensor, latent_unit: torch.Tensor
) -> torch.Tensor:
    """Return the unit latent [.., R] as it comes back from the packed cache."""
    stored = store_content(transform, gamma, latent_unit)
    back = _quantised(stored, scheme.content_bits, scheme, transform.content_clip)
    return restore_content(transform, gamma, back)


def read_rope(
    transform: LayerTransform, scheme: KVScheme, pairing_cache: Pairing, k_rope: torch.Tensor
) -> torch.Tensor:
    """Return the RoPE key [.., P] as it comes back from the packed cache."""
    stored = store_rope(transform, pairing_cache, k_rope)
    back = _quantised(stored, scheme.rope_bits, scheme, transform.rope_clip, transform.feedback)
    return restore_rope(transform, pairing_cache, back)


def _quantised(
    stored: torch.Tensor,
    bits: int,
    scheme: KVScheme,
    clip: torch.Tensor | None,
    feedback: Feedback | None = None,
) -> torch.Tensor:
    clip = None if clip is None else clip.to(stored.device)
    settings = {"group": scheme.group, "zero": scheme.zero, "clip": clip}
    if feedback is None or bits == 16:
        return fake_quantize(stored, bits, **settings)
    return quantize_with(stored, bits, feedback, **settings).to(stored.dtype)


def _content_factor(transform: LayerTransform, gamma: torch.Tensor) -> torch.Tensor:
    if transform.content_identity:
        return gamma
    if transform.content_scale is None:
        return torch.ones_like(gamma)
    return transform.content_scale


def _minus(stored: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    return stored if shift is None else stored - shift.to(stored)


def _turn_online(transform: LayerTransform, key: torch.Tensor) -> torch.Tensor:
    if transform.rope_online is None:
        return key
    return key @ hadamard(key.shape[-1]).to(key)


def _times(rows: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    return rows if matrix is None else rows @ matrix.to(rows)


def _undone(rows: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    return rows if matrix is None else rows @ torch.linalg.inv(matrix.double()).to(rows)
