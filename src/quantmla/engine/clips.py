"""What a fused folder says beside its block: the fingerprint, and what the cache writer needs.

Both are bound to the block, so that files of two checkpoints cannot be mixed unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from quantmla.cache.layout import PageLayout
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.manifest import MANIFEST_NAME, writer_hashes
from quantmla.checkpoint.reader import WRITER_NAME
from quantmla.checkpoint.writer import names_of
from quantmla.config import QuantMLABlock, canonical_sha256
from quantmla.errors import CheckpointError
from quantmla.quant import Clip, usable_clip
from quantmla.quant.feedback import Feedback, usable_feedback

PATHS = ("content", "rope")
Clips = tuple[Clip, Clip]  # of these paths


@dataclass(frozen=True)
class Writer:
    """How one layer writes its cache; None where it does nothing special.

    Fields:
        content_clip, rope_clip [float, 1 or G]: clip ratios, in (0, 1].
        content_shift [R, fp32], rope_shift [P, fp32]: subtracted from every row before it is
            stored; attention gives the former back to its output, the latter changes no softmax.
        feedback: rounds the key after RoPE.
    """

    content_clip: Clip = None
    rope_clip: Clip = None
    content_shift: Tensor | None = None
    rope_shift: Tensor | None = None
    feedback: Feedback | None = None


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


def load_writers(folder: Path, layouts: list[PageLayout], block: QuantMLABlock) -> list[Writer]:
    """Read what every cache layer's writer needs; nothing is ever replaced by a default.

    Args:
        folder: checkpoint folder that holds quantmla.safetensors.
        layouts: page layout of each cache layer.
        block: names what the file holds, and its digest.
    Returns: a Writer for each layer; a path of 16 bits is neither clipped nor rounded.
    Raises: CheckpointError naming the file, or the layer that lacks something or has an unusable
        tensor, or if the tensors are not those of this block.
    Source: field report FR-003.
    """
    from safetensors.torch import load_file

    wanted = names_of(block, len(layouts))
    if not wanted:
        return [Writer()] * len(layouts)
    path = folder / WRITER_NAME
    if not path.is_file():
        raise CheckpointError(
            "what the cache writer of this checkpoint needs is missing",
            where=path,
            expected=f"{WRITER_NAME}, as the quantmla block of config.json declares it",
            got="no such file",
            next_step="copy the file from the fused checkpoint, or pass folder= with its folder",
        )
    hashes = writer_hashes(folder)  # refuses a damaged file
    tensors = load_file(path)
    writers = [_writer(path, tensors, i, layout, block) for i, layout in enumerate(layouts)]
    found = canonical_sha256(hashes)
    if found != block.writer_sha256 or set(tensors) != wanted:
        raise CheckpointError(
            "these are the writer's tensors of another checkpoint",
            where=path,
            expected=f"{len(wanted)} tensors of {len(layouts)} layers, {block.writer_sha256}",
            got=f"{len(tensors)} tensors, {found}",
            next_step=f"take config.json and {WRITER_NAME} from one fused folder",
        )
    return writers


def _writer(
    path: Path, tensors: dict[str, Tensor], layer: int, layout: PageLayout, block: QuantMLABlock
) -> Writer:
    parts = {}
    if block.clip:
        for kind, groups in zip(PATHS, (layout.content_groups, layout.rope_groups), strict=True):
            parts[f"{kind}_clip"] = _clip(path, tensors, layer, kind, groups)
    if block.shift:
        for kind, size in zip(PATHS, (layout.kv_lora_rank, layout.qk_rope_head_dim), strict=True):
            parts[f"{kind}_shift"] = _shift(path, tensors, layer, kind, size)
    if block.rope_feedback and layout.rope_groups:
        parts["feedback"] = _feedback(path, tensors, layer, layout.qk_rope_head_dim)
    return Writer(**parts)


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


def _shift(path: Path, tensors: dict[str, Tensor], layer: int, kind: str, size: int) -> Tensor:
    name = f"layers.{layer}.{kind}_shift"
    shift = tensors.get(name)
    fits = shift is not None and shift.dtype == torch.float32 and tuple(shift.shape) == (size,)
    if not fits or not bool(shift.isfinite().all()):
        _refuse(path, layer, f"{kind} shift", name, f"{size} finite numbers", shift)
    return shift


def _feedback(path: Path, tensors: dict[str, Tensor], layer: int, size: int) -> Feedback:
    names = (f"layers.{layer}.rope_order", f"layers.{layer}.rope_feedback")
    parts = [tensors.get(name) for name in names]
    if any(part is None for part in parts) or not usable_feedback(*parts, size):
        expected = f"an order of {size} channels and a strictly upper triangular matrix"
        _refuse(path, layer, "error feedback", " and ".join(names), expected, parts[1])
    return Feedback(parts[0].long(), parts[1].float())


def _refuse(
    path: Path, layer: int, what: str, name: str, expected: str, tensor: Tensor | None
) -> NoReturn:
    raise CheckpointError(
        f"cache layer {layer} has no usable {what}",
        where=f"{path}: {name}",
        expected=expected,
        got="no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}",
        next_step="fuse the checkpoint again; no default is substituted",
    )
