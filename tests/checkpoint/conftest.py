"""A tiny sharded checkpoint and a call that fuses it."""

import shutil

import pytest

from fusing import block_for, random_transforms
from quantmla.checkpoint.fusedir import fuse_checkpoint
from tiny import write_tiny


@pytest.fixture(scope="session")
def base_model(tmp_path_factory):
    """A sharded checkpoint with side files; the tensors of a layer lie in several shards."""
    folder = write_tiny(tmp_path_factory.mktemp("source") / "base-model", max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("the base card")
    (folder / "inference").mkdir()
    (folder / "inference" / "run.py").write_text("pass")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("hidden")
    (folder / "pytorch_model.bin").write_bytes(b"pickled twin of the weights")
    return folder


@pytest.fixture
def source(base_model, tmp_path):
    return shutil.copytree(base_model, tmp_path / "in" / "base-model")


@pytest.fixture
def fuse(source, tmp_path):
    def run(out=None, transforms=None, **kwargs):
        transforms = random_transforms(source) if transforms is None else transforms
        return fuse_checkpoint(
            source, out or tmp_path / "out" / "fused", transforms, block_for(source), **kwargs
        )

    return run
