"""The two cached paths as differentiable round trips: transform, quantise, transform back."""

from __future__ import annotations

import torch
from torch import nn

from quantmla.config import KVScheme
from quantmla.quant.affine import fake_quantize, group_count
from quantmla.quant.feedback import Feedback
from quantmla.transform.content import cayley, polar
from quantmla.transform.layer import LayerTransform
from quantmla.transform.rope import Pairing, apply_pairs

UNCLIPPED_START = 0.982  # sigmoid(4): a learned clip starts almost open at 3 bits and more
TWO_BIT_START = 0.65  # best static ratio of a Gaussian group at 2 bits


class ContentPath(nn.Module):
    """Unit latent through R_C, S_C and the quantiser and back, with what the objective trains.

    Args:
        start [R, R]: orthogonal matrix that the learned rotation starts from.
        scheme: quantiser of the path.
        clip: None, a fixed ratio, or "learned".
        shift [R]: constant that a learned shift starts from; None for no shift.
    """

    def __init__(
        self,
        start: torch.Tensor,
        scheme: KVScheme,
        clip: float | str | None,
        shift: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        rank = start.shape[0]
        self.scheme = scheme
        self.register_buffer("start", start.float())
        self.skew = nn.Parameter(torch.zeros(rank, rank))
        self.log_scale = nn.Parameter(torch.zeros(rank))
        self.clip = ClipRatio(clip, scheme.content_bits, group_count(rank, scheme.group))
        self.shift = None if shift is None else Shift(shift, 1.0)

    def rotation(self) -> torch.Tensor:
        """Return R_C [R, R]."""
        return self.start @ cayley(self.skew)

    def scale(self) -> torch.Tensor:
        """Return S_C [R]; a common factor of a group is invisible, so its mean log is 0."""
        parts = self.log_scale.split(self.scheme.group)
        return torch.cat([part - part.mean() for part in parts]).exp()

    def forward(self, latent_unit: torch.Tensor) -> torch.Tensor:
        """Return the unit latent [.., R] as the cache gives it back."""
        rotation, scale = self.rotation(), self.scale()
        constant = 0.0 if self.shift is None else self.shift()
        back = fake_quantize(
            ((latent_unit - constant) @ rotation) * scale,
            self.scheme.content_bits,
            group=self.scheme.group,
            zero=self.scheme.zero,
            clip=self.clip(),
        )
        return (back / scale) @ rotation.T + constant

    def stored(self, latent_unit: torch.Tensor) -> torch.Tensor:
        """Return what the cache would be given [.., R]."""
        constant = 0.0 if self.shift is None else self.shift()
        return ((latent_unit - constant) @ self.rotation()) * self.scale()

    def gram(self, gram_unit: torch.Tensor) -> torch.Tensor:
        """Return a Gram matrix [R, R] of errors of the unit latent for errors of stored values."""
        back = (self.rotation() / self.scale()).to(gram_unit)
        return back.T @ gram_unit @ back

    def transform(self) -> LayerTransform:
        """Return what was learned, as it is stored."""
        rotation = polar(self.rotation().cpu())
        scale = self.scale().detach().double().cpu()
        shift = None
        if self.shift is not None:
            shift = ((self.shift().detach().double().cpu() @ rotation) * scale).float()
        return LayerTransform(
            content_rotation=rotation,
            content_scale=scale,
            content_clip=self.clip.values(),
            content_shift=shift,
        )


class RopePath(nn.Module):
    """RoPE key through R_P, S_P and the quantiser and back, with what the objective trains.

    Args:
        scale [P/2]: pair scales to start from.
        scheme: quantiser of the path.
        pairing: pairing of the cached key.
        clip: None, a fixed ratio, or "learned".
        shift [P]: constant that a learned shift starts from; None for no shift.
        shift_unit: size of a step of the shift at a learning rate of 1, as keys have any size.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        scheme: KVScheme,
        pairing: Pairing,
        clip: float | str | None,
        shift: torch.Tensor | None = None,
        shift_unit: float = 1.0,
    ) -> None:
        super().__init__()
        pairs = scale.shape[0]
        self.scheme, self.pairing = scheme, pairing
        self.angle = nn.Parameter(torch.zeros(pairs))
        self.log_scale = nn.Parameter(scale.float().log())
        self.clip = ClipRatio(clip, scheme.rope_bits, group_count(2 * pairs, scheme.group))
        self.shift = None if shift is None else Shift(shift, shift_unit)

    def scale(self) -> torch.Tensor:
        """Return S_P [P/2] with geometric mean 1."""
        return (self.log_scale - self.log_scale.mean()).exp()

    def forward(self, k_rope: torch.Tensor) -> torch.Tensor:
        """Return the post-RoPE key [.., P] as the cache gives it back."""
        scale = self.scale()
        constant = 0.0 if self.shift is None else self.shift()
        back = fake_quantize(
            apply_pairs(k_rope - constant, self.angle, scale, self.pairing),
            self.scheme.rope_bits,
            group=self.scheme.group,
            zero=self.scheme.zero,
            clip=self.clip(),
        )
        back = apply_pairs(back, -self.angle, scale, self.pairing, inverse_scale=True)
        return back + constant

    def stored(self, k_rope: torch.Tensor) -> torch.Tensor:
        """Return what the cache would be given [.., P]."""
        constant = 0.0 if self.shift is None else self.shift()
        return apply_pairs(k_rope - constant, self.angle, self.scale(), self.pairing)

    def gram(self, gram_key: torch.Tensor) -> torch.Tensor:
        """Return a Gram matrix [P, P] of errors of the key for errors of stored values."""
        eye = torch.eye(2 * len(self.angle)).to(gram_key)
        scale = self.scale()
        back = apply_pairs(eye, -self.angle, scale, self.pairing, inverse_scale=True)
        return back @ gram_key @ back.T

    @torch.no_grad()
    def transform(self, gram_key: torch.Tensor | None = None) -> LayerTransform:
        """Return what was learned, as it is stored; with a Gram matrix, rounding feeds back."""
        angle, scale = self.angle.double().cpu(), self.scale().double().cpu()
        learned = LayerTransform(rope_angle=angle, rope_scale=scale, rope_clip=self.clip.values())
        if self.shift is not None:
            shift = self.shift().double().cpu()
            learned.rope_shift = apply_pairs(shift, angle, scale, self.pairing).float()
        if gram_key is not None:
            feedback = Feedback.of(self.gram(gram_key))
            learned.rope_order, learned.rope_feedback = feedback.order, feedback.matrix
        return learned


class Shift(nn.Module):
    """A learned constant, trained as steps of a given size away from where it starts.

    Args:
        start [C]: where it starts.
        unit: size of a step.
    """

    def __init__(self, start: torch.Tensor, unit: float) -> None:
        super().__init__()
        self.register_buffer("start", start.float())
        self.unit = unit
        self.steps = nn.Parameter(torch.zeros_like(self.start))

    def forward(self) -> torch.Tensor:
        """Return the constant [C]."""
        return self.start + self.unit * self.steps


class ClipRatio(nn.Module):
    """Clip ratio of each group: none, fixed, or trained through a sigmoid."""

    def __init__(self, clip: float | str | None, bits: int, groups: int) -> None:
        super().__init__()
        self.logit: nn.Parameter | None = None
        self.register_buffer("fixed", None)
        if clip == "learned":
            start = torch.tensor(TWO_BIT_START if bits <= 2 else UNCLIPPED_START)
            self.logit = nn.Parameter(start.logit().repeat(groups))
        elif clip is not None:
            self.register_buffer("fixed", torch.full((groups,), float(clip)))

    def forward(self) -> torch.Tensor | None:
        """Return the ratios [G], or None for no clipping."""
        return self.fixed if self.logit is None else self.logit.sigmoid()

    def values(self) -> torch.Tensor | None:
        """Return the ratios as they are stored [G, float32], or None."""
        ratios = self()
        return None if ratios is None else ratios.detach().float().cpu()
