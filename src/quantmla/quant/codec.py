"""One interface for every way to code rows: what a cache would give back, and what it would take.

A codec stands for a format that need not have packed pages: `round_trip` gives the numbers that
attention reads. Every codec refuses NaN and Inf. Unless `group_tokens` says otherwise, what a
token gives back depends on that token alone, so that it is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from quantmla.config import Zero
from quantmla.errors import QuantMLAError, SchemeError
from quantmla.quant.affine import Clip, dequantize, group_count, quantize
from quantmla.quant.feedback import Feedback, feed_back
from quantmla.quant.pack import packed_bytes

ZERO_BYTES = {"zp8": 1, "min16": 2}
SCALE_BYTES = 2


class Codec(Protocol):
    """How the rows of one cached path are coded.

    Fields:
        name: as written in results.
        group_tokens [tokens]: tokens that are coded together; 1 for a write-once codec.
    """

    name: str
    group_tokens: int

    def fitted(self, rows: Tensor) -> Codec:
        """Return the codec with its static numbers, if it has any, set by calibration rows."""

    def static(self) -> float | None:
        """Return the static number of a fitted codec, or None for a codec without one."""

    def with_static(self, number: float) -> Codec:
        """Return the codec with a static number that `static` gave."""

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return what rows [.., tokens, channels] come back as, in float32."""

    def logical_bytes(self, channels: int) -> float:
        """Return the bytes of one token, metadata included and padding not."""


@dataclass(frozen=True, eq=False)
class Dynamic:
    """What codecs without a static number share."""

    group_tokens = 1

    def with_static(self, number: float) -> Codec:
        """Refuse: there is nothing to set.

        Raises: SchemeError.
        """
        raise SchemeError(
            "this codec has no static number", where=f"codec {self.name}", got=f"{number:g}"
        )

    def fitted(self, rows: Tensor) -> Codec:
        """Return the codec itself: all of its numbers come from the rows that it codes."""
        return self

    def static(self) -> float | None:
        """Return None."""
        return None


@dataclass(frozen=True, eq=False)
class Static:
    """What codecs with one static number share.

    Args:
        scale: the number. None before `fitted`.
    """

    scale: float | None = None
    group_tokens = 1

    def static(self) -> float | None:
        """Return the number."""
        return self.scale

    def with_static(self, number: float) -> Codec:
        """Return the codec with this number."""
        return replace(self, scale=number)


@dataclass(frozen=True, eq=False)
class Bf16(Dynamic):
    """Rows as they are, rounded to BF16."""

    name = "bf16"

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return the rows rounded to BF16."""
        return checked(rows, self.name).bfloat16().float()

    def logical_bytes(self, channels: int) -> float:
        """Return two bytes a channel."""
        return 2.0 * channels


@dataclass(frozen=True, eq=False)
class Affine(Dynamic):
    """The grouped affine code of the packed pages.

    Args:
        bits, group, zero, clip: as for `affine.quantize`.
        feedback: how errors are fed back; None for plain rounding.
    """

    bits: int
    group: int = 64
    zero: Zero = "zp8"
    clip: Clip = None
    feedback: Feedback | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"affine{self.bits}")

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return dequantize(quantize(rows))."""
        clip = self.clip.to(rows.device) if isinstance(self.clip, Tensor) else self.clip
        settings = {"group": self.group, "zero": self.zero}
        codes = quantize(checked(rows, self.name), self.bits, clip=clip, **settings)
        if self.feedback is not None:
            codes = feed_back(rows, codes, self.bits, self.feedback, **settings)
        return dequantize(codes, dtype=rows.float().dtype, **settings)

    def logical_bytes(self, channels: int) -> float:
        """Return codes, and scale and zero of every group."""
        metadata = group_count(channels, self.group) * (SCALE_BYTES + ZERO_BYTES[self.zero])
        return float(packed_bytes(channels, self.bits) + metadata)


def checked(rows: Tensor, name: str) -> Tensor:
    """Return rows in float32.

    Raises: QuantMLAError if one of them is NaN or Inf.
    """
    rows = rows.float()
    if not bool(rows.isfinite().all()):
        raise QuantMLAError(
            "non-finite values cannot be coded",
            where=f"codec {name}",
            expected="finite values",
            got=f"{int((~rows.isfinite()).sum())} NaN or Inf of {rows.numel()}",
            next_step="find the layer that produced them",
        )
    return rows


def fitted_number(value: float | None, name: str) -> float:
    """Return the static number of a codec.

    Raises: SchemeError if it was never fitted.
    """
    if value is None:
        raise SchemeError(
            "this codec needs a static number that was never set",
            where=f"codec {name}",
            expected="a codec returned by fitted(calibration rows)",
            got="a codec that saw no rows",
        )
    return value


def positive_number(value: float, name: str) -> float:
    """Return a number that a codec will divide by.

    Raises: QuantMLAError if the calibration rows gave none.
    """
    if not value > 0:
        raise QuantMLAError(
            "the calibration rows of a codec are all zero",
            where=f"codec {name}",
            expected="rows with a value",
            got=f"{value:g}",
        )
    return value
