"""Response, decomposition and amplification against sums over whole matrices, in float64."""

import pytest
import torch

from cached_window import dense_jacobian, directions, make_capture, make_window
from quantmla.analyze import gauss_newton
from quantmla.analyze import window as window_module
from quantmla.analyze.decompose import TERMS, content_terms, shares
from quantmla.analyze.directions import random_signs, seeded
from quantmla.analyze.gauss_newton import Amplification, jvp_energies
from quantmla.analyze.response import output_changes


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    monkeypatch.setattr(window_module, "CPU_TILE_BYTES", 1)


def output_of(capture, index, latent, k_rope):
    """The attention output head by head from the captured parts, whole matrices."""
    nope = capture.q_nope.shape[-1]
    future = torch.ones(latent.shape[0], latent.shape[0], dtype=torch.bool).triu(1)
    parts, weights = [], []
    for head, kv_b in enumerate(capture.kv_b.double()):
        scores = capture.q_nope[index, head].double() @ (latent @ kv_b[:nope].T).T
        scores = scores + capture.q_rope[index, head].double() @ k_rope.T
        weight = (capture.scaling * scores).masked_fill(future, float("-inf")).softmax(-1)
        o_proj = capture.o_proj.double().unflatten(1, (capture.kv_b.shape[0], -1))[:, head]
        weights.append(weight)
        parts.append(kv_b[nope:].T @ o_proj.T)  # B_h [R, D]
    output = sum(a @ latent @ b for a, b in zip(weights, parts, strict=True))
    return output, weights, parts


