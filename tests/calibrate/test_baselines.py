"""Baselines: their formulas, written out again, and what each may and may not touch."""

from typing import get_args

import pytest
import torch

from quantmla.calibrate.baselines import smoothed
from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.methods import METHODS
from quantmla.calibrate.readback import read_content, read_rope
from quantmla.calibrate.tuned import EXPONENTS
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.config import Recipe
from quantmla.errors import CalibrationError
from quantmla.strict import Method
from tiny import write_tiny

WINDOWS = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(1))


def captured(folder, **options):
    write_tiny(folder, layers=1, **options)
    return next(capture_layers(folder, WINDOWS))


def recipe(method, **fields):
    return Recipe(method=method, scheme="c4r4", sequences=2, heldout_sequences=1, **fields)


def test_every_method_name_of_a_recipe_is_registered():
    assert set(METHODS) == set(get_args(Method))
    for method in METHODS:
        assert recipe(method).method == method


def test_rtn_changes_nothing(tmp_path):
    transform = METHODS["rtn"](LayerWorkspace(captured(tmp_path), "half", 0), recipe("rtn"))
    assert transform.content_identity
    assert transform.rope_identity
    assert transform.content_clip is transform.rope_clip is transform.rope_online is None


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_smoothquant_balances_channels_and_pairs_on_training_windows_only(tmp_path, pairing):
    capture = captured(tmp_path)
    transform = METHODS["smoothquant"](LayerWorkspace(capture, pairing, 0), recipe("smoothquant"))
    cached = (capture.latent_unit[:2] * capture.gamma).flatten(0, 1)
    factor = []
    for channel in range(32):
        largest_weight = capture.kv_b[..., channel].abs().max()
        factor.append(cached[:, channel].abs().max().sqrt() / largest_weight.sqrt())
    expected = capture.gamma / torch.stack(factor)
    ratio = transform.content_scale.float() / expected
    torch.testing.assert_close(ratio, ratio.mean().expand(32))  # up to one common factor
    pairs = [(p, p + 8) if pairing == "half" else (2 * p, 2 * p + 1) for p in range(8)]
    scale = torch.stack(
        [
            (
                capture.q_rope[:2][..., pair].norm(dim=-1).max()
                / capture.k_rope[:2][..., pair].norm(dim=-1).max()
            ).sqrt()
            for pair in map(list, pairs)
        ]
    )
    ratio = transform.rope_scale.float() / scale
    torch.testing.assert_close(ratio, ratio.mean().expand(8))
    assert float(transform.rope_scale.log().mean()) == pytest.approx(0, abs=1e-12)
    assert transform.content_rotation is transform.rope_angle is None


def test_smoothquant_survives_dead_and_negative_channels(tmp_path):
    capture = captured(tmp_path)
    capture.gamma[3], capture.gamma[5] = 0, -capture.gamma[5]
    capture.kv_b[..., 7] = 0
    scale = METHODS["smoothquant"](
        LayerWorkspace(capture, "half", 0), recipe("smoothquant")
    ).content_scale
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())


def test_quarot_rotates_content_by_seed_and_rope_only_online(tmp_path):
    capture = captured(tmp_path)
    offline = METHODS["quarot_offline"](
        LayerWorkspace(capture, "half", 4), recipe("quarot_offline")
    )
    online = METHODS["quarot_online"](LayerWorkspace(capture, "half", 4), recipe("quarot_online"))
    other = METHODS["quarot_online"](LayerWorkspace(capture, "half", 5), recipe("quarot_online"))
    rotation = offline.content_rotation
    torch.testing.assert_close(rotation.abs(), torch.full((32, 32), 32**-0.5).double())
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(32).double())
    assert torch.equal(online.content_rotation, rotation)
    assert not torch.equal(other.content_rotation, rotation)
    assert torch.equal(offline.content_scale, torch.ones(32).double())
    assert offline.rope_identity
    assert online.rope_identity
    assert (offline.rope_online, online.rope_online) == (None, "hadamard")


