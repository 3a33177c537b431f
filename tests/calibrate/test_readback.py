"""What calibration believes a cache stores is what the fused checkpoint really caches."""

import pytest
import torch

from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.readback import (
    read_content,
    read_rope,
    restore_content,
    restore_rope,
    store_content,
    store_rope,
)
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import KVScheme, PathFormat, QuantMLABlock
from quantmla.dims import MLADims
from quantmla.quant.affine import dequantize, quantize
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform
from tiny import write_tiny

WINDOWS = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
CASES = {
    "deepseek_v2": {"family": "deepseek_v2"},
    "deepseek_v3-bias": {"family": "deepseek_v3", "q_lora_rank": 24, "attention_bias": True},
    "deepseek_v3-half": {"family": "deepseek_v3", "rope_interleave": False},
    "longcat_flash": {"family": "longcat_flash", "q_lora_rank": 24},
    "minicpm3": {"family": "minicpm3", "q_lora_rank": 24},
    "mistral4": {"family": "mistral4", "yarn": True},
}


def random_transform(dims, seed, **fields):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randn(count, dtype=torch.float64, generator=generator)

    pairs = dims.qk_rope_head_dim // 2
    return LayerTransform(
        content_rotation=random_hadamard(dims.kv_lora_rank, seed),
        content_scale=(0.3 * draw(dims.kv_lora_rank)).exp(),
        rope_angle=draw(pairs),
        rope_scale=(0.3 * draw(pairs)).exp(),
        **fields,
    )


@pytest.mark.parametrize("kwargs", CASES.values(), ids=CASES)
def test_stored_rows_are_those_of_the_fused_checkpoint(tmp_path, kwargs):
    source = write_tiny(tmp_path / "source", **kwargs)
    config = CheckpointReader(source).config
    family, dims = family_of(config), MLADims.from_config(config)
    pairing = family.rope_pairing_cache(config)
    transforms = [random_transform(dims, seed) for seed in range(dims.num_cache_layers)]
    block = QuantMLABlock(
        method="quantmla",
        content=PathFormat(bits=4),
        rope=PathFormat(bits=4),
        rope_pairing=family.rope_pairing(config),
        rope_pairing_cache=pairing,
    )
    fused = fuse_checkpoint(source, tmp_path / "fused", transforms, block)
    both = zip(capture_layers(source, WINDOWS), capture_layers(fused, WINDOWS), strict=True)
    for before, after in both:
        transform = transforms[before.layer]
        content = store_content(transform, before.gamma, before.latent_unit)
        torch.testing.assert_close(after.latent_unit * after.gamma, content, rtol=0, atol=1e-4)
        rope = store_rope(transform, pairing, before.k_rope)
        torch.testing.assert_close(after.k_rope, rope, rtol=0, atol=1e-4)


@pytest.fixture
def capture(tmp_path):
    write_tiny(tmp_path, layers=1)
    return next(capture_layers(tmp_path, WINDOWS))


@pytest.mark.parametrize("online", [None, "hadamard"])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_restoring_undoes_storing(capture, pairing, online):
    dims = MLADims(48, 1, 3, 32, 16, 12, 20, None, 1e-6)
    transform = random_transform(dims, 5, rope_online=online)
    unit, key = capture.latent_unit.double(), capture.k_rope.double()
    stored = store_content(transform, capture.gamma, unit)
    torch.testing.assert_close(restore_content(transform, capture.gamma, stored), unit)
    stored = store_rope(transform, pairing, key)
    torch.testing.assert_close(restore_rope(transform, pairing, stored), key)


def test_identity_stores_the_shipped_channels(capture):
    gamma = capture.gamma.clone()
    gamma[3], gamma[5] = 0, -gamma[5]
    identity = LayerTransform()
    stored = store_content(identity, gamma, capture.latent_unit)
    assert torch.equal(stored, capture.latent_unit * gamma)
    expected = capture.latent_unit.clone()
    expected[..., 3] = 0
    torch.testing.assert_close(restore_content(identity, gamma, stored), expected)
    assert store_rope(identity, "half", capture.k_rope) is capture.k_rope


@pytest.mark.parametrize("zero", ["zp8", "min16"])
def test_reading_back_is_quantise_and_dequantise(capture, zero):
    scheme = KVScheme.parse("c2r3", group=16, zero=zero)
    clip = torch.tensor([0.7, 0.9])
    transform = LayerTransform(content_clip=clip, rope_clip=torch.tensor([0.8]))
    stored = capture.latent_unit * capture.gamma
    codes = quantize(stored, 2, group=16, zero=zero, clip=clip)
    back = dequantize(codes, group=16, zero=zero, dtype=torch.float32)
    read = read_content(transform, scheme, capture.gamma, capture.latent_unit)
    torch.testing.assert_close(read * capture.gamma, back)
    codes = quantize(capture.k_rope, 3, group=16, zero=zero, clip=0.8)
    back = dequantize(codes, group=16, zero=zero, dtype=torch.float32)
    torch.testing.assert_close(read_rope(transform, scheme, "half", capture.k_rope), back)
