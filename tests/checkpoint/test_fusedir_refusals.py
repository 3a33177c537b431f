"""Whatever cannot be fused gives one clear error and leaves nothing behind."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusing import block_for, random_transforms, read_config, snapshot
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.errors import CalibrationError, CheckpointError, SchemeError, UnsupportedModelError
from quantmla.transform.layer import LayerTransform
from tiny import write_tiny

KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def refused(fuse, error, *words, **kwargs):
    with pytest.raises(error) as caught:
        fuse(**kwargs)
    for word in words:
        assert word in str(caught.value)


def assert_nothing_left(tmp_path):
    out = tmp_path / "out"
    assert not out.exists() or list(out.iterdir()) == []


def test_refuses_a_fused_source(fuse, tmp_path):
    first = fuse()
    with pytest.raises(CheckpointError, match="already fused"):
        fuse_checkpoint(first, tmp_path / "twice", random_transforms(first), block_for(first))


def test_refuses_a_folder_that_holds_something(source, fuse, tmp_path):
    out = tmp_path / "out" / "fused"
    out.mkdir(parents=True)
    fuse()  # empty is fine
    before = snapshot(out)
    refused(fuse, CheckpointError, "already holds something")
    refused(fuse, CheckpointError, "overlap", out=source / "fused")
    refused(fuse, CheckpointError, "overlap", out=source)
    refused(fuse, CheckpointError, "overlap", out=source.parent)
    refused(fuse, CheckpointError, "a file", out=out / "config.json")
    assert snapshot(out) == before


def test_refuses_other_families(source, fuse):
    config = read_config(source) | {"model_type": "llama", "kv_lora_rank": None}
    transforms = [LayerTransform()] * 2
    block = block_for(source)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="llama"):
        fuse_checkpoint(source, source.parent / "fused", transforms, block)


def test_refuses_transforms_that_do_not_fit(source, fuse, tmp_path):
    transforms = random_transforms(source)
    refused(fuse, CalibrationError, "one transform a cache layer", transforms=transforms[:1])
    transforms[1].content_scale = torch.ones(64)
    refused(fuse, CalibrationError, "cache layer 1: content_scale", transforms=transforms)
    transforms[1].content_scale = None
    transforms[1].rope_online = "hadamard"
    refused(fuse, CalibrationError, "cache layer 1", "hadamard", transforms=transforms)
    with pytest.raises(CalibrationError, match="rope_pairing"):
        fuse_checkpoint(
            source,
            tmp_path / "x",
            random_transforms(source),
            block_for(source, rope_pairing="half"),
        )
    assert_nothing_left(tmp_path)


def test_refuses_a_scheme_that_does_not_pack(tmp_path):
    source = write_tiny(tmp_path / "source", qk_rope_head_dim=2)
    with pytest.raises(SchemeError):
        fuse_checkpoint(
            source,
            tmp_path / "out" / "fused",
            random_transforms(source),
            block_for(source, rope={"bits": 2}),
        )
    assert_nothing_left(tmp_path)


def test_nan_in_a_weight_is_named_and_leaves_nothing(source, fuse, tmp_path):
    shard = CheckpointReader(source).shard_of(KV_A)
    tensors = load_file(source / shard)
    tensors[KV_A][3, 3] = float("nan")
    save_file(tensors, source / shard, metadata={"format": "pt"})
    refused(fuse, CheckpointError, "NaN or Inf", KV_A, shard)
    assert_nothing_left(tmp_path)


def test_overflow_of_the_stored_dtype_is_named(tmp_path):
    source = write_tiny(tmp_path / "source", dtype=torch.float16)
    transforms = random_transforms(source)
    transforms[1].content_scale = torch.full((32,), 1e-6, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.kv_b_proj"):
        fuse_checkpoint(source, tmp_path / "out" / "fused", transforms, block_for(source))
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("number", "text", "word"),
    [(28, "No space left on device", "disk is full"), (30, "Read-only", "not writable")],
)
@pytest.mark.parametrize("after_calls", [0, 3, 12])
def test_storage_failures_leave_nothing(
    fuse, tmp_path, monkeypatch, number, text, word, after_calls
):
    real, calls = os.fsync, []

    def failing(handle):
        calls.append(handle)
        if len(calls) > after_calls:
            raise OSError(number, text)
        real(handle)

    for module in ("files", "checkpoint.writer"):
        monkeypatch.setattr(f"quantmla.{module}.os.fsync", failing)
    refused(fuse, CheckpointError, word)
    assert_nothing_left(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder(fuse, tmp_path):
    (tmp_path / "out").mkdir(mode=0o500)
    refused(fuse, CheckpointError, "not writable")
    assert_nothing_left(tmp_path)


def test_a_second_run_into_a_locked_folder(fuse, tmp_path):
    from quantmla.checkpoint.lock import folder_lock

    with folder_lock(tmp_path / "out" / "fused"):
        refused(fuse, CheckpointError, "another run", str(os.getpid()))
