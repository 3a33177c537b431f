"""Fused folders: same logits in stock transformers, untouched bytes elsewhere, all or nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusing import block_for, random_transforms, read_config, snapshot
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.plan import AttentionLayers
from quantmla.checkpoint.reader import INDEX_NAME, CheckpointReader
from quantmla.config import KVScheme, QuantMLABlock, Recipe
from quantmla.transform.layer import LayerTransform
from tiny import TINY_IDS, TINY_KWARGS, load_tiny, write_tiny

KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
TOKENS = torch.tensor([[1, 5, 17, 40, 3, 88, 2, 61, 9, 33, 70, 12]])


@torch.no_grad()
def logits(folder, family):
    return load_tiny(folder, family, dtype=torch.float32)(TOKENS).logits


@pytest.mark.parametrize("kwargs", TINY_KWARGS, ids=TINY_IDS)
def test_every_family_keeps_its_logits(tmp_path, kwargs):
    source = write_tiny(tmp_path / "source", **kwargs)
    fused = fuse_checkpoint(
        source, tmp_path / "fused", random_transforms(source), block_for(source)
    )
    before = logits(source, kwargs["family"])
    after = logits(fused, kwargs["family"])
    assert before.std() > 0.1
    assert (after - before).abs().max() < 2e-5
    old, new = CheckpointReader(source), CheckpointReader(fused)
    changed = [n for n in old.tensor_names if new.sha256(n) != old.sha256(n)]
    assert set(changed) == set(AttentionLayers.of(old).tensor_names())


@pytest.mark.parametrize("interleave", [True, False])
def test_a_wrong_pairing_breaks_the_logits(tmp_path, interleave, monkeypatch):
    source = write_tiny(tmp_path / "source", rope_interleave=interleave, q_lora_rank=24)
    wrong = "half" if interleave else "interleaved"
    monkeypatch.setattr("quantmla.checkpoint.families.Family.rope_pairing", lambda *_: wrong)
    fused = fuse_checkpoint(
        source, tmp_path / "fused", random_transforms(source), block_for(source)
    )
    difference = logits(fused, "deepseek_v3") - logits(source, "deepseek_v3")
    assert difference.abs().max() > 1e-2


def test_stock_transformers_without_quantmla_gives_the_same_logits(source, fuse, tmp_path):
    script = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    out = model(torch.tensor([[1, 5, 17, 40, 3, 88, 2, 61, 9, 33, 70, 12]])).logits
assert not any(name.split(".")[0] == "quantmla" for name in sys.modules)
torch.set_printoptions(precision=10)
from safetensors.torch import save_file
save_file({"logits": out}, sys.argv[2])
"""
    transforms = random_transforms(source, clip=True)  # quantmla.safetensors lies in the folder
    fused = fuse(transforms=transforms)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-W", "error::FutureWarning", "-c", script]
    subprocess.run(
        [*command, str(fused), str(tmp_path / "logits")], check=True, env=env, cwd=tmp_path
    )
    got = load_file(tmp_path / "logits")["logits"]
    assert (got - logits(source, "deepseek_v3")).abs().max() < 2e-5


def test_files_of_the_result(source, fuse):
    before = snapshot(source)
    recipe = Recipe(scheme=KVScheme.parse("c4r4"))
    fused = fuse(recipe=recipe)
    assert snapshot(source) == before
    assert [p.name for p in fused.parent.iterdir()] == ["fused"]  # no lock, no temporary folder
    names = set(snapshot(fused))
    copied = {"tokenizer.json", "generation_config.json", "inference/run.py", "README.base.md"}
    ours = {"config.json", "README.md", "quantmla_manifest.json", INDEX_NAME}
    assert names == copied | ours | set(CheckpointReader(source).shards)
    config = read_config(fused)
    block = QuantMLABlock.from_config(config)
    assert {k: v for k, v in config.items() if k != "quantmla"} == read_config(source)
    assert list(config)[:3] == list(read_config(source))[:3]
    assert block.recipe_sha256 == recipe.sha256()
    assert not block.clip
    card = (fused / "README.md").read_text()
    for text in ("base_model: base-model", "c4r4", block.fingerprint, "evaluate again", "| 192 |"):
        assert text in card
    assert str(source.parent) not in card  # no paths of this machine
    index = json.loads((fused / INDEX_NAME).read_text())
    tensors = CheckpointReader(fused).tensors.values()
    assert index["metadata"]["total_size"] == sum(t.end - t.start for t in tensors)


