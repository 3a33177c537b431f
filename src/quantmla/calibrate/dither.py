"""Expected output error of rounding as a smooth function of the transforms.

A rounding error is taken as uniform within one step and independent of all else. The step of a
group follows from its range, and the sensitivity of the output from a Gram matrix, so that nothing
is rounded: the gradient is exact and has no noise.
"""

from __future__ import annotations

import torch

from quantmla.config import Zero
from quantmla.quant.feedback import DAMPING


def dither_error(
    stored: torch.Tensor,
    weight: torch.Tensor,
    gram: torch.Tensor,
    *,
    group: int,
    zero: Zero,
    feedback: bool = False,
) -> torch.Tensor:
    """Return the log of the expected output error, up to a constant of the bits.

    Args:
        stored [T, C]: what the cache would be given.
        weight [T]: how much the output energy of a token's errors counts.
        gram [C, C]: mean sensitivity of the output to errors of stored values.
        group, zero: as in `quantize`.
        feedback: rounding has error feedback along `gram`.

    Returns:
        Scalar: log of sum over groups of (weighted mean square of the range) times (sum of the
        channels' sensitivities); differentiable.

    Source: own; the dither model of rounding, and Babai's nearest plane for `feedback`.
    """
    energy = channel_energy(gram.double(), feedback)
    parts = []
    for values, own in zip(stored.split(group, -1), energy.split(group), strict=True):
        low, high = values.amin(-1), values.amax(-1)
        if zero == "zp8":
            low, high = low.clamp(max=0), high.clamp(min=0)
        mean_square = ((high - low).square() * weight).sum() / weight.sum()
        parts.append(mean_square.double() * own.sum())
    return torch.stack(parts).sum().log()


def channel_energy(gram: torch.Tensor, feedback: bool) -> torch.Tensor:
    """Return the output energy [C, fp64] of a unit rounding error of each channel.

    Without feedback it is the diagonal. With it, what counts is the error of a channel's target,
    and the others take up the rest: D of the factor L D L^T, in the order of coding.
    """
    if not feedback:
        return gram.diagonal()
    order = gram.diagonal().detach().argsort(stable=True)
    ordered = gram[order][:, order]
    damping = DAMPING * ordered.diagonal().mean().detach()
    eye = torch.eye(len(order), dtype=gram.dtype, device=gram.device)
    energy = torch.linalg.cholesky(ordered + damping * eye).diagonal().square()
    return torch.zeros_like(energy).index_put((order,), energy)


def weighted_mean(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the mean row [C] of rows [T, C] with token weights [T]."""
    return (rows * weight[:, None]).sum(0) / weight.sum()
