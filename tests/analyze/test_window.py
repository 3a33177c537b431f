"""The layer as a function of its cache: the same one that calibration trains on, in tiles."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cached_window import directions, make_capture, make_window
from quantmla.analyze import window as module
from quantmla.analyze.bound import RopeBound
from quantmla.analyze.decompose import content_terms
from quantmla.analyze.gauss_newton import jvp_energies
from quantmla.analyze.response import output_changes
from quantmla.analyze.window import cached_content
from quantmla.calibrate.objective import LayerAttention


@pytest.mark.parametrize("index", [0, 1])
def test_output_is_that_of_the_calibrated_layer(index):
    window = make_window(index)
    trained = LayerAttention(make_capture(), dtype=torch.float64)
    expected = trained.output(index)
    torch.testing.assert_close(
        window.output(window.latent, window.k_rope), expected, rtol=0, atol=1e-5
    )


def test_the_latent_carries_its_norm_weight():
    capture = make_capture()
    expected = capture.latent_unit[1] * capture.gamma
    assert torch.equal(cached_content(capture, 1), expected)


def test_an_online_turn_of_keys_and_queries_changes_the_cache_and_not_the_output():
    plain, turned = make_window(rope=8), make_window(rope=8, rope_online="hadamard")
    assert float((plain.k_rope - turned.k_rope).abs().max()) > 0.1
    torch.testing.assert_close(
        turned.output(turned.latent, turned.k_rope),
        plain.output(plain.latent, plain.k_rope),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("tokens", [1, 16, 17, 63])
def test_tiles_cover_each_query_once_and_change_nothing(tokens, monkeypatch):
    window = make_window(tokens=tokens)
    whole = window.output(window.latent, window.k_rope)
    assert len(list(window.tiles())) == 1
    monkeypatch.setattr(module, "CPU_TILE_BYTES", 1)
    tiles = list(window.tiles())
    assert len(tiles) == -(-tokens // module.LEAST_ROWS)
    assert [row for rows in tiles for row in range(tokens)[rows]] == list(range(tokens))
    torch.testing.assert_close(
        window.output(window.latent, window.k_rope), whole, rtol=1e-12, atol=1e-12
    )


class LargestBuffer(TorchDispatchMode):
    """Remembers the most elements that any operation gave back."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_grows_with_the_tokens_and_not_with_their_square(monkeypatch):
    monkeypatch.setattr(module, "CPU_TILE_BYTES", 1)  # LEAST_ROWS queries at once
    heads, tokens = 3, 800
    window = make_window(tokens=tokens, heads=heads)
    (d_latent,), (d_rope,) = directions(window, 1)
    with LargestBuffer() as seen:
        output_changes(window, [(d_latent, d_rope)])
        content_terms(window, d_latent)
        jvp_energies(window, latents=d_latent[None])
        jvp_energies(window, ropes=d_rope[None])
        RopeBound.of(window, d_rope)
    tile = heads * module.LEAST_ROWS * tokens
    assert tile <= seen.elements <= 1.1 * tile  # nothing larger than the scores of one tile
    assert seen.elements < heads * tokens * tokens / 40
