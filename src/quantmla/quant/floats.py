"""Floating-point formats: FP8 e4m3 flat and in tiles, NVFP4 and MXFP4."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantmla.quant.affine import group_count
from quantmla.quant.codec import Codec, Dynamic, Static, checked, fitted_number, positive_number

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_EXPONENTS = (-127, 127)
E2M1_EXPONENT = 2  # of its largest number


def to_e4m3(x: Tensor) -> Tensor:
    """Round to FP8 e4m3 (half to even), larger numbers to +-448; result in float32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor) -> Tensor:
    """Round to FP4 e2m1, 0 .5 1 1.5 2 3 4 6 (half to even), larger numbers to +-6."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return x.sign() * ((size / step).round() * step).clamp(max=E2M1_MAX)


@dataclass(frozen=True, eq=False)
class Fp8Flat(Static):
    """e4m3 with one static scale for a whole path of a layer.

    Args:
        scale: largest calibration magnitude / 448; larger numbers saturate. None before `fitted`.
    """

    name = "fp8"

    def fitted(self, rows: Tensor) -> Codec:
        """Return the codec with the scale of these rows."""
        peak = float(checked(rows, self.name).abs().max())
        return replace(self, scale=positive_number(peak, self.name) / E4M3_MAX)

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return scale * e4m3(rows / scale)."""
        scale = fitted_number(self.scale, self.name)
        return to_e4m3(checked(rows, self.name) / scale) * scale

    def logical_bytes(self, channels: int) -> float:
        """Return one byte a channel: the scale is one number for all tokens."""
        return float(channels)


@dataclass(frozen=True, eq=False)
class Fp8Tile(Dynamic):
    """e4m3 with a float32 scale for every tile of channels of a token, as FlashMLA stores it."""

    tile: int = 128
    name = "fp8-tile"

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return scale * e4m3(rows / scale), the largest magnitude of a tile being 448."""
        parts = []
        for part in checked(rows, self.name).split(self.tile, dim=-1):
            peak = part.abs().amax(-1, keepdim=True)
            scale = torch.where(peak == 0, 1.0, peak / E4M3_MAX)
            parts.append(to_e4m3(part / scale) * scale)
        return torch.cat(parts, dim=-1)

    def logical_bytes(self, channels: int) -> float:
        """Return one byte a channel and four a tile."""
        return float(channels + 4 * group_count(channels, self.tile))


@dataclass(frozen=True, eq=False)
class Nvfp4(Static):
    """e2m1 in blocks of 16 with an e4m3 scale a block and one static float32 scale a path.

    Args:
        scale: largest calibration magnitude / (6 * 448); larger numbers saturate. None before
            `fitted`.
    """

    block = 16
    name = "nvfp4"

    def fitted(self, rows: Tensor) -> Codec:
        """Return the codec with the static scale of these rows."""
        peak = float(checked(rows, self.name).abs().max())
        return replace(self, scale=positive_number(peak, self.name) / (E2M1_MAX * E4M3_MAX))

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return block scale * static scale * e2m1; a block whose scale rounds to 0 gives 0."""
        whole = fitted_number(self.scale, self.name)
        parts = []
        for part in checked(rows, self.name).split(self.block, dim=-1):
            peak = part.abs().amax(-1, keepdim=True)
            scale = to_e4m3(peak / E2M1_MAX / whole) * whole
            codes = to_e2m1(part / torch.where(scale == 0, 1.0, scale))
            parts.append(codes * scale)
        return torch.cat(parts, dim=-1)

    def logical_bytes(self, channels: int) -> float:
        """Return half a byte a channel and one a block."""
        return channels / 2 + group_count(channels, self.block)


@dataclass(frozen=True, eq=False)
class Mxfp4(Dynamic):
    """e2m1 in blocks of 32 with a power-of-two scale, exponent floor(log2(peak)) - 2.

    Source: OCP Microscaling formats, version 1.0; magnitudes above 6 steps saturate.
    """

    block = 32
    name = "mxfp4"

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return block scale * e2m1; an empty block gives 0."""
        parts = []
        for part in checked(rows, self.name).split(self.block, dim=-1):
            peak = part.abs().amax(-1, keepdim=True)
            _, exponent = torch.frexp(peak)  # peak = m 2^e with m in [0.5, 1)
            exponent = (exponent - 1 - E2M1_EXPONENT).clamp(*E8M0_EXPONENTS)
            scale = torch.ldexp(torch.ones_like(peak), exponent)
            parts.append(to_e2m1(part / scale) * scale)
        return torch.cat(parts, dim=-1)

    def logical_bytes(self, channels: int) -> float:
        """Return half a byte a channel and one a block."""
        return channels / 2 + group_count(channels, self.block)
