"""Loading of the model to be converted, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmla.convert.source import check_source, find_gguf, load_source
from quantmla.errors import CheckpointError, UnsupportedModelError
from tiny_llama import THETA, tiny_llama, write_llama


def test_folder_is_loaded_in_float32(tmp_path):
    write_llama(tmp_path, tiny_llama().bfloat16())
    source = load_source(tmp_path)
    assert source.model.dtype == torch.float32
    assert source.model.config.rope_parameters["rope_theta"] == THETA
    assert source.tokenizer("a\n")["input_ids"] == [66, 0]


LLAMA = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "already is an MLA model"),
        ({"model_type": "qwen3"}, "only model_type llama"),
        ({"attention_bias": True}, "biases"),
        ({"mlp_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "RoPE is scaled"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "scaled"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of a head"),
    ],
)
def test_models_that_would_convert_wrongly_are_refused(changes, reason):
    check_source(LLAMA)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_source(LLAMA | changes)


def test_refusal_comes_before_the_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UnsupportedModelError):
        load_source(tmp_path)


def test_path_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder or GGUF file"):
        load_source(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"0 \.gguf files"):
        load_source(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        load_source(tmp_path)


def test_gguf_file_is_found_by_name_or_folder(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert find_gguf(path) == find_gguf(tmp_path) == path
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_missing_packages_name_the_extra(tmp_path, monkeypatch, missing):
    (tmp_path / "model.gguf").touch()
    find = "quantmla.convert.source.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == missing else object())
    with pytest.raises(CheckpointError, match=rf"no {missing}[\s\S]*quantmla\[demo\]"):
        load_source(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncate", "file is damaged"),
        ("remove", "no index and no single weight file"),
        ("pickle", "no index and no single weight file"),
        ("drop", r"are missing(.|\n)*no model\.layers\.1\.self_attn\.v_proj\.weight"),
    ],
)
def test_damaged_folder_is_one_clear_error(tmp_path, damage, message):
    write_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "drop":
        tensors = load_file(weights)
        del tensors["model.layers.1.self_attn.v_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.unlink()
    if damage == "pickle":  # never read, whatever it holds
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=message):
        load_source(tmp_path)
