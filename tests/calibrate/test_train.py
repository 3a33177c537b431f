"""The learned transforms: legal, repeatable, better than rounding, identity when nothing helps."""

import pytest
import torch

from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.curvature import OutputSensitivity
from quantmla.calibrate.joint import joint_check
from quantmla.calibrate.objective import LayerAttention, Protection, ratio_of_sums
from quantmla.calibrate.paths import UNCLIPPED_START
from quantmla.calibrate.readback import read_content, read_rope
from quantmla.calibrate.scores import PositionScores, query_grams, score_energy
from quantmla.calibrate.train import train_layer
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.config import Recipe, TrainConfig
from quantmla.transform.content import check_orthogonal
from tiny import write_tiny

TOKENS = 40
WINDOWS = torch.randint(0, 96, (6, TOKENS), generator=torch.Generator().manual_seed(2))


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
    capture.latent_unit[..., 3] *= 12  # an outlier channel and an outlier pair to win back
    capture.k_rope[..., [2, 10]] *= 12
    return capture


def recipe(scheme="c4r4", steps=20, curvature_steps=30, **settings):
    scheme = {
        "content_bits": int(scheme[1:].split("r")[0]),
        "rope_bits": int(scheme.split("r")[1]),
        "group": 16,
        "sink_tokens": 2,
        "window_tokens": 8,
    }
    return Recipe(
        scheme=scheme,
        sequences=4,
        heldout_sequences=2,
        sequence_tokens=TOKENS,
        steps=steps,
        eval_every=10,
        train=TrainConfig(curvature_steps=curvature_steps, curvature_batch_tokens=64),
        **settings,
    )


def test_learned_transforms_beat_rounding_on_both_paths(capture):
    recipe_ = recipe()
    transform = train_layer(LayerWorkspace(capture, "half", 5), recipe_)
    stats = transform.stats
    assert stats["content_error"] < 0.6 * stats["content_error_plain"]
    assert stats["rope_error"] < 0.6 * stats["rope_error_plain"]
    assert stats["content_error"] <= stats["content_error_start"]
    assert check_orthogonal(transform.content_rotation) < 1e-8
    assert (transform.content_scale > 0).all()
    for part in transform.content_scale.log().split(16):
        assert abs(float(part.mean())) < 1e-6
    assert abs(float(transform.rope_scale.log().mean())) < 1e-6
    record = joint_check(LayerAttention(capture), transform, recipe_.scheme, "half", [4, 5])
    assert record["output_error_both"] > 0


def test_the_recorded_error_is_the_error_of_what_is_returned(capture):
    recipe_ = recipe(curvature_steps=0, protect="none")
    transform = train_layer(LayerWorkspace(capture, "half", 5), recipe_)
    attention, scores = LayerAttention(capture), PositionScores(capture)
    content = ratio_of_sums(
        attention.error(
            i, read_content(transform, recipe_.scheme, capture.gamma, capture.latent_unit[i])
        )
        for i in (4, 5)
    )
    rope = ratio_of_sums(
        scores.error(i, read_rope(transform, recipe_.scheme, "half", capture.k_rope[i]))
        for i in (4, 5)
    )
    assert content == pytest.approx(transform.stats["content_error"], rel=0.05)
    assert rope == pytest.approx(transform.stats["rope_error"], rel=1e-3)


