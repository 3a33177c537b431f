"""FlatQuant's ceiling: never worse than QuantMLA, undone exactly, and refused where weights end."""

import pytest
import torch

from calibrate.runs import recipe, run
from calibrate.texts import write_text
from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.flatquant import DensePath
from quantmla.calibrate.methods import METHODS, UNFOLDABLE, refuse_unfoldable
from quantmla.calibrate.objective import ratio_of_sums
from quantmla.calibrate.readback import (
    read_content,
    read_rope,
    restore_content,
    restore_rope,
    store_content,
    store_rope,
)
from quantmla.calibrate.workspace import LayerWorkspace, protection_of
from quantmla.config import KVScheme, Recipe, TrainConfig
from quantmla.dims import MLADims
from quantmla.errors import CalibrationError
from quantmla.transform.fuse import fuse_layer
from quantmla.transform.layer import LayerTransform
from tiny import tiny_config, write_tiny

WINDOWS = torch.randint(0, 96, (6, 40), generator=torch.Generator().manual_seed(2))
SCHEME = {"group": 16, "sink_tokens": 2, "window_tokens": 8}


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), layers=1, kv_lora_rank=64)
    capture = next(capture_layers(folder, WINDOWS))
    capture.latent_unit[..., 3] *= 12
    capture.k_rope[..., [2, 10]] *= 12
    return LayerWorkspace(capture, "half", 5)


def small(method, bits=(4, 4), **fields):
    scheme = KVScheme(content_bits=bits[0], rope_bits=bits[1], **SCHEME)
    train = TrainConfig(curvature_steps=30, curvature_batch_tokens=64)
    windows = {"sequences": 4, "heldout_sequences": 2, "sequence_tokens": 40}
    steps = {"steps": 10, "eval_every": 10, "train": train}
    return Recipe(method=method, scheme=scheme, **windows, **steps, **fields)


@pytest.mark.parametrize("clip", [None, "learned"])
def test_it_contains_quantmla_and_goes_beyond_it(layer, clip):
    recipes = [small(m, clip_content=clip, clip_rope=clip) for m in ("quantmla", "flatquant")]
    ours, ceiling = (METHODS[recipe.method](layer, recipe) for recipe in recipes)
    assert ceiling.stats["content_error"] < ours.stats["content_error"]
    assert ceiling.stats["rope_error"] < ours.stats["rope_error"]
    assert (ceiling.content_clip is None) == (clip is None)
    assert ours.content_matrix is None  # the shared start was not written into
    attention = layer.attention(protection_of(recipes[1]))
    content = ratio_of_sums(
        attention.error(
            w,
            read_content(ceiling, recipes[1].scheme, layer.gamma, attention.sequence(w)[0]),
        )
        for w in (4, 5)
    )
    rope = ratio_of_sums(
        attention.rope_error(
            w, read_rope(ceiling, recipes[1].scheme, "half", attention.sequence(w)[1])
        )
        for w in (4, 5)
    )
    assert content == pytest.approx(ceiling.stats["content_error"], rel=0.05)
    assert rope == pytest.approx(ceiling.stats["rope_error"], rel=0.05)


def test_a_path_of_16_bits_gets_no_matrix(layer):
    assert METHODS["flatquant"](layer, small("flatquant", (16, 4))).content_matrix is None
    assert METHODS["flatquant"](layer, small("flatquant", (4, 16))).rope_matrix is None


def test_matrices_are_undone_and_saved(layer, tmp_path):
    transform = METHODS["flatquant"](layer, small("flatquant"))
    rows = torch.randn(7, 64)
    stored = store_content(transform, layer.gamma, rows)
    assert not torch.allclose(stored, rows, atol=0.1)
    torch.testing.assert_close(
        restore_content(transform, layer.gamma, stored), rows, rtol=1e-3, atol=1e-4
    )
    keys = torch.randn(7, 16)
    back = restore_rope(transform, "half", store_rope(transform, "half", keys))
    torch.testing.assert_close(back, keys, rtol=1e-3, atol=1e-4)
    transform.check(MLADims.from_config(tiny_config("deepseek_v3", kv_lora_rank=64)), 16)
    transform.save(tmp_path / "layer.safetensors")
    again = LayerTransform.load(tmp_path / "layer.safetensors")
    assert torch.equal(again.content_matrix, transform.content_matrix)
    assert torch.equal(again.rope_matrix, transform.rope_matrix)


def test_a_singular_matrix_is_refused():
    dims = MLADims.from_config(tiny_config("deepseek_v3"))
    with pytest.raises(CalibrationError, match="cannot be undone"):
        LayerTransform(content_matrix=torch.zeros(32, 32)).check(dims, 64)


def test_training_starts_at_the_given_matrix_and_ratios():
    start = torch.linalg.qr(torch.randn(32, 32))[0]
    scheme = KVScheme.parse("c2r4", group=16)
    path = DensePath(start, 2, scheme, "learned", torch.tensor([0.5, 0.7]))
    assert torch.equal(path.matrix(), start)
    torch.testing.assert_close(path.clip.values(), torch.tensor([0.5, 0.7]))
    rows = torch.randn(9, 32)
    matrix = LayerTransform(content_scale=torch.ones(32), content_matrix=start)
    matrix.content_clip = path.clip.values()
    torch.testing.assert_close(
        path(rows), read_content(matrix, scheme, torch.ones(32), rows), rtol=1e-4, atol=1e-5
    )


def test_fusing_refuses_it_by_name(tmp_path):
    assert UNFOLDABLE == ("flatquant",)
    with pytest.raises(CalibrationError, match="method flatquant"):
        refuse_unfoldable(recipe("flatquant"))
    model = write_tiny(tmp_path / "model", layers=1)
    fields = {"protect": "none", "steps": 1, "train": {"curvature_steps": 1}}
    flat = recipe("flatquant", **fields)
    text = write_text(tmp_path / "text.txt")
    finished = run(model, text, [flat], tmp_path / "run")
    assert finished.transforms(flat)[0].content_matrix is not None
    with pytest.raises(CalibrationError, match="as method flatquant learns"):
        finished.fuse(flat, tmp_path / "fused")
    assert not (tmp_path / "fused").exists()
    with pytest.raises(CalibrationError, match="cannot be folded"):
        fuse_layer({}, None, "half", LayerTransform(rope_matrix=torch.eye(16)))
