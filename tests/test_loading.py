"""Models load complete or not at all; tokenizers and devices that are not there are named."""

import contextlib
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantmla.errors import CheckpointError, QuantMLAError
from quantmla.loading import check_device, load_model, load_tokenizer
from tiny import model_class, write_tiny
from tiny_llama import write_llama

NAME = "model.layers.1.self_attn.kv_b_proj.weight"


def change(folder, name, value=None):
    """Take a tensor out of a one-file checkpoint, or put another one in its place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def load(folder):
    return load_model(model_class("deepseek_v3"), folder, dtype=torch.float32)


@pytest.mark.parametrize("name", [NAME, "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named_and_not_made_up(tmp_path, name):
    change(write_tiny(tmp_path), name)
    with pytest.raises(CheckpointError, match=rf"are missing(.|\n)*no {name}"):
        load(tmp_path)


def test_a_missing_expert_is_refused(tmp_path):
    change(write_tiny(tmp_path, moe=True), "model.layers.1.mlp.experts.2.up_proj.weight")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path)


def test_a_wrong_shape_is_named(tmp_path):
    change(write_tiny(tmp_path), NAME, torch.zeros(3, 4))
    with pytest.raises(CheckpointError, match=rf"another shape(.|\n)*{NAME} \[3, 4\] instead"):
        load(tmp_path)


def test_a_tied_head_need_not_be_stored(tmp_path):
    write_llama(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(transformers.AutoModelForCausalLM, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_settings_of_the_logger_come_back(tmp_path):
    logging = transformers.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(write_tiny(tmp_path))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_missing_tokenizer_is_one_error(tmp_path):
    write_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer that loads"):
        load_tokenizer(tmp_path)


def test_devices():
    check_device("cpu")
    absent = "cuda" if not torch.cuda.is_available() else f"cuda:{torch.cuda.device_count()}"
    for device in (absent, "no-such-device"):
        with pytest.raises(QuantMLAError, match=rf"cannot be used(.|\n)*--device {device}"):
            check_device(device)


def test_code_in_the_folder_never_runs(tmp_path, monkeypatch):
    from tiny_text import write_tiny_with_tokenizer

    folder = write_tiny_with_tokenizer(tmp_path / "model", layers=1)
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    settings.write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(CheckpointError):
        load_tokenizer(folder)
    assert not ran.exists()