def test_untouched_shards_are_linked_and_others_keep_everything_else(source, fuse):
    transforms = [LayerTransform(), random_transforms(source)[1]]
    fused = fuse(transforms=transforms)
    old, new = CheckpointReader(source), CheckpointReader(fused)
    layer_1 = "model.layers.1.self_attn."
    fusable = ("kv_a_proj", "kv_a_layernorm", "kv_b_proj", "q_proj")
    touched = {n for n in old.tensor_names for f in fusable if n.startswith(layer_1 + f)}
    assert len(touched) == 4
    assert len({old.shard_of(n) for n in touched}) > 1
    assert new.tensor_names == old.tensor_names  # names, shards and order
    for name in old.tensor_names:
        assert new.info(name) == old.info(name)
        assert (new.sha256(name) == old.sha256(name)) == (name not in touched)
    for shard in old.shards:
        linked = (source / shard).samefile(fused / shard)
        assert linked == all(old.shard_of(n) != shard for n in touched)


def test_identity_transforms_change_no_byte_of_the_weights(source, fuse):
    fused = fuse(transforms=[LayerTransform(), LayerTransform()])
    for shard in CheckpointReader(source).shards:
        assert (source / shard).samefile(fused / shard)


def test_copies_where_links_are_not_possible(source, fuse, monkeypatch):
    def cross_device(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("quantmla.checkpoint.writer.os.link", cross_device)
    fused = fuse(transforms=[LayerTransform(), LayerTransform()])
    for shard in CheckpointReader(source).shards:
        assert not (source / shard).samefile(fused / shard)
        assert (source / shard).read_bytes() == (fused / shard).read_bytes()


def test_bfloat16_and_symlinked_snapshot(tmp_path):
    """Hub snapshots are symlinks to blobs; the result must not depend on them."""
    blobs = write_tiny(tmp_path / "blobs", dtype=torch.bfloat16, max_shard_size="30KB")
    source = tmp_path / "snapshot"
    source.mkdir()
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    transforms = [LayerTransform(), random_transforms(source)[1]]
    fused = fuse_checkpoint(source, tmp_path / "fused", transforms, block_for(source))
    assert not any(p.is_symlink() for p in fused.iterdir())
    assert {i.dtype for i in CheckpointReader(fused).tensors.values()} == {"BF16"}


def test_clip_ratios_are_stored_for_every_layer(source, fuse):
    transforms = random_transforms(source, clip=True)
    transforms[0].rope_clip = None
    fused = fuse(transforms=transforms)
    stored = load_file(fused / "quantmla.safetensors")
    assert set(stored) == {f"layers.{i}.{p}_clip" for i in (0, 1) for p in ("content", "rope")}
    assert stored["layers.1.content_clip"].tolist() == pytest.approx([0.9])
    assert stored["layers.0.rope_clip"].tolist() == [1.0]
    assert QuantMLABlock.from_config(read_config(fused)).clip


def test_single_file_checkpoint_with_clips_gets_an_index(tmp_path):
    source = write_tiny(tmp_path / "source")
    fused = fuse_checkpoint(
        source, tmp_path / "fused", random_transforms(source, clip=True), block_for(source)
    )
    index = json.loads((fused / INDEX_NAME).read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert (logits(fused, "deepseek_v3") - logits(source, "deepseek_v3")).abs().max() < 2e-5


def test_equal_inputs_give_equal_bytes(fuse, tmp_path):
    a, b = fuse(out=tmp_path / "a" / "fused"), fuse(out=tmp_path / "b" / "fused")
    assert snapshot(a) == snapshot(b)


def test_fingerprint_follows_weights_bits_and_clips(source, tmp_path):
    def mark(name, transforms, **changes):
        out = fuse_checkpoint(source, tmp_path / name, transforms, block_for(source, **changes))
        return read_config(out)["quantmla"]["fingerprint"]

    transforms = random_transforms(source)
    base = mark("base", transforms)
    marks = [
        base,
        mark("seed", random_transforms(source, seed=1)),
        mark("bits", transforms, content={"bits": 2}),
        mark("clip", random_transforms(source, clip=True)),
        mark("identity", [LayerTransform(), LayerTransform()]),
    ]
    assert len(set(marks)) == len(marks)
    assert mark("recipe", transforms, recipe_sha256="0" * 64) == base


def test_tied_embeddings_stay_tied(tmp_path):
    source = write_tiny(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = read_config(source) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    fused = fuse_checkpoint(
        source, tmp_path / "fused", random_transforms(source), block_for(source)
    )
    assert "lm_head.weight" not in CheckpointReader(fused).tensor_names
    assert (logits(fused, "deepseek_v3") - logits(source, "deepseek_v3")).abs().max() < 2e-5
