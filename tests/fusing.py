"""Shared by the checkpoint tests: random transforms and blocks for a tiny checkpoint."""

import hashlib
import json
from pathlib import Path

import torch

from quantmla.checkpoint.families import family_of
from quantmla.config import QuantMLABlock
from quantmla.dims import MLADims
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform


def read_config(folder) -> dict:
    """The config.json of a folder."""
    return json.loads((Path(folder) / "config.json").read_text())


def random_transforms(folder, clip=False, seed=0) -> list[LayerTransform]:
    """Rotation, scales of about 1/3 to 3 and full angles on every cache layer."""
    dims = MLADims.from_config(read_config(folder))
    generator = torch.Generator().manual_seed(seed)
    transforms = []
    for layer in range(dims.num_cache_layers):
        content, rope = (
            (0.5 * torch.randn(n, dtype=torch.float64, generator=generator)).exp()
            for n in (dims.kv_lora_rank, dims.qk_rope_head_dim // 2)
        )
        angle = 3 * torch.randn(len(rope), dtype=torch.float64, generator=generator)
        rotation = random_hadamard(dims.kv_lora_rank, seed + layer)
        clips = (torch.full((1,), 0.9), torch.full((1,), 0.8)) if clip else (None, None)
        transforms.append(LayerTransform(rotation, content, angle, rope, *clips))
    return transforms


def block_for(folder, **changes) -> QuantMLABlock:
    """A C4R4 block that fits the checkpoint."""
    config = read_config(folder)
    family = family_of(config)
    return QuantMLABlock.model_validate(
        {
            "method": "quantmla",
            "content": {"bits": 4},
            "rope": {"bits": 4},
            "rope_pairing": family.rope_pairing(config),
            "rope_pairing_cache": family.rope_pairing_cache(config),
            **changes,
        }
    )


def snapshot(folder) -> dict[str, str]:
    """Hash of every file below a folder, by relative path."""
    folder = Path(folder)
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
