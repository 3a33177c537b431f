"""KIVI-style keys: scale and minimum of each channel over a group of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantmla.config import Zero
from quantmla.quant.affine import dequantize, quantize
from quantmla.quant.codec import SCALE_BYTES, ZERO_BYTES, Dynamic, checked
from quantmla.quant.pack import packed_bytes


@dataclass(frozen=True, eq=False)
class PerChannel(Dynamic):
    """One scale and zero for each channel and group of tokens; asymmetric.

    A group is coded when its last token arrives, so this codec is not write-once: a token's code
    depends on its neighbours, and rows behind the last whole group come back in BF16. `min16`
    follows KIVI, which stores the minimum as a float; it costs one byte more than `zp8`.

    Args:
        bits: code width.
        group_tokens [tokens]: size of a group.
        zero: zero mode of `affine.quantize`.
    Source: KIVI, key cache.
    """

    bits: int
    group_tokens: int = 64
    zero: Zero = "min16"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"kivi{self.bits}")

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return rows [.., tokens, channels]: whole groups from the first row on coded."""
        rows = checked(rows, self.name)
        tokens = rows.shape[-2]
        whole = tokens - tokens % self.group_tokens
        if whole == 0:
            return rows.bfloat16().float()
        settings = {"group": self.group_tokens, "zero": self.zero}
        across = rows[..., :whole, :].transpose(-1, -2)  # [.., channels, tokens]
        coded = dequantize(quantize(across, self.bits, **settings), dtype=torch.float32, **settings)
        return torch.cat([coded.transpose(-1, -2), rows[..., whole:, :].bfloat16().float()], dim=-2)

    def logical_bytes(self, channels: int) -> float:
        """Return codes, and the token's share of its group's scales and zeros."""
        metadata = channels * (SCALE_BYTES + ZERO_BYTES[self.zero]) / self.group_tokens
        return packed_bytes(channels, self.bits) + metadata
