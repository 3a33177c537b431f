"""Random layers of a given size, as captures and as single windows."""

import torch

from quantmla.analyze.window import CachedWindow, LayerWeights
from quantmla.calibrate.record import LayerCapture


def make_capture(
    *, n=2, heads=3, tokens=21, rank=10, rope=6, nope=4, value=5, hidden=9, scale=1.0, seed=0
):
    """A capture of random numbers; sizes all differ, so that no two can be swapped."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return LayerCapture(
        layer=0,
        prefix="model.layers.0.self_attn",
        latent_unit=draw(n, tokens, rank),
        k_rope=draw(n, tokens, rope) * scale,
        q_nope=draw(n, heads, tokens, nope) * scale,
        q_rope=draw(n, heads, tokens, rope) * scale,
        scaling=0.37,
        kv_b=draw(heads, nope + value, rank),
        o_proj=draw(hidden, heads * value),
        o_bias=draw(hidden),
        gamma=0.5 + torch.rand(rank, generator=generator),
    )


def make_window(index=0, dtype=torch.float64, rope_online=None, **sizes):
    """One float64 window of `make_capture`."""
    capture = make_capture(**sizes)
    weights = LayerWeights.of(capture, "cpu", dtype)
    return CachedWindow.of(capture, index, weights, rope_online)


def directions(window, count, seed=1):
    """Random directions of both paths: [count, T, R] and [count, T, P]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(count, *rows.shape, generator=generator, dtype=torch.float64).to(rows)
        for rows in (window.latent, window.k_rope)
    )


def dense_jacobian(window, path):
    """The Jacobian of the output by one path as a matrix, from autograd."""
    from torch.autograd.functional import jacobian

    if path == "content":
        x, function = window.latent, lambda x: window.output(x, window.k_rope)
    else:
        x, function = window.k_rope, lambda x: window.output(window.latent, x)
    return jacobian(function, x).reshape(-1, x.numel())
