"""The tensor maths of the conversion of one layer, in float64."""

import pytest
import torch

from quantmla.convert.gqa import (
    GQAWeights,
    convert_layer,
    input_covariance,
    joint_pca,
    joint_targets,
    mix_key_heads,
    pack_kv_b,
    refit_after_norm,
    split_keys,
    to_pairs,
)
from quantmla.errors import CalibrationError

HEADS, GROUPS, DIM, HIDDEN = 6, 3, 8, 32


def random_layer(groups=GROUPS, dtype=torch.float64):
    def weight(rows):
        return torch.randn(rows, HIDDEN, dtype=dtype)

    return GQAWeights(weight(HEADS * DIM), weight(groups * DIM), weight(groups * DIM), DIM)


def random_inputs(windows=4, tokens=50, dtype=torch.float64):
    mix = torch.randn(HIDDEN, HIDDEN, dtype=dtype)
    return torch.randn(windows, tokens, HIDDEN, dtype=dtype) @ mix


def rope(x, positions):
    """Half-split RoPE of [..., T, d] as two real products, independent of the complex form."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def heads_of(x, weight):
    return (x @ weight.T).unflatten(-1, (-1, DIM)).transpose(0, 1)  # [heads, T, d]


def relative(got, want):
    return float((got - want).norm() / want.norm())


@pytest.fixture
def layer():
    return random_layer()


@pytest.fixture
def inputs():
    return random_inputs()


def mixed(analysis, keys):
    """Mix half-split keys [G, T, d] by [d/2, C, G]."""
    pairs = torch.complex(keys[..., : DIM // 2], keys[..., DIM // 2 :])
    pairs = torch.einsum("fcg,gtf->ctf", analysis, pairs)
    return torch.cat([pairs.real, pairs.imag], -1)


def test_head_mixing_commutes_with_rope(layer, inputs):
    analysis = mix_key_heads(layer, input_covariance(inputs)).analysis
    keys, positions = heads_of(inputs[0], layer.key), torch.arange(50.0, dtype=torch.float64)
    before = rope(mixed(analysis, keys), positions)
    after = mixed(analysis, rope(keys, positions))
    assert relative(before, after) < 1e-12


def test_mixing_real_and_imaginary_parts_apart_does_not_commute(inputs, layer):
    keys, positions = heads_of(inputs[0], layer.key), torch.arange(50.0, dtype=torch.float64)
    scale = torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)
    assert relative(rope(keys * scale, positions), rope(keys, positions) * scale) > 0.1


def test_mixing_has_an_inverse_and_orders_the_energy(layer, inputs):
    covariance = input_covariance(inputs)
    mixing = mix_key_heads(layer, covariance)
    eye = torch.eye(GROUPS, dtype=torch.complex128).expand(DIM // 2, -1, -1)
    torch.testing.assert_close(mixing.synthesis @ mixing.analysis, eye)
    components = mixing.analysis @ to_pairs(layer.key, DIM).transpose(0, 1)
    second = components @ covariance.to(torch.complex128) @ components.mH
    energy = second.diagonal(dim1=-2, dim2=-1).real
    off_diagonal = second - torch.diag_embed(energy).to(second.dtype)
    assert off_diagonal.abs().max() < 1e-10 * energy.max()
    assert (energy[:, :-1] >= energy[:, 1:]).all()
    share = float(energy[:, 0].sum() / energy.sum())
    assert mixing.energy_kept == pytest.approx(share)
    assert 1 / GROUPS < mixing.energy_kept < 1


def test_split_rebuilds_every_score_at_distance_zero(layer, inputs):
    """With RoPE dropped from all components, the split must give q . k without RoPE."""
    keys = split_keys(layer, mix_key_heads(layer, input_covariance(inputs)))
    x = inputs[0]
    query = heads_of(x, layer.query)  # [H, T, d]
    want = query @ heads_of(x, layer.key).repeat_interleave(HEADS // GROUPS, 0).mT
    rope_query = (x @ keys.rope_query.flatten(0, 1).T).unflatten(-1, (-1, DIM)).transpose(0, 1)
    nope = keys.nope_expand @ keys.nope_key  # [G, d, D]
    nope_key = (x @ nope.flatten(0, 1).T).unflatten(-1, (-1, DIM)).transpose(0, 1)
    got = rope_query @ (x @ keys.rope_key.T).T
    got = got + query @ nope_key.repeat_interleave(HEADS // GROUPS, 0).mT
    assert relative(got, want) < 1e-12


def test_keys_in_one_component_keep_rope_exactly(inputs):
    """Heads that are complex multiples of each other lose nothing: no RoPE is dropped."""
    layer = random_layer()
    pairs = to_pairs(layer.key, DIM)[:1] * torch.randn(GROUPS, DIM // 2, 1, dtype=torch.complex128)
    key = torch.cat([pairs.real, pairs.imag], -2).flatten(0, 1)
    layer = GQAWeights(layer.query, key, layer.value, DIM)
    mixing = mix_key_heads(layer, input_covariance(inputs))
    assert mixing.energy_kept == pytest.approx(1.0, abs=1e-12)
    keys = split_keys(layer, mixing)
    x, positions = inputs[0], torch.arange(50.0, dtype=torch.float64)
    source_key = rope(heads_of(x, key), positions).repeat_interleave(HEADS // GROUPS, 0)
    want = rope(heads_of(x, layer.query), positions) @ source_key.mT
    rope_query = heads_of(x, keys.rope_query.flatten(0, 1))
    got = rope(rope_query, positions) @ rope(x @ keys.rope_key.T, positions).T
    assert relative(got, want) < 1e-12
    assert (keys.nope_expand @ keys.nope_key).abs().max() < 1e-10


def test_full_rank_pca_is_lossless_and_its_latent_has_mean_square_one(layer, inputs):
    covariance = input_covariance(inputs)
    keys = split_keys(layer, mix_key_heads(layer, covariance))
    width = (2 * GROUPS - 1) * DIM
    rank = min(width, HIDDEN)  # the joint matrix has no higher rank than the inputs
    down, up, kept = joint_pca(keys.nope_key, layer.value, covariance, rank)
    assert relative(up @ down, torch.cat([keys.nope_key, layer.value])) < 1e-10
    assert kept == pytest.approx(1.0)
    assert float((inputs @ down.T).square().mean()) == pytest.approx(1.0)


def test_truncated_pca_beats_every_other_choice_of_channels(layer, inputs):
    covariance = input_covariance(inputs)
    value = layer.value
    down, up, kept = joint_pca(value[:0], value, covariance, 8)
    outputs = inputs.flatten(0, 1) @ value.T
    error = (inputs.flatten(0, 1) @ (value - up @ down).T).square().sum()
    assert 1 - kept == pytest.approx(float(error / outputs.square().sum()))
    energy = outputs.square().sum(0).sort(descending=True).values
    assert error < energy[8:].sum()


@pytest.mark.parametrize("rank", [0, 41])
def test_impossible_rank_is_refused(layer, inputs, rank):
    with pytest.raises(CalibrationError, match="1 to 40"):
        convert_layer(layer, inputs, rank)


def test_refit_is_exact_where_the_norm_divides_by_a_constant():
    down = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))[0]
    inputs = torch.randn(4, 50, HIDDEN, dtype=torch.float64)
    inputs = torch.nn.functional.normalize(inputs, dim=-1)
    targets = torch.randn(12, HIDDEN, dtype=torch.float64)
    up, error = refit_after_norm(down, targets, inputs)
    latent = inputs @ down.T
    latent = latent / latent.square().mean(-1, keepdim=True).sqrt()
    assert error < 1e-9
    assert relative(latent @ up.T, inputs @ targets.T) < 1e-4  # the ridge


def sink_error(sink_weight):
    """Relative error on first tokens of inputs whose first tokens are ten times smaller."""
    torch.manual_seed(3)
    inputs = random_inputs(8, 64)
    inputs[:, 0] = torch.randn(HIDDEN, dtype=torch.float64) / 10
    down = torch.randn(12, HIDDEN, dtype=torch.float64)
    targets = torch.randn(20, HIDDEN, dtype=torch.float64)
    up, error = refit_after_norm(down, targets, inputs, sink_weight=sink_weight)
    latent = inputs[:, 0] @ down.T
    latent = latent / latent.square().mean(-1, keepdim=True).sqrt()
    assert 0 < error < 1
    return relative(latent @ up.T, inputs[:, 0] @ targets.T)


def test_sink_weight_repairs_the_first_token():
    assert sink_error(100.0) < 0.6 * sink_error(1.0)


def test_kv_b_rows_are_repeated_per_query_head(layer, inputs):
    targets = joint_targets(
        split_keys(layer, mix_key_heads(layer, input_covariance(inputs))), layer
    )
    rows = pack_kv_b(targets, layer).view(HEADS, 2, DIM, HIDDEN)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        want = layer.value[group * DIM : (group + 1) * DIM]
        torch.testing.assert_close(rows[head, 1], want)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_any_number_of_key_heads(inputs, groups):
    result = convert_layer(random_layer(groups), inputs, DIM, dtype=torch.float64)
    assert result.query.shape == (HEADS * 2 * DIM, HIDDEN)
    assert result.kv_a.shape == (2 * DIM, HIDDEN)
    assert result.kv_b.shape == (HEADS * 2 * DIM, DIM)
    assert torch.isfinite(result.kv_b).all()
    assert result.stats["rope_energy_kept"] == pytest.approx(1.0) if groups == 1 else True


def test_refit_sees_the_rounded_projection(inputs):
    """The stored kv_b is the best one for the stored kv_a, not for the unrounded one."""
    torch.manual_seed(5)
    layer = random_layer()
    result = convert_layer(layer, inputs, 12)
    keys = split_keys(layer, mix_key_heads(layer, input_covariance(inputs)))
    up, _ = refit_after_norm(result.kv_a[:12].double(), joint_targets(keys, layer), inputs)
    torch.testing.assert_close(result.kv_b, pack_kv_b(up, layer).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("what", ["input", "k_proj"])
def test_values_that_are_not_finite_are_named(layer, inputs, what):
    (inputs if what == "input" else layer.key).view(-1)[7] = torch.nan
    with pytest.raises(CalibrationError, match=f"layers.3, {what}"):
        convert_layer(layer, inputs, 12, where="layers.3")
