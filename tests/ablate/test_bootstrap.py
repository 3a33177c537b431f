"""Block bootstrap: coverage on dependent data, pairing, and refusals."""

import pytest
import torch

from quantmla.ablate.bootstrap import Resampler, interval
from quantmla.errors import EvaluationError


def dependent(windows, tokens, seed):
    """Scores of mean 1 whose neighbours are alike."""
    noise = torch.randn(windows, tokens, generator=torch.Generator().manual_seed(seed))
    smooth = noise.unfold(1, 10, 1).mean(-1) * 10**0.5
    return 1 + torch.nn.functional.pad(smooth, (9, 0))


def test_intervals_cover_the_mean_of_dependent_scores():
    hits = single = 0
    for seed in range(40):
        scores = dependent(8, 400, seed)
        low, high = interval(Resampler.of((8, 400), 50, 200, seed).means(scores))
        hits += low <= 1 <= high
        low, high = interval(Resampler.of((8, 400), 1, 200, seed).means(scores))
        single += low <= 1 <= high
    assert hits >= 33  # 38 expected
    assert single < hits  # single tokens pretend to be independent


def test_a_constant_has_no_width_and_blocks_count_by_their_tokens():
    resampler = Resampler.of((2, 25), 10, 100, 0)
    assert resampler.sizes.tolist() == [10, 10, 10, 10, 5, 5]
    assert interval(resampler.means(torch.full((2, 25), 3.0))) == pytest.approx([3.0, 3.0])


def test_cells_share_their_draws():
    scores = dependent(4, 200, 1).abs()
    means = [Resampler.of((4, 200), 50, 300, 7).means(part) for part in (scores, 2 * scores)]
    assert interval(means[1] / means[0]) == pytest.approx([2.0, 2.0])
    other = Resampler.of((4, 200), 50, 300, 8).means(scores)
    assert not torch.equal(other, means[0])


def test_one_block_is_too_few():
    with pytest.raises(EvaluationError, match="too little text"):
        Resampler.of((1, 199), 256, 100, 0)
