"""A fused checkpoint folder: the cache follows its block and its clip ratios."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from exact import forward, tokens
from fusing import block_for, random_transforms, read_config
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.manifest import writer_hashes
from quantmla.config import KVScheme, QuantMLABlock, canonical_sha256
from quantmla.engine.hf import QuantMLACache
from quantmla.errors import CheckpointError
from tiny import load_tiny, write_tiny

SINK, WINDOW = 4, 8


@pytest.fixture
def fused(tmp_path):
    """A checkpoint folder with a quantmla block and clip ratios."""
    folder = write_tiny(tmp_path / "model", "deepseek_v3")
    block = QuantMLABlock(
        method="quantmla",
        content={"bits": 2},
        rope={"bits": 4},
        rope_pairing="interleaved",
        rope_pairing_cache="half",
        rope_online="hadamard",
        clip=True,
        per_layer={"1": {"content_bits": 8}},
        sink_tokens=SINK,
        window_tokens=WINDOW,
    )
    clips = {
        f"layers.{i}.{path}_clip": torch.tensor([0.5 + 0.1 * i + (path == "rope") * 0.2])
        for i in range(2)
        for path in ("content", "rope")
    }
    save_file(clips, folder / "quantmla.safetensors")
    digest = canonical_sha256(writer_hashes(folder))
    block = block.model_copy(update={"writer_sha256": digest})
    change_config(folder, lambda config: config.update(quantmla=block.to_config()))
    return folder


def change_config(folder, change):
    config = read_config(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_from_config_reads_the_block_and_the_clip_ratios(fused):
    model = load_tiny(fused, "deepseek_v3")
    clips = [(0.5, 0.7), (0.6, 0.8)]
    schemes = [
        KVScheme.parse(name, sink_tokens=SINK, window_tokens=WINDOW) for name in ("c2r4", "c8r4")
    ]
    ids = tokens(70)
    expected = QuantMLACache.from_scheme(schemes, model.config, clips=clips, rope_online="hadamard")
    logits = forward(model, expected, ids)
    as_dict = read_config(fused)
    for config, folder in (
        (model.config, None),
        (fused, None),
        (str(fused), None),
        (as_dict, fused),
    ):
        cache = QuantMLACache.from_config(config, folder=folder)
        assert torch.equal(forward(model, cache, ids), logits)


def test_a_missing_clip_ratio_is_never_replaced(fused):
    # field report FR-003
    path = fused / "quantmla.safetensors"
    clips = load_file(path)
    save_file({k: v for k, v in clips.items() if k != "layers.1.rope_clip"}, path)
    with pytest.raises(CheckpointError, match="cache layer 1 has no usable rope clip ratio"):
        QuantMLACache.from_config(fused)
    for bad in (torch.ones(2), torch.tensor([0.0]), torch.tensor([1.5]), torch.tensor([torch.nan])):
        save_file(clips | {"layers.0.content_clip": bad}, path)
        with pytest.raises(CheckpointError, match="cache layer 0 has no usable content"):
            QuantMLACache.from_config(fused)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        QuantMLACache.from_config(fused)
    path.unlink()
    with pytest.raises(CheckpointError, match="what the cache writer of this checkpoint needs"):
        QuantMLACache.from_config(fused)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two fused folders of different models with equal sizes and other clip ratios."""
    folder = tmp_path_factory.mktemp("two")
    for seed, name in enumerate(("a", "b")):
        source = write_tiny(folder / f"{name}-source", seed=seed)
        transforms = random_transforms(source, clip=True, seed=seed)
        transforms[0].content_clip *= 1 - 0.1 * seed
        fuse_checkpoint(source, folder / name, transforms, block_for(source))
    return folder


@pytest.fixture
def pair(two, tmp_path):
    shutil.copytree(two, tmp_path / "two")
    return tmp_path / "two" / "a", tmp_path / "two" / "b"


def test_what_fusing_wrote_is_accepted(pair):
    for folder in pair:
        assert len(QuantMLACache.from_config(folder).layers) == 2
    block = QuantMLABlock.from_config(read_config(pair[0]))
    assert block.writer_sha256 == canonical_sha256(writer_hashes(pair[0]))
    assert block.norm_eps == 1e-6


def test_clip_ratios_of_another_model_are_refused(pair):
    first, second = pair
    shutil.copy(second / "quantmla.safetensors", first)
    for config in (first, read_config(first)):
        with pytest.raises(CheckpointError, match="tensors of another checkpoint"):
            QuantMLACache.from_config(config, folder=first)
    with pytest.raises(CheckpointError, match="does not belong"):
        QuantMLACache.from_config(read_config(second), folder=first)


def test_a_block_copied_to_another_model_is_refused(pair):
    first, second = pair
    block = read_config(first)["quantmla"]
    change_config(second, lambda config: config.update(quantmla=block))
    shutil.copy(first / "quantmla.safetensors", second)
    with pytest.raises(CheckpointError, match="does not belong") as error:
        QuantMLACache.from_config(second)
    assert "fingerprint" in str(error.value)
    # without a manifest, what the config shows is all there is
    (second / "quantmla_manifest.json").unlink()
    change_config(second, lambda config: config.update(rope_interleave=False))
    with pytest.raises(CheckpointError, match=r"quantmla\.rope_pairing"):
        QuantMLACache.from_config(second)
    change_config(second, lambda config: config.update(rope_interleave=True, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="tensors of 1 layers"):
        QuantMLACache.from_config(second)


def test_a_block_for_another_norm_eps_is_refused(pair):
    change_config(pair[0], lambda config: config["quantmla"].update(norm_eps=1e-5))
    with pytest.raises(CheckpointError, match=r"quantmla\.norm_eps"):
        QuantMLACache.from_config(pair[0])


def test_a_block_that_names_no_ratios_is_refused(fused):
    change_config(fused, lambda config: config["quantmla"].update(writer_sha256=None))
    with pytest.raises(CheckpointError, match="another checkpoint"):
        QuantMLACache.from_config(fused)


@pytest.mark.parametrize("folder", [None, "", "no/such/folder", "config.json"])
def test_the_current_folder_never_stands_in_for_an_unknown_one(fused, folder, monkeypatch):
    model = load_tiny(fused, "deepseek_v3")
    config = read_config(fused)
    monkeypatch.chdir(fused)
    with pytest.raises(CheckpointError, match="folder of this checkpoint is not known"):
        QuantMLACache.from_config(config, folder=folder)
    model.config._name_or_path = folder or ""
    with pytest.raises(CheckpointError, match="folder of this checkpoint is not known"):
        QuantMLACache.from_config(model.config)
    if folder is not None:
        with pytest.raises(CheckpointError, match="folder of this checkpoint is not known"):
            QuantMLACache.from_config(folder)


def test_without_clip_ratios_no_folder_is_needed(fused):
    change_config(fused, lambda config: config["quantmla"].update(clip=False))
    assert len(QuantMLACache.from_config(read_config(fused)).layers) == 2
