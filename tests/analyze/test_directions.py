"""Directions: the error of rounding, and the factor that matches a cache NMSE."""

import pytest
import torch

from quantmla.analyze.directions import Direction, random_signs, seeded
from quantmla.errors import CalibrationError


def test_one_factor_for_all_windows_reaches_the_nmse():
    rows = [torch.randn(5, 7), 30 * torch.randn(5, 7)]
    errors = [torch.randn(5, 7), 0.1 * torch.randn(5, 7)]
    direction = Direction.of(rows, errors, "here")
    disturbed = direction.factor(0.01) * direction.error
    energy = sum(one.double().square().sum() for one in rows)
    assert float(disturbed.double().square().sum() / energy) == pytest.approx(0.01, rel=1e-6)
    assert direction.factor(direction.nmse) == pytest.approx(1, rel=1e-12)
    assert direction.cache_energy.tolist() == pytest.approx(
        [float(one.double().square().sum()) for one in rows]
    )


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_nothing_is_scaled_that_cannot_be(bad):
    rows, errors = [torch.ones(2, 3)], [torch.full((2, 3), bad)]
    with pytest.raises(CalibrationError, match=r"layers\.3, rope"):
        Direction.of(rows, errors, "model.layers.3, rope")
    with pytest.raises(CalibrationError, match="cannot be disturbed"):
        Direction.of(errors, rows, "model.layers.3, rope")


def test_signs_are_fair_and_belong_to_their_words():
    signs = random_signs((4000,), seeded("signs", "rope", 0, 1))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 4 / 4000**0.5
    assert torch.equal(signs, random_signs((4000,), seeded("signs", "rope", 0, 1)))
    for other in (("signs", "content", 0, 1), ("signs", "rope", 1, 0), ("signs", "rope", 0, 2)):
        assert not torch.equal(signs, random_signs((4000,), seeded(*other)))