def test_response_is_the_squared_change_of_the_output():
    capture, window = make_capture(), make_window(1)
    (d_latent,), (d_rope,) = directions(window, 1)
    exact, _, _ = output_of(capture, 1, window.latent, window.k_rope)
    norm, moved = output_changes(window, [(d_latent, None), (None, d_rope), (d_latent, d_rope)])
    expected = [
        output_of(capture, 1, window.latent + a * d_latent, window.k_rope + b * d_rope)[0] - exact
        for a, b in ((1, 0), (0, 1), (1, 1))
    ]
    torch.testing.assert_close(norm, exact.square().sum(), rtol=1e-10, atol=0)
    torch.testing.assert_close(
        moved, torch.stack([one.square().sum() for one in expected]), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("size", [1e-3, 0.3, 3.0])
def test_content_terms_are_those_of_whole_matrices_and_add_up(size):
    capture, window = make_capture(), make_window(0)
    d_latent = size * directions(window, 1)[0][0]
    exact, weights, ways = output_of(capture, 0, window.latent, window.k_rope)
    changed, disturbed, _ = output_of(capture, 0, window.latent + d_latent, window.k_rope)
    heads = list(zip(weights, disturbed, ways, strict=True))
    matching = sum((after - before) @ window.latent @ b for before, after, b in heads)
    aggregation = sum(before @ d_latent @ b for before, _, b in heads)
    interaction = sum((after - before) @ d_latent @ b for before, after, b in heads)
    terms = torch.stack((matching, aggregation, interaction)).flatten(1)
    gram = content_terms(window, d_latent)
    scale = float(gram.abs().max())
    torch.testing.assert_close(gram, terms @ terms.T, rtol=1e-10, atol=1e-12 * scale)
    moved = float(output_changes(window, [(d_latent, None)])[1])
    parts = shares(gram, moved)
    assert abs(sum(parts.values()) - 1) < 1e-10
    total = float((changed - exact).square().sum())
    assert parts["matching"] == pytest.approx(float(matching.square().sum()) / total, rel=1e-9)
    crossed = 2 * float((matching * aggregation).sum()) / total
    assert parts["matching_aggregation"] == pytest.approx(crossed, rel=1e-8)
    assert list(parts)[:3] == list(TERMS)
    assert len(parts) == 6


def test_shares_notice_a_term_that_is_missing():
    window = make_window()
    d_latent = directions(window, 1)[0][0]
    gram = content_terms(window, d_latent)
    gram[2], gram[:, 2] = 0, 0
    moved = float(output_changes(window, [(d_latent, None)])[1])
    assert abs(sum(shares(gram, moved).values()) - 1) > 1e-3


@pytest.mark.parametrize("path", ["content", "rope"])
def test_closed_jvps_are_those_of_torch_and_of_the_dense_jacobian(path, monkeypatch):
    window = make_window()
    vectors = directions(window, 3)[0 if path == "content" else 1]
    monkeypatch.setattr(gauss_newton, "EXPANDED_BYTES", 1)  # one direction at a time
    name = "latents" if path == "content" else "ropes"
    energies = jvp_energies(window, **{name: vectors})
    jacobian = dense_jacobian(window, path)
    dense = (vectors.flatten(1) @ jacobian.T).square().sum(-1)
    torch.testing.assert_close(energies, dense, rtol=1e-10, atol=0)
    for vector, energy in zip(vectors, energies, strict=True):
        if path == "content":
            arguments = lambda x: window.output(x, window.k_rope)  # noqa: E731
            point = window.latent
        else:
            arguments = lambda x: window.output(window.latent, x)  # noqa: E731
            point = window.k_rope
        _, change = torch.func.jvp(arguments, (point,), (vector,))
        torch.testing.assert_close(energy, change.square().sum(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("path", ["content", "rope"])
def test_small_changes_move_the_output_as_the_jvp_says(path):
    window = make_window()
    vectors = directions(window, 1)
    d_latent, d_rope = (1e-5 * part[0] for part in vectors)
    if path == "content":
        first_order = jvp_energies(window, latents=d_latent[None])
        _, moved = output_changes(window, [(d_latent, None)])
    else:
        first_order = jvp_energies(window, ropes=d_rope[None])
        _, moved = output_changes(window, [(None, d_rope)])
    torch.testing.assert_close(first_order, moved, rtol=1e-3, atol=0)


def sampled(path, probes):
    """Amplification of two small windows, and G, T, A and O of their dense Jacobians."""
    windows = [make_window(index, tokens=7, rank=6, rope=4) for index in (0, 1)]
    name = "latents" if path == "content" else "ropes"
    rows = [w.latent if path == "content" else w.k_rope for w in windows]
    errors = [
        torch.randn(one.shape, generator=seeded("e", i), dtype=torch.float64).exp() - 1.5
        for i, one in enumerate(rows)
    ]
    for error in errors:
        error[-1] *= 4  # of the token that the fewest queries see
    signs = [random_signs((probes, *one.shape), seeded(path, i)) for i, one in enumerate(rows)]
    cases = list(zip(windows, errors, signs, strict=True))
    output = sum(w.output(w.latent, w.k_rope).square().sum() for w in windows)
    cache = sum(one.square().sum() for one in rows)
    error = torch.cat([one.flatten() for one in errors])
    amplification = Amplification(
        cache_energy=float(cache),
        output_energy=float(output),
        error_energy=float(error.square().sum()),
        coordinates=error.numel(),
        along_error=sum(float(jvp_energies(w, **{name: e[None]})) for w, e, _ in cases),
        signs=torch.stack([jvp_energies(w, **{name: v.double()}) for w, _, v in cases]),
        signed_error=torch.stack([jvp_energies(w, **{name: v * e.abs()}) for w, e, v in cases]),
    )
    jacobian = torch.block_diag(*(dense_jacobian(w, path) for w in windows))
    hessian = jacobian.T @ jacobian
    kappa, share = cache / output, error.square() / error.square().sum()
    mean = hessian.trace() / error.numel()
    off_diagonal = hessian - torch.diag(hessian.diagonal())
    exact = {
        "t": kappa * mean,
        "a": (share * hessian.diagonal()).sum() / mean,
        "o": kappa * (error @ off_diagonal @ error) / error.square().sum(),
        "g": kappa * (error @ hessian @ error) / error.square().sum(),
    }
    return amplification.numbers(), {name: float(value) for name, value in exact.items()}


@pytest.mark.parametrize("path", ["content", "rope"])
def test_the_estimators_agree_with_the_dense_jacobian(path):
    found, exact = sampled(path, 1500)
    assert found["g"] == pytest.approx(exact["g"], rel=1e-10)
    assert found["g"] == pytest.approx(found["t"] * found["a"] + found["o"], rel=1e-12)
    assert exact["g"] == pytest.approx(exact["t"] * exact["a"] + exact["o"], rel=1e-12)
    assert abs(exact["a"] - 1) > 0.05  # so that A is not T by another name
    for name in ("t", "a", "o"):
        error = abs(found[name] - exact[name])
        assert error < 3.5 * found[f"{name}_se"], name
        assert found[f"{name}_se"] < 0.05 * max(abs(exact[name]), exact["t"]), name


def test_standard_errors_are_the_spread_of_repeated_estimates():
    repeats, probes = 600, 8
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(2, repeats * probes, generator=generator, dtype=torch.float64)
    other = torch.randn(2, repeats * probes, generator=generator, dtype=torch.float64)
    signs, signed = base.exp() + 1, (base + other).exp() + 2  # correlated, as they are in use
    runs = [
        Amplification(4.0, 2.0, 3.0, 10, 5.0, one, two).numbers()
        for one, two in zip(
            signs.view(2, repeats, probes).unbind(1),
            signed.view(2, repeats, probes).unbind(1),
            strict=True,
        )
    ]
    for name in ("t", "ta", "a", "o"):
        values = torch.tensor([run[name] for run in runs])
        stated = torch.tensor([run[f"{name}_se"] for run in runs]).square().mean().sqrt()
        assert float(stated / values.std()) == pytest.approx(1, abs=0.15), name
