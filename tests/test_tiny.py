"""The tiny checkpoints themselves: stock transformers loads them, names are those of real files."""

import json

import pytest
import torch
from safetensors import safe_open

import tiny
from quantmla.checkpoint.families import family_of

IDS = torch.arange(2, 30)[None]


@pytest.mark.parametrize("kwargs", tiny.TINY_KWARGS, ids=tiny.TINY_IDS)
def test_stock_transformers_loads_it(tmp_path, kwargs):
    tiny.write_tiny(tmp_path, **kwargs)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_000_000
    model, info = tiny.load_tiny(tmp_path, kwargs["family"], output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert model.config.model_type == kwargs["family"]
    logits = model(IDS).logits
    assert 0.1 < logits.std() < 10
    config = json.loads((tmp_path / "config.json").read_text())
    prefixes = family_of(config).attention_prefixes(config)
    for prefix in prefixes:
        gamma = model.get_submodule(f"{prefix}.kv_a_layernorm").weight
        assert gamma.std() > 0.1
        bias = model.get_submodule(f"{prefix}.kv_a_proj_with_mqa").bias
        assert (bias is not None) == kwargs.get("attention_bias", False)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "longcat_flash"])
def test_experts_have_their_names_on_disk(tmp_path, family):
    tiny.write_tiny(tmp_path, family, q_lora_rank=24, moe=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert not [name for name in names if "gate_up_proj" in name]


def test_shards_dtype_and_seed(tmp_path):
    tiny.write_tiny(tmp_path / "a", dtype=torch.bfloat16, max_shard_size="30KB")
    tiny.write_tiny(tmp_path / "b", dtype=torch.bfloat16)
    tiny.write_tiny(tmp_path / "c", seed=1)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    sharded, whole, other = (
        tiny.load_tiny(tmp_path / name, "deepseek_v3", dtype="auto").state_dict() for name in "abc"
    )
    key = "model.layers.0.self_attn.kv_b_proj.weight"
    assert sharded[key].dtype == torch.bfloat16
    assert torch.equal(sharded[key], whole[key])
    assert not torch.equal(other[key].bfloat16(), whole[key])


def test_poison_reaches_every_way_to_get_memory(poison_empty):
    x = torch.zeros(3)
    memory = [
        torch.empty(2, 3),
        torch.empty_like(x),
        x.new_empty(4),
        torch.empty_strided((2,), (1,)),
    ]
    assert all(tensor.isnan().all() for tensor in memory)
    assert torch.empty(2, dtype=torch.uint8).tolist() == [101, 101]
    assert torch.empty(0).numel() == 0
