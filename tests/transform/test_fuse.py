"""Fused weights compute the same layer; a wrong pairing does not; identity paths are untouched."""

import pytest
import torch

from quantmla.dims import MLADims
from quantmla.transform.content import random_hadamard
from quantmla.transform.fuse import changed_keys, check_identity, fuse_layer
from quantmla.transform.layer import LayerTransform

DIMS = MLADims(48, 1, 3, 32, 16, 12, 20, 24, 1e-6)
PAIRINGS = ("interleaved", "half")


def random_weights(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(1)
    shapes = {"kv_a": (48, 48), "kv_a_norm": (32,), "kv_b": (96, 32), "q": (84, 24)}
    shapes |= {"kv_a_bias": (48,)} if bias else {}
    return {
        k: torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
        for k, shape in shapes.items()
    }


def random_transform(rank=32, pairs=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda n: torch.randn(n, dtype=torch.float64, generator=generator)  # noqa: E731
    return LayerTransform(
        random_hadamard(rank, seed), normal(rank).exp(), normal(pairs), normal(pairs).exp()
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_float64_algebra(pairing, bias):
    weights, transform = random_weights(bias=bias), random_transform()
    fused = fuse_layer(weights, DIMS, pairing, transform, cast=False)
    assert set(fused) == set(weights) == changed_keys(weights, transform)
    assert check_identity(weights, fused, DIMS, pairing, 1e-6) < 1e-10
    other = PAIRINGS[1 - PAIRINGS.index(pairing)]
    assert check_identity(weights, fused, DIMS, other, 1e-6) > 1e-2


@pytest.mark.parametrize("name", ["kv_a", "kv_a_bias", "kv_a_norm", "kv_b", "q"])
def test_leaving_out_any_tensor_is_noticed(name):
    weights = random_weights()
    fused = fuse_layer(weights, DIMS, "half", random_transform())
    del fused[name]
    assert check_identity(weights, fused, DIMS, "half", 1e-6) > 1e-2


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
def test_results_have_the_stored_dtype(dtype, limit):
    weights = random_weights(dtype)
    fused = fuse_layer(weights, DIMS, "half", random_transform())
    assert {t.dtype for t in fused.values()} == {dtype}
    assert {k: t.shape for k, t in fused.items()} == {k: weights[k].shape for k in fused}
    assert check_identity(weights, fused, DIMS, "half", 1e-6) < limit


def test_rounding_of_the_norm_weight_costs_nothing():
    """Only gamma is BF16 here, so any error comes from its rounding."""
    weights = random_weights() | {"kv_a_norm": random_weights()["kv_a_norm"].bfloat16()}
    fused = fuse_layer(weights, DIMS, "half", random_transform())
    assert fused["kv_a_norm"].dtype == torch.bfloat16
    assert check_identity(weights, fused, DIMS, "half", 1e-6) < 1e-10


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("transform", "changed"),
    [
        (LayerTransform(), set()),
        (LayerTransform(content_clip=torch.ones(1), rope_online="hadamard"), set()),
        (LayerTransform(content_scale=torch.arange(1.0, 33)), {"kv_a_norm", "kv_b"}),
        (
            LayerTransform(content_rotation=random_hadamard(32, 0)),
            {"kv_a", "kv_a_bias", "kv_a_norm", "kv_b"},
        ),
        (LayerTransform(rope_scale=torch.arange(1.0, 9)), {"kv_a", "kv_a_bias", "q"}),
        (LayerTransform(rope_angle=torch.arange(8.0)), {"kv_a", "kv_a_bias", "q"}),
    ],
)
def test_each_path_alone_changes_only_its_tensors(transform, changed, pairing):
    weights = random_weights(torch.float32)
    fused = fuse_layer(weights, DIMS, pairing, transform)
    assert set(fused) == changed == changed_keys(weights, transform)
    assert check_identity(weights, fused, DIMS, pairing, 1e-6) < 1e-5


def test_rows_of_the_other_path_keep_their_bits():
    weights = random_weights(torch.bfloat16)
    rope_only = fuse_layer(weights, DIMS, "half", LayerTransform(rope_angle=torch.arange(8.0)))
    assert torch.equal(rope_only["kv_a"][:32], weights["kv_a"][:32])
    nope = lambda q: q.unflatten(0, (3, 28))[:, :12]  # noqa: E731
    assert torch.equal(nope(rope_only["q"]), nope(weights["q"]))
    rotation = LayerTransform(content_rotation=random_hadamard(32, 0))
    content_only = fuse_layer(weights, DIMS, "half", rotation)
    assert torch.equal(content_only["kv_a"][32:], weights["kv_a"][32:])


def test_zero_and_negative_norm_weights_are_folded():
    weights = random_weights()
    weights["kv_a_norm"][:4] = torch.tensor([0.0, -1.0, -3.0, 0.0])
    for transform in (random_transform(), LayerTransform(content_scale=torch.arange(1.0, 33))):
        fused = fuse_layer(weights, DIMS, "half", transform)
        assert (fused["kv_a_norm"] > 0).all()
        assert check_identity(weights, fused, DIMS, "half", 1e-6) < 1e-10


def test_inputs_are_not_modified():
    weights = random_weights(torch.float32)
    before = {k: t.clone() for k, t in weights.items()}
    fuse_layer(weights, DIMS, "interleaved", random_transform())
    assert all(torch.equal(weights[k], before[k]) for k in before)


@pytest.mark.parametrize("row", [0, 31])  # a key row and a value row of the first head
def test_nan_is_not_an_identity(row):
    weights = random_weights()
    broken = {"kv_b": weights["kv_b"].clone()}
    broken["kv_b"][row] = float("nan")
    assert not check_identity(weights, broken, DIMS, "half", 1e-6) <= 1.0
