"""A codec behind a matrix that no weight can hold: applied when rows are written, undone at reads.

Undoing it on the rows is the same as applying its inverse transpose to queries and folding its
inverse into kv_b, up to the rounding of the rows to BF16.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantmla.quant.codec import Codec


@dataclass(frozen=True, eq=False)
class Online:
    """Rows times a matrix, a codec, and back.

    Args:
        inner: codec of the rows behind the matrix.
        matrix [C, C, float64]: invertible.
    """

    inner: Codec
    matrix: Tensor
    inverse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inverse", torch.linalg.inv(self.matrix.double()))

    @property
    def name(self) -> str:
        """Name of the inner codec, marked."""
        return f"online {self.inner.name}"

    @property
    def group_tokens(self) -> int:
        """As the inner codec has it."""
        return self.inner.group_tokens

    def fitted(self, rows: Tensor) -> Codec:
        """Return the codec with its inner codec fitted behind the matrix."""
        return replace(self, inner=self.inner.fitted(rows.float() @ self.matrix.to(rows.float())))

    def static(self) -> float | None:
        """Return the static number of the inner codec."""
        return self.inner.static()

    def with_static(self, number: float) -> Codec:
        """Return the codec with its inner codec so set."""
        return replace(self, inner=self.inner.with_static(number))

    def round_trip(self, rows: Tensor) -> Tensor:
        """Return inner.round_trip(rows M) M^-1."""
        rows = rows.float()
        return self.inner.round_trip(rows @ self.matrix.to(rows)) @ self.inverse.to(rows)

    def logical_bytes(self, channels: int) -> float:
        """Return the bytes of the inner codec: the matrix is one for all tokens."""
        return self.inner.logical_bytes(channels)
