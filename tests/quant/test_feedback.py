"""Rounding with error feedback: less energy along the Gram matrix, a token at a time."""

import pytest
import torch

from quantmla.errors import CalibrationError
from quantmla.quant import dequantize, fake_quantize, quantize
from quantmla.quant.feedback import Feedback, feed_back, quantize_with, usable_feedback

CHANNELS = 64


def gram_of(rank, seed=0):
    """Sensitivity in few directions, as attention has it."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank, CHANNELS, generator=generator, dtype=torch.float64)
    return rows.T @ rows / rank


def energy(error, gram):
    return float((error.double() @ gram * error.double()).sum())


def values(tokens=256, seed=1):
    return torch.randn(tokens, CHANNELS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("zero", ["zp8", "min16"])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [64, 32])
def test_feedback_lowers_the_energy_that_counts(zero, bits, group):
    x, gram = values(), gram_of(2 * CHANNELS)
    settings = {"group": group, "zero": zero, "clip": 0.9}
    plain = fake_quantize(x, bits, **settings)
    fed = quantize_with(x, bits, Feedback.of(gram), **settings)
    assert energy(fed - x, gram) < 0.85 * energy(plain - x, gram)
    # it is not nearer in the plain sense: errors are moved, not removed
    assert (fed - x).square().sum() > (plain - x).square().sum()


def test_the_energy_is_that_of_the_factor():
    """Without overflow of the codes, errors of targets are plain rounding errors: step^2 / 12."""
    x, gram = values(4096), gram_of(CHANNELS)
    x[:, :2] = torch.tensor([8.0, -8.0])  # which keep all others inside the range
    gram[:2] = gram[:, :2] = 0
    gram[:2, :2] = 1e-3 * torch.eye(2)
    q = quantize(x, 8)
    fed = dequantize(feed_back(x, q, 8, Feedback.of(gram), group=64, zero="zp8"), dtype=x.dtype)
    lower = torch.linalg.cholesky(gram[gram.diagonal().argsort()][:, gram.diagonal().argsort()])
    expected = float((q.scale.double() ** 2).sum() / 12 * lower.diagonal().square().sum())
    assert energy(fed - x, gram) == pytest.approx(expected, rel=0.05)


def test_a_diagonal_gram_is_plain_rounding():
    x, gram = values(), torch.diag(torch.rand(CHANNELS, dtype=torch.float64) + 0.1)
    q = quantize(x, 4)
    fed = feed_back(x, q, 4, Feedback.of(gram), group=64, zero="zp8")
    assert torch.equal(fed.codes, q.codes)


def test_a_code_depends_on_its_own_token_alone():
    x, feedback = values(), Feedback.of(gram_of(8))
    whole = feed_back(x, quantize(x, 4), 4, feedback, group=64, zero="zp8").codes
    for tokens in (slice(0, 1), slice(7, 12), slice(255, 256)):
        alone = feed_back(x[tokens], quantize(x[tokens], 4), 4, feedback, group=64, zero="zp8")
        assert torch.equal(alone.codes, whole[tokens])


def test_the_order_of_operations_is_the_stated_one():
    """The plain loop of docs/layout.md, one number at a time."""
    x, feedback = values(3), Feedback.of(gram_of(CHANNELS))
    q = quantize(x, 4, group=32)
    fed = feed_back(x, q, 4, feedback, group=32, zero="zp8")
    for token in range(3):
        rest = x[token].clone()
        for n, channel in enumerate(feedback.order.tolist()):
            scale = q.scale[token, channel // 32].float()
            zero = q.zero[token, channel // 32].float()
            code = torch.clamp(torch.round(rest[channel] / scale) + zero, 0, 15)
            assert int(fed.codes[token, channel]) == int(code)
            error = scale * (code - zero) - x[token, channel]
            for m in range(n + 1, CHANNELS):
                rest[feedback.order[m]] -= feedback.matrix[n, m] * error


def test_a_gram_without_a_factor_is_refused():
    with pytest.raises(CalibrationError, match="positive semi-definite"):
        Feedback.of(-torch.eye(CHANNELS))
    with pytest.raises(CalibrationError, match="positive semi-definite"):
        Feedback.of(torch.full((CHANNELS, CHANNELS), torch.nan))


def test_only_a_permutation_and_a_strict_triangle_are_usable():
    good = Feedback.of(gram_of(CHANNELS))
    assert usable_feedback(good.order, good.matrix, CHANNELS)
    twice = good.order.clone()
    twice[0] = twice[1]
    assert not usable_feedback(twice, good.matrix, CHANNELS)
    assert not usable_feedback(good.order, good.matrix + torch.eye(CHANNELS), CHANNELS)
    assert not usable_feedback(good.order, good.matrix.T, CHANNELS)
    assert not usable_feedback(good.order, good.matrix * torch.inf, CHANNELS)
    assert not usable_feedback(good.order, good.matrix, CHANNELS + 1)


@pytest.mark.parametrize(
    ("order", "matrix"),
    [
        (torch.zeros(4, dtype=torch.long), torch.zeros(4, 4)),
        (torch.arange(4), torch.full((4, 4), torch.nan).triu(1)),
        (torch.arange(4), torch.ones(4, 4)),
        (torch.arange(4), torch.zeros(4, 4, dtype=torch.long)),
    ],
)
def test_what_is_no_feedback_is_refused(order, matrix):
    with pytest.raises(CalibrationError, match="cannot be used"):
        Feedback(order, matrix)