def test_online_rotation_refuses_a_size_without_hadamard_matrix(tmp_path):
    capture = captured(tmp_path, qk_rope_head_dim=12)
    with pytest.raises(CalibrationError, match="power of two"):
        METHODS["quarot_online"](LayerWorkspace(capture, "half", 0), recipe("quarot_online"))


@pytest.mark.parametrize("method", ["rtn", "smoothquant", "quarot_offline", "quarot_online"])
def test_every_baseline_takes_the_same_clips(tmp_path, method):
    capture = captured(tmp_path)
    clipped = recipe(method, clip_content=0.65, clip_rope=0.9)
    transform = METHODS[method](LayerWorkspace(capture, "half", 0), clipped)
    assert torch.equal(transform.content_clip, torch.tensor([0.65]))
    assert torch.equal(transform.rope_clip, torch.tensor([0.9]))


def test_random_angles_keep_the_rotation_and_turn_every_pair(tmp_path):
    layer = LayerWorkspace(captured(tmp_path), "half", 7)
    offline, angles = (METHODS[m](layer, recipe(m)) for m in ("quarot_offline", "quarot_angles"))
    assert torch.equal(offline.content_rotation, angles.content_rotation)
    assert angles.rope_angle.shape == (8,)
    assert 0 < float(angles.rope_angle.min()) < float(angles.rope_angle.max()) < 2 * torch.pi
    assert angles.rope_scale is angles.rope_online is None
    assert len(set(angles.rope_angle.tolist())) == 8
    other = METHODS["quarot_angles"](LayerWorkspace(layer.capture, "half", 8), recipe("rtn"))
    assert not torch.equal(other.rope_angle, angles.rope_angle)


def test_tuned_smoothquant_takes_the_best_exponent_of_each_path(tmp_path):
    layer = LayerWorkspace(captured(tmp_path), "half", 0)
    recipe_ = recipe("smoothquant_tuned", protect="none")
    transform = METHODS["smoothquant_tuned"](layer, recipe_)
    attention, window = layer.attention(), 2  # the held-out one
    latent, k_rope, _ = attention.sequence(window)
    errors = {"content": {}, "rope": {}}
    for exponent in EXPONENTS:
        trial = smoothed(layer.capture, recipe_, "half", exponent)
        content = read_content(trial, recipe_.scheme, layer.gamma, latent)
        rope = read_rope(trial, recipe_.scheme, "half", k_rope)
        errors["content"][exponent] = float(attention.error(window, content)[0])
        errors["rope"][exponent] = float(attention.error(window, k_rope=rope)[0])
    for path, found in errors.items():
        assert transform.stats[f"{path}_exponent"] == min(found, key=found.get)
        assert len(set(found.values())) == len(EXPONENTS)
    best = transform.stats["rope_exponent"]
    expected = smoothed(layer.capture, recipe_, "half", best).rope_scale
    assert torch.equal(transform.rope_scale, expected)


def test_tuned_smoothquant_obeys_the_clip_policy(tmp_path):
    layer = LayerWorkspace(captured(tmp_path), "half", 0)
    clipped = recipe("smoothquant_tuned", clip_content=0.65, clip_rope=0.9)
    transform = METHODS["smoothquant_tuned"](layer, clipped)
    assert torch.equal(transform.content_clip, torch.tensor([0.65]))
    assert torch.equal(transform.rope_clip, torch.tensor([0.9]))


def test_tuned_smoothquant_searches_clips_in_a_fresh_layer(tmp_path):
    layer = LayerWorkspace(captured(tmp_path), "half", 0)
    learned = recipe("smoothquant_tuned", clip_content="learned", clip_rope="learned")
    transform = METHODS["smoothquant_tuned"](layer, learned)
    for clip in (transform.content_clip, transform.rope_clip):
        assert clip.shape == (1,)
        assert 0.4 <= float(clip) <= 1