def test_same_seed_same_tensors_and_recipes_of_a_layer_do_not_disturb_each_other(capture):
    first = train_layer(LayerWorkspace(capture, "half", 5), recipe("c2r4"))
    shared = LayerWorkspace(capture, "half", 5)
    train_layer(shared, recipe("c4r4"))
    second = train_layer(shared, recipe("c2r4"))
    for name in ("content_rotation", "content_scale", "rope_angle", "rope_scale"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    other = train_layer(LayerWorkspace(capture, "half", 6), recipe("c2r4"))
    assert not torch.equal(first.content_rotation, other.content_rotation)


def test_a_path_of_16_bits_is_left_alone(capture):
    only_rope = train_layer(LayerWorkspace(capture, "half", 5), recipe("c16r4"))
    assert only_rope.content_identity
    assert not only_rope.rope_identity
    only_content = train_layer(LayerWorkspace(capture, "half", 5), recipe("c4r16"))
    assert only_content.rope_identity
    assert not only_content.content_identity


def test_identity_is_kept_when_nothing_beats_rounding(capture, monkeypatch):
    worse = ratio_of_sums
    calls = []

    def rounding_wins(pairs):
        calls.append(1)
        return worse(pairs) if len(calls) % 2 == 0 else 1e9

    monkeypatch.setattr("quantmla.calibrate.train.ratio_of_sums", rounding_wins)
    transform = train_layer(
        LayerWorkspace(capture, "half", 5), recipe(steps=0, curvature_steps=0, clip_content=0.9)
    )
    assert transform.content_identity
    assert transform.rope_identity
    assert transform.content_clip.tolist() == pytest.approx([0.9] * 4)
    assert transform.stats["content_error"] == transform.stats["content_error_plain"]


def test_learned_clip_ratios_move_and_stay_inside(capture):
    transform = train_layer(
        LayerWorkspace(capture, "half", 5),
        recipe("c4r4", clip_content="learned", clip_rope="learned"),
    )
    assert not transform.content_identity
    assert not transform.rope_identity
    for clip in (transform.content_clip, transform.rope_clip):
        assert clip.min() > 0
        assert clip.max() < 1
        assert not torch.allclose(clip, torch.full_like(clip, UNCLIPPED_START))


def test_protected_pairs_carry_no_error(capture):
    attention = LayerAttention(capture, Protection(2, TOKENS))
    wrecked = torch.randn(TOKENS, 64)
    error, norm = attention.error(0, wrecked, torch.randn(TOKENS, 16))
    assert float(error) < 1e-9 * float(norm)
    partly = LayerAttention(capture, Protection(2, 8))
    error, norm = partly.error(0, wrecked)
    assert float(error) > 1e-3 * float(norm)
    rows = (partly.output(0, wrecked) - partly.teacher(0)).square().sum(-1)
    assert float(rows[:10].max()) < 1e-9 * float(norm)  # queries that see sinks and window only
    assert float(rows[10]) > 0


def test_two_key_sets_equal_a_plain_mask(capture):
    attention = LayerAttention(capture, Protection(2, 8))
    latent = capture.latent_unit[1] + 0.1 * torch.randn(TOKENS, 64)
    rope = capture.k_rope[1] + 0.1 * torch.randn(TOKENS, 16)
    kv_b = (capture.kv_b * capture.gamma).double()
    nope = capture.q_nope.shape[-1]
    q_n, q_r = capture.q_nope[1].double(), capture.q_rope[1].double()
    heads = []
    for head in range(kv_b.shape[0]):
        rows = []
        for i in range(TOKENS):
            near = [j < 2 or i - j < 8 for j in range(i + 1)]
            pick = [capture.latent_unit[1][j] if near[j] else latent[j] for j in range(i + 1)]
            keys = [capture.k_rope[1][j] if near[j] else rope[j] for j in range(i + 1)]
            kv = torch.stack(pick).double() @ kv_b[head].T
            score = kv[:, :nope] @ q_n[head, i] + torch.stack(keys).double() @ q_r[head, i]
            rows.append((score * capture.scaling).softmax(0) @ kv[:, nope:])
        heads.append(torch.stack(rows))
    expected = torch.cat(heads, -1) @ capture.o_proj.double().T
    assert torch.allclose(attention.output(1, latent, rope).double(), expected, atol=1e-4)


@pytest.mark.parametrize("distance", [0, 8])
def test_gram_form_equals_the_masked_score_matrix(capture, distance):
    scores = PositionScores(capture, Protection(3 if distance else 0, distance))
    key = capture.k_rope[2] + 0.05 * torch.randn(TOKENS, 16)
    error, norm = scores.error(2, key)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    mask = (i - j >= distance) & ((j >= 3) | (distance == 0))
    query = capture.q_rope[2].double()
    dense = ((query @ (key - capture.k_rope[2]).double().T) * mask).square().sum()
    total = ((query @ capture.k_rope[2].double().T) * mask).square().sum()
    assert float(error) == pytest.approx(float(dense), rel=1e-4)
    assert float(norm) == pytest.approx(float(total), rel=1e-4)
    grams = query_grams(capture.q_rope[2])
    assert float(score_energy(capture.k_rope[2], grams)) > 0


def test_sensitivity_matches_the_dense_jacobian(capture):
    attention = LayerAttention(capture, Protection(2, 8))
    window = 3
    sampled = OutputSensitivity.of(attention, [window], [0], probes=600, seed=0)
    latent, rope, _ = attention.sequence(window)
    jacobian = torch.autograd.functional.jacobian(
        lambda c, k: attention.output(window, c, k), (latent, rope)
    )
    blocks = [
        torch.einsum("idtp,idtq->tpq", part, part) for part in jacobian
    ]  # [T, R, R], [T, P, P]
    mean = blocks[0].sum(0)
    mean = mean * (mean.shape[0] / mean.trace())
    assert torch.allclose(sampled.content, mean, atol=0.12 * float(mean.diagonal().max()))
    energy = blocks[0].diagonal(dim1=1, dim2=2).sum(-1)
    assert torch.allclose(
        sampled.content_weight[window], energy / energy.mean(), rtol=0.5, atol=0.05
    )
    error = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(1))
    dense = torch.einsum("tp,tpq,tq->", error, blocks[1], error)
    other = torch.einsum("tp,tpq,tq->", rope, blocks[1], rope)
    ratio = sampled.rope_energy(error, window) / sampled.rope_energy(rope, window)
    assert float(ratio) == pytest.approx(float(dense / other), rel=0.2)


def test_the_shared_sensitivity_knows_which_windows_were_held_out(capture):
    layer = LayerWorkspace(capture, "half", 5)
    first, second = (
        layer.sensitivity(recipe().model_copy(update={"sequences": n, "heldout_sequences": 3 - n}))
        for n in (1, 2)
    )
    assert set(first.rope_pull) == {0}
    assert set(second.rope_pull) == {0, 1}
