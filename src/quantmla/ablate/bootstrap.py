"""Intervals of per-token scores by a block bootstrap, the same blocks for every cell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.errors import EvaluationError

LEVELS = (0.025, 0.975)
FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class Resampler:
    """Resampled means of per-token scores of windows.

    Tokens of a window depend on each other, so whole blocks are drawn, with replacement. All
    cells get the same draws, which makes their differences and ratios paired.

    Args:
        sizes [K, float64]: tokens of each block.
        draws [resamples, K, int64]: blocks of each resample.
        block_tokens: length of a block; the last one of a window may be shorter.
    """

    sizes: Tensor
    draws: Tensor
    block_tokens: int

    @classmethod
    def of(cls, shape: tuple[int, int], block_tokens: int, resamples: int, seed: int) -> Resampler:
        """Draw the blocks of scores [windows, tokens].

        Raises: EvaluationError if there are fewer than two blocks.
        """
        sizes = _block_sums(torch.ones(shape, dtype=torch.float64), block_tokens)
        if len(sizes) < FEWEST_BLOCKS:
            raise EvaluationError(
                "there is too little text for an interval",
                where="bootstrap",
                expected=f"at least {FEWEST_BLOCKS} blocks of {block_tokens} tokens",
                got=f"{len(sizes)}",
                next_step="score more tokens, or take shorter blocks",
            )
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(sizes), (resamples, len(sizes)), generator=generator)
        return cls(sizes, draws, block_tokens)

    def means(self, scores: Tensor) -> Tensor:
        """Return the mean of scores [windows, tokens] in every resample, [resamples, float64]."""
        sums = _block_sums(scores.double(), self.block_tokens)
        return sums[self.draws].sum(1) / self.sizes[self.draws].sum(1)


def interval(values: Tensor) -> list[float]:
    """Return the 95 % percentile interval of resampled values.

    Source: own.
    """
    levels = torch.tensor(LEVELS, dtype=values.dtype)
    return torch.quantile(values, levels).tolist()


def _block_sums(scores: Tensor, block_tokens: int) -> Tensor:
    """Sums of the blocks of all windows, [K]."""
    return torch.cat([part.sum(1) for part in scores.split(block_tokens, dim=1)])
