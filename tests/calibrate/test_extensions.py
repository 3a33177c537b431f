"""The extensions of the study, each alone on a layer where its effect is provable."""

import dataclasses

import pytest
import torch

from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.dither import channel_energy, dither_error
from quantmla.calibrate.objective import LayerAttention, Protection, ratio_of_sums
from quantmla.calibrate.paths import ContentPath, RopePath
from quantmla.calibrate.readback import (
    read_content,
    read_rope,
    restore_rope,
    store_content,
    store_rope,
)
from quantmla.calibrate.train import train_layer
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.config import KVScheme, Recipe, TrainConfig
from quantmla.errors import SchemeError
from quantmla.quant.feedback import Feedback, quantize_with
from quantmla.transform.content import random_hadamard
from tiny import write_tiny

TOKENS = 40
WINDOWS = torch.randint(0, 96, (6, TOKENS), generator=torch.Generator().manual_seed(2))
SCHEME = KVScheme(content_bits=4, rope_bits=4, group=16, sink_tokens=2, window_tokens=8)


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = write_tiny(
        tmp_path_factory.mktemp("tiny"),
        layers=1,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        hidden_size=64,
    )
    capture = next(capture_layers(folder, WINDOWS))
    # a constant in every latent and key: three times the rest, as in trained models
    generator = torch.Generator().manual_seed(3)
    for rows in (capture.latent_unit, capture.k_rope):
        rows += 3 * rows.std() * torch.randn(rows.shape[-1], generator=generator).sign()
    # queries in few directions, so that errors of different channels can make up for each other
    few = torch.randn(*capture.q_rope.shape[:-1], 3, generator=generator)
    few = few @ torch.randn(3, 16, generator=generator)
    capture.q_rope.add_(4 * capture.q_rope.std() * few)
    return capture


def learned(capture, **settings):
    recipe = Recipe.model_validate(
        {
            "scheme": SCHEME,
            "sequences": 4,
            "heldout_sequences": 2,
            "sequence_tokens": TOKENS,
            "steps": 0,
            "eval_every": 20,
            "train": TrainConfig(curvature_steps=40, curvature_batch_tokens=64),
            **settings,
        }
    )
    return train_layer(LayerWorkspace(capture, "half", 5), recipe), recipe


def heldout(capture, transform, path):
    attention = LayerAttention(capture, Protection(SCHEME.sink_tokens, SCHEME.window_tokens))
    gamma = capture.gamma

    def error(window):
        latent, key, _ = attention.sequence(window)
        if path == "content":
            return attention.error(window, read_content(transform, SCHEME, gamma, latent))
        return attention.rope_error(window, read_rope(transform, SCHEME, "half", key))

    return ratio_of_sums(error(window) for window in (4, 5))


@pytest.mark.parametrize(
    ("path", "flag", "most"),
    [
        ("content", {"content_shift": True}, 0.5),
        ("rope", {"rope_shift": True}, 0.5),
        ("rope", {"rope_feedback": True}, 0.3),
        ("rope", {"rope_shift": True, "rope_feedback": True, "dither": True}, 0.1),
        ("content", {"dither": True}, 1.05),  # as good as the sampled objective, without noise
    ],
)
def test_each_flag_lowers_the_error_of_its_path(capture, path, flag, most):
    plain, _ = learned(capture)
    better, _ = learned(capture, **flag)
    before, after = (heldout(capture, t, path) for t in (plain, better))
    assert after < most * before
    # what is recorded is what the returned tensors give
    assert after == pytest.approx(better.stats[f"{path}_error"], rel=0.05)


def test_plus_is_every_flag_and_searched_clips(capture):
    transform, recipe = learned(capture, method="quantmla_plus")
    assert (recipe.dither, recipe.rope_feedback, recipe.clip_rope) == (True, True, "learned")
    tensors = ("content_shift", "rope_shift", "rope_order", "rope_feedback", "rope_clip")
    assert all(getattr(transform, name) is not None for name in tensors)
    faithful, _ = learned(capture)
    for path in ("content", "rope"):
        assert heldout(capture, transform, path) < 0.5 * heldout(capture, faithful, path)
    again, _ = learned(capture, method="quantmla_plus")
    assert again.to_bytes() == transform.to_bytes()


def test_a_flag_can_be_taken_from_plus_and_baselines_have_none():
    recipe = Recipe(method="quantmla_plus", scheme="c4r4", rope_feedback=False)
    assert (recipe.rope_feedback, recipe.rope_shift) == (False, True)
    assert Recipe(scheme="c4r4").rope_shift is False
    with pytest.raises(SchemeError, match="no such extension"):
        Recipe(method="rtn", scheme="c4r4", rope_shift=True)


def test_paths_and_transforms_agree_on_what_is_stored(capture):
    generator = torch.Generator().manual_seed(4)
    content = ContentPath(random_hadamard(64, 1), SCHEME, None, torch.randn(64))
    rope = RopePath(torch.rand(8, generator=generator) + 0.5, SCHEME, "half", None, torch.randn(16))
    with torch.no_grad():
        for parameter in (*content.parameters(), *rope.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    latent, key = capture.latent_unit[0], capture.k_rope[0]
    expected = store_content(content.transform(), capture.gamma, latent)
    torch.testing.assert_close(content.stored(latent), expected, rtol=1e-4, atol=1e-4)
    expected = store_rope(rope.transform(), "half", key)
    torch.testing.assert_close(rope.stored(key), expected, rtol=1e-4, atol=1e-4)
    # an error of stored values has the same energy in either coordinates
    gram = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    gram = gram @ gram.T
    moved = rope.transform()
    error = torch.randn(1, 16, generator=generator)
    back = read_rope(moved, SCHEME.model_copy(update={"rope_bits": 16}), "half", key[:1])
    torch.testing.assert_close(back, key[:1], rtol=1e-4, atol=1e-4)
    plain = dataclasses.replace(moved, rope_shift=None)
    original = restore_rope(plain, "half", error).double()
    ours, theirs = error.double() @ rope.gram(gram) @ error.double().T, original @ gram @ original.T
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("feedback", [False, True])
def test_the_dither_model_predicts_the_error_of_rounding(feedback):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 32, generator=generator)
    x[:, ::16] = 6.0  # the ends of both groups: nothing else runs out of range
    x[:, 1::16] = -6.0
    rows = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    gram = rows.T @ rows / 64
    ends = torch.zeros(32, dtype=torch.bool)
    ends[::16] = ends[1::16] = True
    gram[ends] = gram[:, ends] = 0
    gram[ends, ends] = 1e-6
    settings = {"group": 16, "zero": "zp8"}
    predicted = dither_error(x, torch.ones(4096), gram, feedback=feedback, **settings).exp()
    predicted = float(predicted) * 4096 / (12 * 255**2)
    rule = Feedback.of(gram if feedback else torch.eye(32))
    error = (quantize_with(x, 8, rule, clip=None, **settings) - x).double()
    assert float((error @ gram * error).sum()) == pytest.approx(predicted, rel=0.05)
    assert channel_energy(gram, True).sum() < channel_energy(gram, False).sum()
