"""Orthogonal matrices: parametrisation, projection, Hadamard starts."""

import pytest
import torch

from quantmla.errors import CalibrationError
from quantmla.transform.content import (
    cayley,
    check_orthogonal,
    hadamard,
    polar,
    random_hadamard,
)


def test_cayley_is_orthogonal_starts_at_identity_and_has_gradients():
    assert torch.equal(cayley(torch.zeros(6, 6)), torch.eye(6))
    free = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    rotation = cayley(free)
    check_orthogonal(rotation.detach(), 1e-12)
    (rotation[0, 1] ** 2).backward()
    assert free.grad.abs().max() > 0


def test_cayley_ignores_the_symmetric_part():
    free = torch.randn(5, 5, dtype=torch.float64)
    symmetric = free + free.T
    torch.testing.assert_close(cayley(free + symmetric), cayley(free))


def test_polar_restores_orthogonality_after_float32():
    rotation = cayley(torch.randn(64, 64))  # float32: about 1e-6 off
    with pytest.raises(CalibrationError, match="not orthogonal"):
        check_orthogonal(rotation)
    projected = polar(rotation)
    assert check_orthogonal(projected, 1e-12) < 1e-12
    assert (projected - rotation).abs().max() < 1e-4


@pytest.mark.parametrize("bad", [torch.full((4, 4), float("nan")), torch.eye(4, 5)])
def test_bad_rotations_are_refused(bad):
    with pytest.raises(CalibrationError):
        check_orthogonal(bad)


def test_polar_refuses_nan():
    with pytest.raises(CalibrationError, match="not finite"):
        polar(torch.full((4, 4), float("nan")))


@pytest.mark.parametrize("size", [1, 2, 24, 33, 64, 96, 128])
def test_random_hadamard_is_orthogonal_and_seeded(size):
    check_orthogonal(random_hadamard(size, 0), 1e-12)
    assert torch.equal(random_hadamard(size, 3), random_hadamard(size, 3))
    assert size < 3 or not torch.equal(random_hadamard(size, 3), random_hadamard(size, 4))


def test_power_of_two_spreads_one_channel_evenly():
    assert torch.allclose(random_hadamard(64, 1).abs(), torch.full((64, 64), 0.125).double())
    assert torch.equal(hadamard(2) * 2**0.5, torch.tensor([[1.0, 1], [1, -1]]).double())
    with pytest.raises(CalibrationError, match="power of two"):
        hadamard(12)


def test_other_sizes_spread_one_channel_over_all():
    assert random_hadamard(96, 0).abs().max() < 0.3
