"""Every way in which files can be wrong gives one error that names the file or tensor."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmla.checkpoint.header import MAX_HEADER_BYTES, read_header
from quantmla.checkpoint.reader import INDEX_NAME, CheckpointReader
from quantmla.errors import CheckpointError
from tiny import write_tiny

KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model", max_shard_size="30KB")


@pytest.fixture
def folder(pristine, tmp_path):
    import shutil

    return shutil.copytree(pristine, tmp_path / "model")


def rewrite_index(folder, change):
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def replace_tensor(folder, name, tensor, new_name=None):
    shard = json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]
    tensors = load_file(folder / shard)
    del tensors[name]
    if tensor is not None:
        tensors[new_name or name] = tensor
    save_file(tensors, folder / shard, metadata={"format": "pt"})
    return shard


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(folder).get_float(KV_B, (96, 32))
    for word in words:
        assert word in str(caught.value)


def test_reads_what_safetensors_reads(pristine):
    reader = CheckpointReader(pristine)
    assert len(reader.shards) > 3
    expected = {}
    for shard in reader.shards:
        expected |= load_file(pristine / shard)
    assert set(reader.tensor_names) == set(expected)
    for name in reader.tensor_names:
        assert torch.equal(reader.get(name), expected[name])
        assert reader.shape_of(name) == tuple(expected[name].shape)
        assert reader.dtype_of(name) == "F32"
    assert not reader.is_fused


def test_hash_is_of_the_stored_bytes(pristine):
    import hashlib

    reader = CheckpointReader(pristine)
    data = reader.get(KV_B).numpy().tobytes()
    assert reader.sha256(KV_B) == hashlib.sha256(data).hexdigest()


def test_single_file_without_index(tmp_path):
    reader = CheckpointReader(write_tiny(tmp_path / "model"))
    assert reader.shards == ("model.safetensors",)
    assert reader.shard_of(KV_B) == "model.safetensors"


def test_missing_folder(tmp_path):
    refused(tmp_path / "absent", "no such checkpoint folder", "absent")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": \xff}'.encode("latin-1")])
def test_broken_config(folder, content):
    data = content if isinstance(content, bytes) else content.encode()
    (folder / "config.json").write_bytes(data)
    refused(folder, "config.json cannot be read")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


def test_no_weights_or_only_pickled_ones(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "no index and no single weight file", "no safetensors file")


def test_missing_shard(folder):
    shard = CheckpointReader(folder).shards[1]
    (folder / shard).unlink()
    refused(folder, "not there", shard)


def test_stray_shard(folder):
    save_file({"old": torch.ones(1)}, folder / "model-00099-of-00099.safetensors")
    refused(folder, "does not use", "model-00099-of-00099.safetensors")


def test_shards_without_their_index(folder):
    (folder / INDEX_NAME).unlink()
    refused(folder, "no index")


def test_index_with_a_path_outside_the_folder(folder):
    rewrite_index(folder, lambda i: i["weight_map"].update({KV_B: "../model.safetensors"}))
    refused(folder, "../model.safetensors")


def test_index_that_names_another_shard(folder):
    other = CheckpointReader(folder).shard_of("lm_head.weight")
    rewrite_index(folder, lambda i: i["weight_map"].update({KV_B: other}))
    refused(folder, "disagree", KV_B)


def test_tensor_in_a_file_but_not_in_the_index(folder):
    rewrite_index(folder, lambda i: i["weight_map"].pop(KV_B))
    refused(folder, "disagree", KV_B, "index says nothing")


def test_tensor_in_the_index_but_in_no_file(folder):
    replace_tensor(folder, KV_B, None)
    refused(folder, "disagree", KV_B, "file says nothing")


def test_tensor_in_two_files(folder):
    reader = CheckpointReader(folder)
    other = reader.shard_of("lm_head.weight")
    tensors = load_file(folder / other) | {KV_B: reader.get(KV_B).clone()}
    save_file(tensors, folder / other)
    refused(folder, "stored twice", KV_B, other)


def test_tensor_missing_everywhere(folder):
    replace_tensor(folder, KV_B, None)
    rewrite_index(folder, lambda i: i["weight_map"].pop(KV_B))
    refused(folder, "missing", KV_B, "model.layers.0.self_attn.kv_b_proj.weight")


def test_wrong_shape(folder):
    shard = replace_tensor(folder, KV_B, torch.ones(96, 31))
    refused(folder, "shape", KV_B, shard, "[96, 32]", "[96, 31]")


def test_integer_weight(folder):
    replace_tensor(folder, KV_B, torch.ones(96, 32, dtype=torch.int32))
    refused(folder, "integer format", KV_B, "I32")


def test_fp8_weight(folder):
    replace_tensor(folder, KV_B, torch.ones(96, 32).to(torch.float8_e4m3fn))
    refused(folder, "FP8", KV_B, "F8_E4M3", "BF16 release")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_inf_are_named(folder, value):
    bad = torch.ones(96, 32)
    bad[5, 5] = float(value)
    shard = replace_tensor(folder, KV_B, bad)
    refused(folder, "NaN or Inf", KV_B, shard, "1 of 3072")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_shard(folder, keep):
    shard = CheckpointReader(folder).shard_of(KV_B)
    data = (folder / shard).read_bytes()
    (folder / shard).write_bytes(data[:keep])
    refused(folder, "damaged", shard)


def test_trailing_bytes(folder):
    shard = CheckpointReader(folder).shard_of(KV_B)
    with (folder / shard).open("ab") as file:
        file.write(b"x")
    refused(folder, "foreign bytes", shard)


@pytest.mark.parametrize("header_bytes", [0, MAX_HEADER_BYTES + 1, 2**63])
def test_header_size_is_bounded_before_it_is_read(tmp_path, header_bytes):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", header_bytes))
        file.truncate(MAX_HEADER_BYTES * 2)  # sparse
    with pytest.raises(CheckpointError, match=f"{header_bytes} bytes"):
        read_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        "text",
    ],
)
def test_damaged_headers(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(path)
