"""What a fused folder says beside its block: the fingerprint, and clip ratios of the cache writer.

Both are bound to the block, so that files of two checkpoints cannot be mixed unnoticed.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from quantmla.cache.layout import PageLayout
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.manifest import MANIFEST_NAME, writer_hashes
from quantmla.checkpoint.reader import WRITER_NAME
from quantmla.config import QuantMLABlock, canonical_sha256
from quantmla.errors import CheckpointError
from quantmla.quant import Clip, usable_clip

PATHS = ("content", "rope")
Clips = tuple[Clip, Clip]  # of these paths


def check_block(block: QuantMLABlock, config, folder: Path | None) -> None:
    """Refuse a block that was not made for this model and the files of its folder.

    Args:
        block: from the config.
        config: dict or transformers config that carries it.
        folder: checkpoint folder, None where it is not known.
    Raises: CheckpointError if RoPE pairing or norm eps of the model differ, or the manifest of the
        folder names another fingerprint. A folder without a manifest is taken as it is; only
        `quantmla verify` hashes the weights.
    Source: own.
    """
    family = family_of(config)
    pairs = {
        "rope_pairing": (family.rope_pairing(config), block.rope_pairing),
        "rope_pairing_cache": (family.rope_pairing_cache(config), block.rope_pairing_cache),
        "norm_eps": (family.norm_eps, block.norm_eps or family.norm_eps),
    }
    path = None if folder is None else folder / MANIFEST_NAME
    if path is not None and path.is_file():
        status = path.stat()
        found = _fingerprint(path, status.st_mtime_ns, status.st_size)
        pairs["fingerprint"] = (found, block.fingerprint)
    for name, (expected, got) in pairs.items():
        if expected != got:
            raise CheckpointError(
                "the quantmla block does not belong to this checkpoint",
                where=f"{folder or 'config'}: quantmla.{name}",
                expected=expected,
                got=got,
                next_step="load model and config from the folder that was fused, unchanged",
            )


@lru_cache(maxsize=16)
def _fingerprint(path: Path, mtime_ns: int, size_bytes: int) -> object:
    """Fingerprint in a manifest, read once a version of the file: each batch makes a cache."""
    return read_json(path).get("fingerprint")


def load_clips(folder: Path, layouts: list[PageLayout], block: QuantMLABlock) -> list[Clips]:
    """Read the clip ratios of every cache layer; none is ever replaced by a default.

    Args:
        folder: checkpoint folder that holds quantmla.safetensors.
        layouts: page layout of each cache layer.
        block: names the digest of the ratios.
    Returns: (content [G, fp32], rope [G, fp32]) for each layer; None for a path of 16 bits.
    Raises: CheckpointError naming the file, or the layer that lacks a ratio or has a wrong one, or
        if the ratios are not those of this block.
    Source: field report FR-003.
    """
    from safetensors.torch import load_file

    path = folder / WRITER_NAME
    if not path.is_file():
        raise CheckpointError(
            "the clip ratios of this checkpoint are missing",
            where=path,
            expected=f"{WRITER_NAME}, as the quantmla block of config.json declares clip ratios",
            got="no such file",
            next_step="copy the file from the fused checkpoint, or pass folder= with its folder",
        )
    hashes = writer_hashes(folder)  # refuses a damaged file
    tensors = load_file(path)
    clips = []
    for layer, layout in enumerate(layouts):
        groups = (layout.content_groups, layout.rope_groups)
        content, rope = (
            _clip(path, tensors, layer, kind, count)
            for kind, count in zip(PATHS, groups, strict=True)
        )
        clips.append((content, rope))
    known = {f"layers.{i}.{kind}_clip" for i in range(len(layouts)) for kind in PATHS}
    found = canonical_sha256(hashes)
    if found != block.writer_sha256 or set(tensors) != known:
        raise CheckpointError(
            "these are the clip ratios of another checkpoint",
            where=path,
            expected=f"ratios of {len(layouts)} layers with the digest {block.writer_sha256}",
            got=f"{len(tensors)} tensors with the digest {found}",
            next_step=f"take config.json and {WRITER_NAME} from one fused folder",
        )
    return clips


def _clip(
    path: Path, tensors: dict[str, Tensor], layer: int, kind: str, groups: int
) -> Tensor | None:
    if groups == 0:
        return None
    name = f"layers.{layer}.{kind}_clip"
    clip = tensors.get(name)
    if clip is None or clip.dim() != 1 or len(clip) != groups or not usable_clip(clip, groups):
        raise CheckpointError(
            f"cache layer {layer} has no usable {kind} clip ratio",
            where=f"{path}: {name}",
            expected=f"{groups} ratios in (0, 1]",
            got="no such tensor" if clip is None else f"{clip.flatten()[:8].tolist()}",
            next_step="fuse the checkpoint again; no default is substituted",
        )
    return clip.to(torch.float32)
