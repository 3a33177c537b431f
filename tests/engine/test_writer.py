"""Shifts and error feedback of the cache writer: exact where they must be, read from the folder."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from exact import forward, tokens
from fusing import block_for, random_transforms, read_config
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.verify import verify
from quantmla.config import QuantMLABlock
from quantmla.dims import MLADims
from quantmla.engine.clips import Writer
from quantmla.engine.hf import QuantMLACache
from quantmla.errors import CheckpointError
from quantmla.quant.feedback import Feedback
from tiny import load_tiny, write_tiny


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "model", "deepseek_v3")


def extended(folder, seed=0):
    """Random transforms with shifts and feedback."""
    dims = MLADims.from_config(read_config(folder))
    generator = torch.Generator().manual_seed(seed)
    rope = dims.qk_rope_head_dim
    result = []
    for transform in random_transforms(folder):
        rows = torch.randn(2 * rope, rope, generator=generator)
        feedback = Feedback.of(rows.T @ rows)
        result.append(
            dataclasses.replace(
                transform,
                content_shift=torch.randn(dims.kv_lora_rank, generator=generator),
                rope_shift=torch.randn(rope, generator=generator),
                rope_order=feedback.order,
                rope_feedback=feedback.matrix,
            )
        )
    return result


@pytest.fixture
def fused(folder, tmp_path):
    out = tmp_path / "fused"
    fuse_checkpoint(folder, out, extended(folder), block_for(folder))
    return out


def writers_of(folder):
    return [
        Writer(t.content_clip, t.rope_clip, t.content_shift, t.rope_shift, t.feedback)
        for t in extended(folder)
    ]


def test_a_shift_changes_nothing_that_is_not_rounded(folder):
    model, ids = load_tiny(folder, "deepseek_v3"), tokens(150)
    settings = {"row_dtype": torch.float32}
    plain = QuantMLACache.from_scheme("c16r16", model.config, **settings)
    shifted = [dataclasses.replace(w, feedback=None) for w in writers_of(folder)]
    moved = QuantMLACache.from_scheme("c16r16", model.config, writers=shifted, **settings)
    plain, moved = forward(model, plain, ids), forward(model, moved, ids)
    assert not torch.equal(moved, plain)  # the shifts are at work
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-4)


def test_a_fused_folder_brings_shifts_and_feedback(fused):
    model = load_tiny(fused, "deepseek_v3")
    ids = tokens(150)
    block = QuantMLABlock.from_config(model.config)
    assert (block.format, block.shift, block.rope_feedback) == (2, True, True)
    read = forward(model, QuantMLACache.from_config(fused), ids)
    scheme = block.scheme(0)
    given = QuantMLACache.from_scheme(scheme, model.config, writers=writers_of(fused))
    assert torch.equal(read, forward(model, given, ids))
    without = [dataclasses.replace(w, feedback=None) for w in writers_of(fused)]
    plain = QuantMLACache.from_scheme(scheme, model.config, writers=without)
    assert not torch.equal(read, forward(model, plain, ids))
    assert verify(fused).ok


def test_the_cache_of_a_shifted_model_does_not_depend_on_the_cut(fused):
    model, ids = load_tiny(fused, "deepseek_v3"), tokens(150)
    whole = forward(model, QuantMLACache.from_config(fused), ids)
    cache = QuantMLACache.from_config(fused)
    parts = [forward(model, cache, ids[:, :70]), forward(model, cache, ids[:, 70:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["content_shift", "rope_order", "rope_feedback"])
def test_nothing_of_the_writer_is_replaced_by_a_default(fused, name):
    path = fused / "quantmla.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != f"layers.1.{name}"}, path)
    with pytest.raises(CheckpointError, match="cache layer 1 has no usable"):
        QuantMLACache.from_config(fused)
    save_file({**tensors, f"layers.1.{name}": tensors[f"layers.1.{name}"][:-1]}, path)
    with pytest.raises(CheckpointError, match="cache layer 1 has no usable"):
        QuantMLACache.from_config(fused)
    assert not verify(fused).ok
