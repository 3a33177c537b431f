"""Rounding with error feedback: the error of one channel is made up for by those coded after it.

Scale and zero of a group are those of plain rounding; only the choice of codes differs, so pages
and readers do not change. A code depends on its own token alone. docs/layout.md states the order of
operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantmla.config import Zero
from quantmla.errors import CalibrationError
from quantmla.quant.affine import Clip, Quantized, dequantize, quantize

DAMPING = 1e-6  # of the mean diagonal: a Gram matrix of few samples has directions without energy


@dataclass(frozen=True)
class Feedback:
    """In which order channels are coded, and how an error spreads to those not yet coded.

    Args:
        order [C, int64]: order[n] is the channel that is coded n-th.
        matrix [C, C, fp32]: strictly upper triangular in places of `order`: matrix[n, m] is the
            share of the n-th error that the m-th target gives way by.

    Raises:
        CalibrationError: they are not that.

    Source: own use of Babai's nearest plane, as in LDLQ and GPTQ, for one token at a time.
    """

    order: Tensor
    matrix: Tensor

    def __post_init__(self) -> None:
        if not usable_feedback(self.order, self.matrix, len(self.order)):
            raise CalibrationError(
                "the error feedback cannot be used",
                where="feedback",
                expected="an order of all channels and a finite, strictly upper triangular matrix",
                got=f"order {list(self.order.shape)}, matrix {list(self.matrix.shape)}",
            )

    @classmethod
    def of(cls, gram: Tensor) -> Feedback:
        """Return the feedback that minimises e G e^T of a token's error e, channel after channel.

        The most sensitive channel is coded first, so that the others can make up for its error.

        Args:
            gram [C, C]: symmetric, positive semi-definite; sensitivity to errors of stored values.

        Returns:
            Feedback on the CPU.

        Raises:
            CalibrationError: the matrix is not finite or not positive semi-definite.
        """
        order, lower = factor(gram)
        return cls(order.flip(0), lower.flip(0, 1).triu(1).float())

    def to(self, device: torch.device | str) -> Feedback:
        """Return it on a device."""
        return Feedback(self.order.to(device), self.matrix.to(device))

    def by_channel(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return what the writing op takes: order [C, int32], and the matrix with the columns of
        every row in the order of channels, 0 for those that are coded already."""
        columns = self.order.argsort()
        parts = self.order.int(), self.matrix[:, columns]
        return tuple(part.contiguous().to(device) for part in parts)


def factor(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coding order backwards, and the unit lower factor L of the Gram matrix L D L^T.

    e G e^T is then the sum of D_m (e_m + sum_n>m L_nm e_n)^2: the rounding errors of the targets.

    Args:
        gram [C, C]: as for `Feedback.of`.

    Returns:
        order [C, int64], most sensitive channel last; L [C, C, fp64] in this order.

    Raises:
        CalibrationError: as `Feedback.of`.
    """
    wide = gram.detach().double().cpu()
    order = wide.diagonal().argsort(stable=True)
    wide = wide[order][:, order]
    damped = wide + torch.eye(len(wide)).double() * (DAMPING * wide.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed) or not lower.isfinite().all():
        raise CalibrationError(
            "errors cannot be fed back along this sensitivity",
            where="feedback",
            expected="a finite, positive semi-definite matrix that is not 0",
            got=f"mean diagonal {float(wide.diagonal().mean()):g}",
        )
    return order, lower / lower.diagonal()


@torch.no_grad()
def feed_back(
    x: Tensor, rounded: Quantized, bits: int, feedback: Feedback, *, group: int, zero: Zero
) -> Quantized:
    """Choose the codes of plain rounding again, with feedback.

    For the n-th channel in order, on fp32 rows r that start as x: code its r as `quantize` does,
    e = decoded value - x, and r_m -= matrix[n, m] * e for all later m, product and difference each
    rounded.

    Args:
        x [..., C, floating]: the finite values that `rounded` was made of.
        rounded: scale and zero to use.
        bits, group, zero: as in `quantize`.
        feedback: order and matrix.
    Returns: Quantized with new codes.
    Source: as Feedback.
    """
    feedback = feedback.to(x.device)
    order, levels = feedback.order, 2**bits - 1
    place = order // group
    scale = rounded.scale.float()[..., place].movedim(-1, 0)  # [C, ...] in coding order
    low = rounded.zero.float()[..., place].movedim(-1, 0)
    exact = x.float()[..., order].movedim(-1, 0).contiguous()
    rest = exact.clone()
    codes = torch.empty_like(exact)
    for n in range(len(order)):
        if zero == "zp8":
            code = (torch.round(rest[n] / scale[n]) + low[n]).clamp(0, levels)
            value = scale[n] * (code - low[n])
        else:
            code = torch.round((rest[n] - low[n]) / scale[n]).clamp(0, levels)
            value = low[n] + scale[n] * code
        codes[n] = code
        error = value - exact[n]
        spread = feedback.matrix[n, n + 1 :].reshape(-1, *[1] * error.dim())
        rest[n + 1 :] -= spread * error
    back = torch.empty_like(codes)
    back[order] = codes
    return replace(rounded, codes=back.movedim(0, -1).to(torch.uint8).contiguous())


def quantize_with(
    x: Tensor, bits: int, feedback: Feedback, *, group: int, zero: Zero, clip: Clip
) -> Tensor:
    """Return x after the round trip of a cache that rounds with feedback; no gradient.

    Args:
        x [..., C]: finite values.
        bits, group, zero, clip: as in `quantize`.
        feedback: order and matrix.
    Returns: values [..., C, fp32].
    """
    rounded = quantize(x, bits, group=group, zero=zero, clip=clip)
    rounded = feed_back(x, rounded, bits, feedback, group=group, zero=zero)
    return dequantize(rounded, group=group, zero=zero, dtype=torch.float32)


def usable_feedback(order: Tensor, matrix: Tensor, channels: int) -> bool:
    """Tell whether tensors from a file are a Feedback of so many channels."""
    shapes = tuple(order.shape) == (channels,) and tuple(matrix.shape) == (channels, channels)
    types = matrix.is_floating_point() and not order.is_floating_point()
    if not (shapes and types and order.device == matrix.device) or not matrix.isfinite().all():
        return False
    every = torch.arange(channels, device=order.device)
    complete = torch.equal(order.long().sort().values, every)
    return complete and bool((matrix.tril() == 0).all())
