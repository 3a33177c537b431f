"""Verification passes on what was written and names everything that was changed since."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusing import block_for, random_transforms, read_config
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.checkpoint.verify import verify
from quantmla.errors import CheckpointError, SchemeError
from quantmla.transform.layer import LayerTransform
from tiny import TINY_IDS, TINY_KWARGS, write_tiny

KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    source = write_tiny(folder / "source", max_shard_size="30KB", q_lora_rank=24)
    (source / "tokenizer.json").write_text("{}")
    transforms = random_transforms(source, clip=True)
    fuse_checkpoint(source, folder / "fused", transforms, block_for(source))
    return folder


@pytest.fixture
def pair(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path / "fused", tmp_path / "source"


def change_tensor(folder, name, change):
    shard = folder / CheckpointReader(folder).shard_of(name)
    tensors = load_file(shard)
    tensors[name] = change(tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})
    return shard.name


def rewrite(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refresh_hashes(folder):
    """What an attacker or a careless tool would do: make the manifest agree with the files."""
    import hashlib

    def change(manifest):
        reader = CheckpointReader(folder)
        for name in manifest["files"]:
            manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in manifest["tensors"]:
            manifest["tensors"][name]["sha256"] = reader.sha256(name)

    rewrite(folder / "quantmla_manifest.json", change)


@pytest.mark.parametrize("kwargs", TINY_KWARGS, ids=TINY_IDS)
def test_every_family_verifies(tmp_path, kwargs):
    source = write_tiny(tmp_path / "source", **kwargs)
    fused = fuse_checkpoint(
        source, tmp_path / "fused", random_transforms(source), block_for(source)
    )
    report = verify(fused, source)
    assert report.ok, report.failures
    layers = 4 if kwargs["family"] == "longcat_flash" else 2
    assert len(report.layer_errors) == layers
    assert 0 < max(report.layer_errors) < report.tolerance == 1e-5


def test_without_a_source(pair):
    report = verify(pair[0])
    assert report.ok
    assert report.fingerprint == read_config(pair[0])["quantmla"]["fingerprint"]
    assert report.layer_errors == []
    assert report.files > 5
    assert json.loads(json.dumps(report.to_json()))["ok"]


def test_identity_checkpoint_has_no_error_at_all(tmp_path):
    source = write_tiny(tmp_path / "source", dtype=torch.bfloat16)
    fused = fuse_checkpoint(source, tmp_path / "fused", [LayerTransform()] * 2, block_for(source))
    report = verify(fused, source)
    assert report.ok
    assert report.layer_errors == [0.0, 0.0]
    assert report.tensors == len(CheckpointReader(source).tensor_names)


def test_bfloat16_stays_within_tolerance(tmp_path):
    source = write_tiny(tmp_path / "source", dtype=torch.bfloat16)
    fused = fuse_checkpoint(
        source, tmp_path / "fused", random_transforms(source), block_for(source)
    )
    report = verify(fused, source)
    assert report.ok
    assert max(report.layer_errors) < 0.02


def failures(pair, *words, source=True):
    report = verify(pair[0], pair[1] if source else None)
    assert not report.ok
    text = "\n".join(report.failures)
    for word in words:
        assert word in text
    return report


@pytest.mark.parametrize("source", [True, False])
def test_changed_untouched_tensor(pair, source):
    shard = change_tensor(pair[0], HEAD, lambda t: t + 1e-3)
    failures(pair, shard, "changed since it was written", source=source)


def test_changed_untouched_tensor_with_a_matching_manifest(pair):
    change_tensor(pair[0], HEAD, lambda t: t + 1e-3)
    refresh_hashes(pair[0])
    assert verify(pair[0]).ok
    failures(pair, f"{HEAD}: differs from the source although not fused")


def test_changed_fused_tensor(pair):
    change_tensor(pair[0], KV_B, lambda t: t * 1.001)
    failures(pair, KV_B, "fingerprint", source=False)


def test_a_fused_layer_that_computes_something_else(pair):
    """Files, manifest and fingerprint agree: only the identity can notice."""
    fused, _ = pair
    change_tensor(fused, KV_B, lambda t: t.flip(1))
    refresh_hashes(fused)
    mark = verify(fused).fingerprint
    rewrite(fused / "config.json", lambda c: c["quantmla"].update(fingerprint=mark))
    rewrite(fused / "quantmla_manifest.json", lambda m: m.update(fingerprint=mark))
    refresh_hashes(fused)
    assert verify(fused).ok
    report = failures(pair, "cache layer 1: differs from the source")
    assert report.layer_errors[1] > 1e-2 > report.layer_errors[0]


def test_changed_bits_in_the_config(pair):
    rewrite(pair[0] / "config.json", lambda c: c["quantmla"]["content"].update(bits=2))
    failures(pair, "fingerprint", "config.json: changed", source=False)


def test_another_norm_eps_in_the_config(pair):
    assert read_config(pair[0])["quantmla"]["norm_eps"] == 1e-6
    rewrite(pair[0] / "config.json", lambda c: c["quantmla"].update(norm_eps=1e-5))
    failures(pair, "norm_eps: config.json says 1e-05, the loader uses 1e-06", source=False)


def test_a_block_that_names_other_clip_ratios(pair):
    for digest in (None, "0" * 64):
        rewrite(pair[0] / "config.json", lambda c: c["quantmla"].update(writer_sha256=digest))  # noqa: B023
        failures(pair, "not the file that config.json names", "fingerprint", source=False)


def test_changed_model_setting(pair):
    rewrite(pair[0] / "config.json", lambda c: c.update(rope_interleave=False))
    failures(pair, "config.json: differs from the source")


def test_clip_tensor_of_one_layer_missing(pair):
    path = pair[0] / "quantmla.safetensors"
    tensors = load_file(path)
    del tensors["layers.1.content_clip"]
    save_file(tensors, path)
    failures(pair, "layers.1.content_clip", "fingerprint", source=False)


def test_clip_file_missing_or_changed(pair):
    path = pair[0] / "quantmla.safetensors"
    tensors = load_file(path)
    tensors["layers.1.content_clip"] *= 2
    save_file(tensors, path)
    failures(pair, "quantmla.safetensors: changed", source=False)
    path.unlink()
    failures(pair, "quantmla.safetensors: missing", source=False)


def test_side_files(pair):
    (pair[0] / "README.md").write_text("a better card")  # cards are meant to be edited
    assert verify(pair[0]).ok
    (pair[0] / "tokenizer.json").write_text("[]")
    failures(pair, "tokenizer.json: changed", source=False)
    (pair[0] / "tokenizer.json").unlink()
    failures(pair, "tokenizer.json: missing", source=False)


def test_another_source(pair, tmp_path):
    other = write_tiny(tmp_path / "other", max_shard_size="30KB", q_lora_rank=24, seed=1)
    failures((pair[0], other), "differs from the source")
    with pytest.raises(CheckpointError, match="already fused"):
        verify(pair[0], pair[0])


def test_not_a_fused_checkpoint(pair):
    with pytest.raises(SchemeError, match="no quantmla block"):
        verify(pair[1])


def test_manifest_missing_or_of_another_version(pair):
    path = pair[0] / "quantmla_manifest.json"
    rewrite(path, lambda m: m.update(format=9))
    with pytest.raises(CheckpointError, match="unknown format"):
        verify(pair[0])
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        verify(pair[0])


def test_manifest_that_points_outside(pair):
    path = pair[0] / "quantmla_manifest.json"
    rewrite(path, lambda m: m["files"].update({"../source/config.json": "0" * 64}))
    failures(pair, "../source/config.json: missing", source=False)
