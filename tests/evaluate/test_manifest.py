import json
import shutil

import torch
import transformers

import quantmla
from quantmla.evaluate import manifest
from quantmla.evaluate.manifest import build_manifest, checkpoint_sha256, model_hashes


def test_manifest_says_what_is_needed_to_repeat(model_folder):
    built = build_manifest(
        models={"model": model_folder},
        texts={"t": "0" * 64},
        seed=7,
        device="cpu",
        recipes={"r": "1" * 64},
        tokenizer_sha256="2" * 64,
    )
    assert json.loads(json.dumps(built)) == built
    assert built["quantmla"] == quantmla.__version__
    assert built["torch"] == torch.__version__
    assert built["transformers"] == transformers.__version__
    assert built["device"].startswith("cpu")
    assert (built["seed"], built["texts"], built["recipes"]["r"]) == (7, {"t": "0" * 64}, "1" * 64)
    assert built["python"].startswith("3.")
    assert {"command", "created", "revision"} <= set(built)


def test_model_hash_sees_one_changed_byte(model_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    before, digest = model_hashes(copy), checkpoint_sha256(copy)
    assert digest == checkpoint_sha256(model_folder)
    assert before["weights_sha256"] == model_hashes(model_folder)["weights_sha256"]
    shard = copy / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    after = model_hashes(copy)
    assert after["weights_sha256"] != before["weights_sha256"]
    assert checkpoint_sha256(copy) != digest
    assert after["config_sha256"] == before["config_sha256"]


def test_large_weights_are_not_read_and_that_is_said(model_folder, monkeypatch):
    monkeypatch.setattr(manifest, "HASH_WEIGHTS_UP_TO_BYTES", 10)
    monkeypatch.setattr(manifest, "sha256_file", None)
    assert model_hashes(model_folder)["weights_hashed"] == "names and sizes"
