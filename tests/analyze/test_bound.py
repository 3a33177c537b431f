"""Proposition 2: never broken, equal where theory says so, and made of exact norms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cached_window import make_window
from quantmla.analyze.bound import RopeBound, spectral_energy
from quantmla.analyze.gauss_newton import jvp_energies
from quantmla.analyze.response import output_changes
from quantmla.analyze.window import CachedWindow, LayerWeights

ROUNDING = 1 + 1e-10
SCALES = st.floats(-3, 1.5).map(lambda exponent: 10**exponent)  # 1e-3 to about 30


@given(
    heads=st.integers(1, 4),
    tokens=st.integers(1, 64),
    scale=SCALES,
    size=SCALES,
    seed=st.integers(0, 2**32),
)
def test_the_bound_is_never_broken(heads, tokens, scale, size, seed):
    window = make_window(heads=heads, tokens=tokens, scale=scale, seed=seed, n=1)
    generator = torch.Generator().manual_seed(seed + 1)
    d_rope = size * torch.randn(window.k_rope.shape, generator=generator, dtype=torch.float64)
    _, (moved,) = output_changes(window, [(None, d_rope)])
    first_order = jvp_energies(window, ropes=d_rope[None])
    bound = RopeBound.of(window, d_rope)
    assert float(moved) <= bound.plain * ROUNDING
    assert float(moved) <= bound.centred * ROUNDING
    assert float(first_order) <= bound.weighted * ROUNDING
    assert float(first_order) <= bound.weighted_centred * ROUNDING


def two_tokens(size):
    """One head, a query that sees two keys alike, and values that are each other's negative."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    weights = LayerWeights(key_up=0 * one, value_up=one, o_proj=one, scaling=1.0)
    query = torch.tensor([0.0, 1.0], dtype=torch.float64)  # the first token sees no change
    window = CachedWindow(
        weights=weights,
        latent=torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        k_rope=torch.zeros(2, 1, dtype=torch.float64),
        q_nope=torch.zeros(1, 2, 1, dtype=torch.float64),
        q_rope=query.view(1, 2, 1),
    )
    return window, size * torch.tensor([[1.0], [-1.0]], dtype=torch.float64)


def test_every_form_is_reached_by_two_tokens():
    window, d_rope = two_tokens(1e-4)
    _, (moved,) = output_changes(window, [(None, d_rope)])
    bound = RopeBound.of(window, d_rope)
    for right in (bound.plain, bound.centred, bound.weighted, bound.weighted_centred):
        assert float(moved) / right == pytest.approx(1, abs=1e-6)


def test_a_common_value_is_taken_out_by_centring():
    window = make_window(tokens=12)
    d_rope = torch.randn(window.k_rope.shape, dtype=torch.float64)
    shifted = CachedWindow(
        window.weights, window.latent, window.k_rope, 0 * window.q_nope, window.q_rope
    )
    far = CachedWindow(
        window.weights, window.latent + 50, window.k_rope, 0 * window.q_nope, window.q_rope
    )
    near_bound, far_bound = RopeBound.of(shifted, d_rope), RopeBound.of(far, d_rope)
    assert far_bound.centred == pytest.approx(near_bound.centred, rel=1e-9)
    assert far_bound.plain > 100 * near_bound.plain
    _, (moved,) = output_changes(far, [(None, d_rope)])
    assert float(moved) <= far_bound.centred


def test_sums_are_those_of_whole_matrices():
    window = make_window(tokens=19)
    d_rope = torch.randn(window.k_rope.shape, dtype=torch.float64)
    key, value = window.expand(window.latent)
    seen = torch.ones(19, 19, dtype=torch.float64).tril()
    content = window.q_nope @ key.mT
    rope = window.q_rope @ window.k_rope.T
    change = window.q_rope @ d_rope.T
    weight = (content + rope).masked_fill(seen == 0, float("-inf")).softmax(-1)
    mean = (weight * change).sum(-1, keepdim=True)
    bound = RopeBound.of(window, d_rope)
    assert bound.score_change == pytest.approx(float((seen * change).square().sum()), rel=1e-10)
    weighted = float((weight * (change - mean)).square().sum())
    assert bound.weighted_change == pytest.approx(weighted, rel=1e-10)
    assert bound.rope_scores == pytest.approx(float((seen * rope).square().sum()), rel=1e-10)
    assert bound.content_scores == pytest.approx(float((seen * content).square().sum()), rel=1e-10)
    norms = torch.linalg.matrix_norm(value @ window.weights.o_proj, ord=2).square().sum()
    assert bound.value_norm == pytest.approx(float(norms), rel=1e-12)


@pytest.mark.parametrize(("tokens", "value_dim", "hidden"), [(1, 5, 9), (3, 5, 9), (20, 5, 3)])
def test_spectral_norms_are_exact_for_every_shape(tokens, value_dim, hidden):
    value = torch.randn(3, tokens, value_dim, dtype=torch.float64)
    o_proj = torch.randn(3, value_dim, hidden, dtype=torch.float64)
    expected = sum(torch.linalg.svdvals(v @ o)[0] ** 2 for v, o in zip(value, o_proj, strict=True))
    assert spectral_energy(value, o_proj) == pytest.approx(float(expected), rel=1e-12)
