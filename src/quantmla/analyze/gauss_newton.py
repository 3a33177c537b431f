"""First-order amplification of a cache error: G = T A + O, from Jacobian-vector products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.analyze.window import CachedWindow

EXPANDED_BYTES = 1 << 28  # of the per-head keys and values of the directions taken at once


def jvp_energies(
    window: CachedWindow, *, latents: Tensor | None = None, ropes: Tensor | None = None
) -> Tensor:
    """Return ||J v||^2 of several directions, J the Jacobian of the output at the exact cache.

    Closed form, with A the attention weights and dZ the change of the scaled logits:
    dA = A o (dZ - rowsum(A o dZ)); the output changes by dA V + A dV.

    Args:
        window: exact cache and queries.
        latents [K, T, R]: directions of the latent; or
        ropes [K, T, P]: directions of the RoPE key.

    Returns:
        [K, float64] on the CPU.

    Source: algorithms.md section 4.3.
    """
    directions = ropes if latents is None else latents
    take = window.tokens if latents is None else _directions_at_once(window)
    expand = window.expand if latents is not None else None
    energies = [_energies(window, part, expand) for part in directions.split(take)]
    return torch.cat(energies)


def _directions_at_once(window: CachedWindow) -> int:
    heads, key_dim, _ = window.weights.key_up.shape
    row = heads * (key_dim + window.weights.value_up.shape[1]) * window.latent.element_size()
    return max(1, EXPANDED_BYTES // (row * window.tokens))


def _energies(window: CachedWindow, directions: Tensor, expand) -> Tensor:
    key, value = window.expand(window.latent)
    changed = [(None, None) if expand is None else expand(one) for one in directions]
    energies = torch.zeros(len(directions), dtype=torch.float64, device=directions.device)
    for rows in window.tiles():
        weight = window.attention(rows, key, window.k_rope)
        near = value[:, : rows.stop]
        mixed = weight @ near  # [H, rows, V]
        for index, (d_key, d_value) in enumerate(changed):
            d_rope = directions[index] if expand is None else None
            moved = window.logits(rows, d_key, d_rope).mul_(weight)
            change = (moved @ near).sub_(moved.sum(-1, keepdim=True) * mixed)
            if d_value is not None:
                change += weight @ d_value[:, : rows.stop]
            energies[index] += window.project(change).double().square().sum()
    return energies.cpu()


@dataclass(frozen=True)
class Amplification:
    """Sums over the windows of a layer from which G, T, A and O follow, for one path.

    Args:
        cache_energy, output_energy, error_energy: squared norms of x, F(x) and the error e.
        coordinates: numbers that the cache holds: tokens times channels.
        along_error: ||J e||^2.
        signs [n, K]: ||J v||^2 of each window and random sign vector v.
        signed_error [n, K]: ||J (|e| o v)||^2 of the same sign vectors.
    """

    cache_energy: float
    output_energy: float
    error_energy: float
    coordinates: int
    along_error: float
    signs: Tensor
    signed_error: Tensor

    def numbers(self) -> dict[str, float]:
        """Return g, t, a, ta, o and the standard errors of the last four from the probes.

        With H = J^T J and kappa = ||x||^2 / ||F||^2:

            G = kappa ||J e||^2 / ||e||^2       output NMSE over cache NMSE, first order
            T = kappa tr(H) / n                 the same for a direction without structure
            A = sum_k e_k^2 H_kk / (||e||^2 tr(H) / n)      is the energy where H is large
            O = G - T A                         what the signs of the error add, or cancel

        The standard errors tell how sure the probes are, not how much texts differ.

        Source: algorithms.md section 4.3.
        """
        kappa = self.cache_energy / self.output_energy
        trace = kappa / self.coordinates * self.signs
        diagonal = kappa / self.error_energy * self.signed_error
        t, ta = (float(probes.mean(1).sum()) for probes in (trace, diagonal))
        g = kappa * self.along_error / self.error_energy
        a = ta / t
        return {
            "g": g,
            "t": t,
            "a": a,
            "ta": ta,
            "o": g - ta,
            "t_se": _standard_error(trace),
            "a_se": _standard_error((diagonal - a * trace) / t),  # delta method for the ratio
            "ta_se": _standard_error(diagonal),
            "o_se": _standard_error(diagonal),
        }


def _standard_error(probes: Tensor) -> float:
    """Return the standard error of the sum over windows of the mean over probes [n, K]."""
    return float((probes.var(1, unbiased=True) / probes.shape[1]).sum().sqrt())
