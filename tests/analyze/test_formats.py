"""Formats: plain and fused checkpoints, their clip ratios, and what is refused."""

import pytest
import torch

from fusing import block_for, random_transforms
from quantmla.analyze.formats import layer_formats
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import KVScheme
from quantmla.engine.clips import Writer
from quantmla.errors import CheckpointError, SchemeError
from tiny import write_tiny


def test_a_plain_checkpoint_has_the_format_of_the_study_or_the_one_named(tmp_path):
    reader = CheckpointReader(write_tiny(tmp_path))
    assert [one.scheme.name for one in layer_formats(reader, None)] == ["c4r4", "c4r4"]
    (first, _) = layer_formats(reader, KVScheme.parse("c2r3"))
    assert first.scheme.name == "c2r3"
    assert (first.writer, first.rope_online) == (Writer(), None)
    with pytest.raises(SchemeError, match="not quantised"):
        layer_formats(reader, KVScheme.parse("c4r16"))


def test_a_fused_checkpoint_has_its_own(tmp_path):
    source = write_tiny(tmp_path / "source")
    transforms = random_transforms(source, clip=True)
    for transform in transforms:
        transform.rope_online = "hadamard"
    block = block_for(
        source,
        clip=True,
        content={"bits": 2},
        rope_online="hadamard",
        per_layer={"1": {"rope_bits": 8}},
    )
    reader = CheckpointReader(fuse_checkpoint(source, tmp_path / "fused", transforms, block))
    formats = layer_formats(reader, None)
    assert [one.scheme.name for one in formats] == ["c2r4", "c2r8"]
    for one, transform in zip(formats, transforms, strict=True):
        assert one.rope_online == "hadamard"
        assert torch.equal(one.writer.content_clip, transform.content_clip.float())
        assert torch.equal(one.writer.rope_clip, transform.rope_clip.float())
    for one in layer_formats(reader, KVScheme.parse("c4r4")):
        assert (one.scheme.name, one.rope_online) == ("c4r4", "hadamard")
        assert one.writer == Writer()  # what it had belongs to the other bits
    (tmp_path / "fused" / "quantmla.safetensors").unlink()
    with pytest.raises(CheckpointError):
        layer_formats(reader, None)
