"""Pairs rotate and scale as complex numbers and commute with RoPE."""

import pytest
import torch

from quantmla.errors import SchemeError
from quantmla.transform.rope import apply_pairs, pair_indices


def rope(x, position, pairing):
    a, b = pair_indices(x.shape[-1], pairing)
    angle = position * 100.0 ** (-torch.arange(len(a), dtype=x.dtype) / len(a))
    k = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
    out = torch.empty_like(x)
    out[..., a], out[..., b] = k.real, k.imag
    return out


def test_pair_indices():
    assert [t.tolist() for t in pair_indices(6, "interleaved")] == [[0, 2, 4], [1, 3, 5]]
    assert [t.tolist() for t in pair_indices(6, "half")] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("channels", "pairing"), [(7, "half"), (8, "quarter")])
def test_unknown_layouts_are_refused(channels, pairing):
    with pytest.raises(SchemeError):
        pair_indices(channels, pairing)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_is_complex_multiplication(pairing):
    x = torch.randn(5, 8, dtype=torch.float64)
    angle, scale = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
    a, b = pair_indices(8, pairing)
    want = torch.complex(x[:, a], x[:, b]) * torch.polar(scale, angle)
    got = apply_pairs(x, angle, scale, pairing)
    torch.testing.assert_close(torch.complex(got[:, a], got[:, b]), want)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_commutes_with_rope_and_keeps_scores(pairing):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    angle, scale = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    scale = scale.exp()
    new_k = rope(apply_pairs(k, angle, scale, pairing), 11.0, pairing)
    new_q = rope(apply_pairs(q, angle, scale, pairing, inverse_scale=True), 37.0, pairing)
    torch.testing.assert_close(new_k, apply_pairs(rope(k, 11.0, pairing), angle, scale, pairing))
    torch.testing.assert_close(new_q @ new_k, rope(q, 37.0, pairing) @ rope(k, 11.0, pairing))


def test_scale_of_one_channel_would_not_commute():
    k = torch.ones(8, dtype=torch.float64)
    lopsided = torch.ones(8, dtype=torch.float64)
    lopsided[0] = 2.0
    assert (rope(k * lopsided, 3.0, "half") - rope(k, 3.0, "half") * lopsided).norm() > 0.1


def test_interleaved_and_half_are_the_same_pairs_in_another_order():
    x = torch.randn(8, dtype=torch.float64)
    angle, scale = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
    order = torch.cat(pair_indices(8, "interleaved"))
    half = apply_pairs(x[order], angle, scale, "half")
    torch.testing.assert_close(half, apply_pairs(x, angle, scale, "interleaved")[order])


def test_none_is_identity_and_gradients_flow():
    x = torch.randn(3, 8)
    assert torch.equal(apply_pairs(x, None, None, "half"), x)
    angle = torch.zeros(4, requires_grad=True)
    scale = torch.ones(4, requires_grad=True)
    apply_pairs(x, angle, scale, "interleaved").square().mul(torch.arange(8.0)).sum().backward()
    assert angle.grad.abs().min() > 0
    assert scale.grad.abs().min() > 0
