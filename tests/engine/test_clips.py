"""A fused checkpoint folder: the cache follows its block and its clip ratios."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from exact import forward, tokens
from quantmla.config import KVScheme, QuantMLABlock
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
    config = json.loads((folder / "config.json").read_text())
    config["quantmla"] = block.to_config()
    (folder / "config.json").write_text(json.dumps(config))
    clips = {
        f"layers.{i}.{path}_clip": torch.tensor([0.5 + 0.1 * i + (path == "rope") * 0.2])
        for i in range(2)
        for path in ("content", "rope")
    }
    save_file(clips, folder / "quantmla.safetensors")
    return folder


def test_from_config_reads_the_block_and_the_clip_ratios(fused):
    model = load_tiny(fused, "deepseek_v3")
    clips = [(0.5, 0.7), (0.6, 0.8)]
    schemes = [
        KVScheme.parse(name, sink_tokens=SINK, window_tokens=WINDOW) for name in ("c2r4", "c8r4")
    ]
    ids = tokens(70)
    expected = QuantMLACache.from_scheme(schemes, model.config, clips=clips, rope_online="hadamard")
    logits = forward(model, expected, ids)
    as_dict = json.loads((fused / "config.json").read_text())
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
    with pytest.raises(CheckpointError, match="clip ratios of this checkpoint are missing"):
        QuantMLACache.from_config(fused)
