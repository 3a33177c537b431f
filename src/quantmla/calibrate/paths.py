"""The two cached paths as differentiable round trips: transform, quantise, transform back."""

from __future__ import annotations

import torch
from torch import nn

from quantmla.config import KVScheme
from quantmla.quant.affine import fake_quantize, group_count
from quantmla.transform.content import cayley
from quantmla.transform.rope import Pairing, apply_pairs

UNCLIPPED_START = 0.982  # sigmoid(4): a learned clip starts almost open at 3 bits and more
TWO_BIT_START = 0.65  # best static ratio of a Gaussian group at 2 bits


class ContentPath(nn.Module):
    """Unit latent through R_C, S_C and the quantiser and back, with what the objective trains.

    Args:
        start [R, R]: orthogonal matrix that the learned rotation starts from.
        scheme: quantiser of the path.
        clip: None, a fixed ratio, or "learned".
    """

    def __init__(self, start: torch.Tensor, scheme: KVScheme, clip: float | str | None) -> None:
        super().__init__()
        rank = start.shape[0]
        self.scheme = scheme
        self.register_buffer("start", start.float())
        self.skew = nn.Parameter(torch.zeros(rank, rank))
        self.log_scale = nn.Parameter(torch.zeros(rank))
        self.clip = ClipRatio(clip, scheme.content_bits, group_count(rank, scheme.group))

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
        stored = (latent_unit @ rotation) * scale
        back = fake_quantize(
            stored,
            self.scheme.content_bits,
            group=self.scheme.group,
            zero=self.scheme.zero,
            clip=self.clip(),
        )
        return (back / scale) @ rotation.T


class RopePath(nn.Module):
    """RoPE key through R_P, S_P and the quantiser and back, with what the objective trains.

    Args:
        scale [P/2]: pair scales to start from.
        scheme: quantiser of the path.
        pairing: pairing of the cached key.
        clip: None, a fixed ratio, or "learned".
    """

    def __init__(
        self, scale: torch.Tensor, scheme: KVScheme, pairing: Pairing, clip: float | str | None
    ) -> None:
        super().__init__()
        pairs = scale.shape[0]
        self.scheme, self.pairing = scheme, pairing
        self.angle = nn.Parameter(torch.zeros(pairs))
        self.log_scale = nn.Parameter(scale.float().log())
        self.clip = ClipRatio(clip, scheme.rope_bits, group_count(2 * pairs, scheme.group))

    def scale(self) -> torch.Tensor:
        """Return S_P [P/2] with geometric mean 1."""
        return (self.log_scale - self.log_scale.mean()).exp()

    def forward(self, k_rope: torch.Tensor) -> torch.Tensor:
        """Return the post-RoPE key [.., P] as the cache gives it back."""
        scale = self.scale()
        back = fake_quantize(
            apply_pairs(k_rope, self.angle, scale, self.pairing),
            self.scheme.rope_bits,
            group=self.scheme.group,
            zero=self.scheme.zero,
            clip=self.clip(),
        )
        return apply_pairs(back, -self.angle, scale, self.pairing, inverse_scale=True)


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
