"""Baseline transforms: rounding alone, channel scaling, random rotations; the same quantiser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantmla.transform.content import hadamard, random_hadamard
from quantmla.transform.layer import LayerTransform
from quantmla.transform.rope import pair_indices

if TYPE_CHECKING:
    from quantmla.calibrate.record import LayerCapture
    from quantmla.config import Recipe

SMOOTHING = 0.5  # alpha of SmoothQuant
SMALLEST_SHARE = 1e-5  # floor of a channel's range, relative to the largest, so that no scale is 0


def rtn(capture: LayerCapture, recipe: Recipe, pairing_cache: str, seed: int) -> LayerTransform:
    """Round the cache as the model ships it.

    Args:
        capture, recipe, pairing_cache, seed: as for every method of `methods.METHODS`.

    Returns:
        The identity.

    Source: round to nearest.
    """
    return LayerTransform()


def smoothquant(
    capture: LayerCapture, recipe: Recipe, pairing_cache: str, seed: int
) -> LayerTransform:
    """Balance each channel's range against the weights, or queries, that read it.

    Content channels are divided by s = max|c|^a / max|kv_b|^(1-a), a = 0.5; RoPE pairs likewise by
    their largest key and query norms, one scale a pair because only that commutes with RoPE.

    Args:
        capture: activations; only the training windows are used.
        recipe: gives their number.
        pairing_cache: pairing of the cached key.
        seed: not used.

    Returns:
        Scales only, with mean log 0 relative to the shipped channels.

    Source: SmoothQuant, applied to both paths of an MLA cache.
    """
    return smoothed(capture, recipe, pairing_cache, SMOOTHING)


def smoothed(
    capture: LayerCapture, recipe: Recipe, pairing_cache: str, exponent: float
) -> LayerTransform:
    """Return SmoothQuant's scales for any exponent; see `smoothquant`."""
    train = recipe.sequences
    gamma = capture.gamma.double().abs()
    latent = capture.latent_unit[:train].abs().amax((0, 1)).double() * gamma
    weight = capture.kv_b.abs().amax((0, 1)).double()
    first, second = pair_indices(capture.k_rope.shape[-1], pairing_cache)
    key = _pair_norm(capture.k_rope[:train], first, second).amax((0, 1)).double()
    query = torch.stack(
        [_pair_norm(window, first, second).amax((0, 1)) for window in capture.q_rope[:train]]
    ).amax(0)
    return LayerTransform(
        content_scale=gamma.clamp_min(SMALLEST_SHARE * gamma.max())
        * _balance(latent, weight, exponent),
        rope_scale=_balance(key, query.double(), exponent),
    )


def quarot_offline(
    capture: LayerCapture, recipe: Recipe, pairing_cache: str, seed: int
) -> LayerTransform:
    """Rotate the content by a random Hadamard matrix; RoPE keys are rounded as they are.

    No dense rotation is legal before RoPE, so offline there is nothing to do on that path.

    Args:
        capture: gives the size.
        recipe, pairing_cache: not used.
        seed: of the random signs.

    Returns:
        A rotation with unit scales.

    Source: QuaRot, applied to an MLA cache.
    """
    rank = capture.gamma.shape[0]
    return LayerTransform(
        content_rotation=random_hadamard(rank, seed),
        content_scale=torch.ones(rank, dtype=torch.float64),
    )


def quarot_online(
    capture: LayerCapture, recipe: Recipe, pairing_cache: str, seed: int
) -> LayerTransform:
    """As `quarot_offline`; the cache also applies a Hadamard matrix to keys and queries after RoPE.

    Args:
        capture, recipe, pairing_cache, seed: as for `quarot_offline`.

    Returns:
        A rotation with unit scales and `rope_online`.

    Raises:
        CalibrationError: qk_rope_head_dim is not a power of two.

    Source: QuaRot's key cache.
    """
    hadamard(capture.k_rope.shape[-1])  # refuses a size that the cache could not rotate
    transform = quarot_offline(capture, recipe, pairing_cache, seed)
    transform.rope_online = "hadamard"
    return transform


def quarot_angles(
    capture: LayerCapture, recipe: Recipe, pairing_cache: str, seed: int
) -> LayerTransform:
    """As `quarot_offline`; every RoPE pair is also turned by a random angle, which folds.

    Args:
        capture, recipe, pairing_cache, seed: as for `quarot_offline`.

    Returns:
        A rotation with unit scales, and one angle a pair.

    Source: the random rotation that commutes with RoPE.
    """
    transform = quarot_offline(capture, recipe, pairing_cache, seed)
    generator = torch.Generator().manual_seed(seed)
    pairs = capture.k_rope.shape[-1] // 2
    turns = torch.rand(pairs, dtype=torch.float64, generator=generator)
    transform.rope_angle = 2 * torch.pi * turns
    return transform


def _balance(activation: torch.Tensor, reader: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return 1/s = reader^(1-a) / activation^a with mean log 0."""
    activation, reader = (
        x.clamp_min(SMALLEST_SHARE * x.max().clamp_min(torch.finfo(x.dtype).tiny))
        for x in (activation, reader)
    )
    log_scale = (1 - exponent) * reader.log() - exponent * activation.log()
    return (log_scale - log_scale.mean()).exp()


def _pair_norm(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x[..., first].float(), x[..., second].float())
