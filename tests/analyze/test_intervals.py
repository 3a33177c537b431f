"""Intervals over windows: what is drawn, how wide they are, and how often they are right."""

import pytest
import torch

from quantmla.analyze.intervals import LEAST_DISTINCT, LEAST_WINDOWS, RESAMPLES, window_interval


def skewed(windows, repeats=1, spread=0.4):
    """Numerators and denominators [repeats, n] that go together, and the true ratio."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(2, repeats, windows, generator=generator, dtype=torch.float64)
    bottom = (0.3 * noise[0]).exp()
    return bottom * (spread * noise[1]).exp(), bottom, torch.tensor(spread**2 / 2).exp()


def ratio(top, bottom):
    return lambda counts: (counts @ top) / (counts @ bottom)


def test_whole_windows_are_drawn_with_replacement():
    seen = []
    values = torch.rand(6, dtype=torch.float64)

    def statistic(counts):
        seen.append(counts)
        return counts @ values

    window_interval(statistic, 6, seed=0)
    counts = max(seen, key=len)
    drawn = next(c for c in seen if len(c) > 1 and bool((c.sum(1) == 6).all()))
    assert 0.95 * RESAMPLES < len(counts) < RESAMPLES
    assert int((drawn > 0).sum(1).min()) == LEAST_DISTINCT
    assert float(drawn[:, 0].var()) == pytest.approx(5 / 6, rel=0.1)  # binomial


def test_the_interval_holds_the_value_and_is_a_function_of_the_seed():
    (top,), (bottom,), _ = skewed(8)
    low, high = window_interval(ratio(top, bottom), 8, seed=1)
    assert low < float(top.sum() / bottom.sum()) < high
    assert window_interval(ratio(top, bottom), 8, seed=1) == [low, high]
    assert window_interval(ratio(top, bottom), 8, seed=2) != [low, high]


def test_a_constant_ratio_has_no_width():
    _, (bottom,), _ = skewed(8)
    low, high = window_interval(ratio(3 * bottom, bottom), 8, seed=0)
    assert low == pytest.approx(3, rel=1e-9)
    assert high == pytest.approx(3, rel=1e-9)


def test_too_few_windows_have_no_interval():
    assert window_interval(lambda counts: counts[:, 0], LEAST_WINDOWS - 1, seed=0) is None


@pytest.mark.parametrize(("windows", "spread"), [(8, 0.15), (8, 0.4), (16, 0.4)])
def test_intervals_of_a_skewed_ratio_cover_as_often_as_they_say(windows, spread):
    tops, bottoms, true = skewed(windows, 250, spread)
    inside = 0
    for top, bottom in zip(tops, bottoms, strict=True):
        low, high = window_interval(ratio(top, bottom), windows, seed=0)
        inside += low <= float(true) <= high
    assert 0.91 <= inside / len(tops) <= 0.985
