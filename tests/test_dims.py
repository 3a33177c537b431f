"""Dimensions read from configs of both kinds."""

import pytest

import tiny
from quantmla.dims import MLADims
from quantmla.errors import CheckpointError, UnsupportedModelError

V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def test_v2_lite_numbers():
    dims = MLADims.from_config(V2_LITE)
    assert dims == MLADims(2048, 27, 16, 512, 64, 128, 128, None, 1e-6)
    assert dims.qk_head_dim == 192
    assert dims.bf16_bytes_per_token == 1152
    assert dims.num_cache_layers * dims.bf16_bytes_per_token == 31_104  # algorithms.md 1.2


@pytest.mark.parametrize("kwargs", tiny.TINY_KWARGS, ids=tiny.TINY_IDS)
def test_config_object_and_json_agree(kwargs):
    settings = {key: value for key, value in kwargs.items() if key != "family"}
    config = tiny.tiny_config(kwargs["family"], **settings)
    dims = MLADims.from_config(config)
    assert dims == MLADims.from_config(config.to_diff_dict())
    assert (dims.kv_lora_rank, dims.qk_rope_head_dim) == (32, 16)
    assert (dims.qk_nope_head_dim, dims.v_head_dim, dims.num_heads) == (12, 20, 3)
    assert dims.q_lora_rank == kwargs.get("q_lora_rank")
    assert dims.num_cache_layers == (4 if kwargs["family"] == "longcat_flash" else 2)


def test_minicpm3_may_leave_out_the_value_size():
    config = {**V2_LITE, "model_type": "minicpm3", "v_head_dim": None}
    assert MLADims.from_config(config).v_head_dim == 2048 // 16
    del config["v_head_dim"]
    assert MLADims.from_config(config).v_head_dim == 128


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("num_attention_heads", -3),
        ("kv_lora_rank", 2**30),
        ("kv_lora_rank", "512"),
        ("qk_nope_head_dim", True),
        ("v_head_dim", 1.5),
        ("qk_rope_head_dim", 63),
        ("q_lora_rank", 0),
        ("num_hidden_layers", 100_000),
    ],
)
def test_impossible_sizes_are_named(name, value):
    with pytest.raises(CheckpointError, match=name):
        MLADims.from_config({**V2_LITE, name: value})


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "q_lora_rank", "v_head_dim"])
def test_missing_sizes_are_named(name):
    with pytest.raises(CheckpointError, match=name):
        MLADims.from_config({key: value for key, value in V2_LITE.items() if key != name})


def test_refused_family():
    with pytest.raises(UnsupportedModelError, match="llama"):
        MLADims.from_config({"model_type": "llama"})
