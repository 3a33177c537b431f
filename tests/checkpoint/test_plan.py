"""What a plan reads, and the exact algebra of every family's layers."""

import pytest
import torch

from fusing import block_for, random_transforms
from quantmla.checkpoint.plan import AttentionLayers, FusePlan
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.errors import CheckpointError
from quantmla.transform.fuse import check_identity, fuse_layer
from tiny import TINY_IDS, TINY_KWARGS, write_tiny

PAIRINGS = ("interleaved", "half")


@pytest.mark.parametrize("kwargs", TINY_KWARGS, ids=TINY_IDS)
def test_float64_algebra_of_every_layer(tmp_path, kwargs):
    source = write_tiny(tmp_path / "source", **kwargs)
    layers = AttentionLayers.of(CheckpointReader(source))
    dims, eps = layers.dims, layers.dims.norm_eps
    other = PAIRINGS[1 - PAIRINGS.index(layers.pairing)]
    for layer, transform in enumerate(random_transforms(source)):
        weights = layers.weights(layer)
        fused = fuse_layer(weights, dims, layers.pairing, transform, cast=False)
        assert set(fused) == set(weights)
        assert check_identity(weights, fused, dims, layers.pairing, eps) < 1e-10
        wrong = fuse_layer(weights, dims, other, transform, cast=False)
        assert check_identity(weights, wrong, dims, layers.pairing, eps) > 1e-2


def test_a_missing_tensor_is_found_before_anything_is_read(source, monkeypatch):
    reader = CheckpointReader(source)
    transforms, block = random_transforms(source), block_for(source)
    monkeypatch.setattr(CheckpointReader, "get", None)
    FusePlan.of(reader, transforms, block)
    del reader.tensors["model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing[^$]*layers\.1\.self_attn\.q_proj"):
        FusePlan.of(reader, transforms, block)


def test_only_attention_tensors_of_one_layer_are_ever_in_memory(source, monkeypatch):
    read, get = [], CheckpointReader.get
    monkeypatch.setattr(
        CheckpointReader, "get", lambda self, name: read.append(name) or get(self, name)
    )
    plan = FusePlan.of(CheckpointReader(source), random_transforms(source), block_for(source))
    fused = [info for shard in plan.layers.reader.shards for info, _ in plan.fused_tensors(shard)]
    assert len(fused) == len(set(fused)) == len(plan.fused_names()) == 8
    assert set(read) == set(plan.layers.tensor_names())
    layer_of = [name.split(".")[2] for name in read]
    for start in range(0, len(read), 4):
        assert len(set(layer_of[start : start + 4])) == 1


def test_layers_behind_the_model_are_left_alone(source):
    """DeepSeek-V3 ships MTP layers with their own MLA after the last decoder layer."""
    reader = CheckpointReader(source)
    reader.config["num_hidden_layers"] = 1
    layers = AttentionLayers.of(reader)
    assert len(layers.names) == 1
    assert not any(name.startswith("model.layers.1.") for name in layers.tensor_names())


def test_wrong_dtype_is_refused_by_the_header(source):
    reader = CheckpointReader(source)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    info = reader.tensors[name]
    for dtype, word in (("F8_E4M3", "FP8"), ("I8", "integer"), ("U8", "packed")):
        reader.tensors[name] = type(info)(info.shard, dtype, info.shape, info.start, info.end)
        with pytest.raises(CheckpointError, match=word):
            AttentionLayers.of(reader)


def test_bias_is_read_where_the_config_says_so(tmp_path):
    source = write_tiny(tmp_path / "source", q_lora_rank=24, attention_bias=True)
    weights = AttentionLayers.of(CheckpointReader(source)).weights(0)
    assert weights["kv_a_bias"].shape == (48,)
    assert weights["q"].shape == (84, 24)
    assert weights["kv_a_bias"].dtype == torch.float32
