"""Clip ratios of the cache writer, read from the side file of a fused checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantmla.cache.layout import PageLayout
from quantmla.checkpoint.header import read_header
from quantmla.checkpoint.reader import WRITER_NAME
from quantmla.errors import CheckpointError

Clips = tuple[float | Tensor | None, float | Tensor | None]  # content, rope


def load_clips(folder: str | Path, layouts: list[PageLayout]) -> list[Clips]:
    """Read the clip ratios of every cache layer; none is ever replaced by a default.

    Args:
        folder: checkpoint folder that holds quantmla.safetensors.
        layouts: page layout of each cache layer.
    Returns: (content [G, fp32], rope [G, fp32]) for each layer; None for a path of 16 bits.
    Raises: CheckpointError naming the file, or the layer that lacks a ratio or has a wrong one.
    Source: field report FR-003.
    """
    from safetensors.torch import load_file

    path = Path(folder) / WRITER_NAME
    if not path.is_file():
        raise CheckpointError(
            "the clip ratios of this checkpoint are missing",
            where=path,
            expected=f"{WRITER_NAME}, as the quantmla block of config.json declares clip ratios",
            got="no such file",
            next_step="copy the file from the fused checkpoint, or pass folder= with its folder",
        )
    read_header(path)  # refuses a damaged file
    tensors = load_file(path)
    clips = []
    for layer, layout in enumerate(layouts):
        content = _clip(path, tensors, layer, "content", layout.content_groups)
        clips.append((content, _clip(path, tensors, layer, "rope", layout.rope_groups)))
    return clips


def _clip(
    path: Path, tensors: dict[str, Tensor], layer: int, kind: str, groups: int
) -> Tensor | None:
    if groups == 0:
        return None
    name = f"layers.{layer}.{kind}_clip"
    clip = tensors.get(name)
    usable = clip is not None and tuple(clip.shape) == (groups,)
    if not usable or not bool(((clip > 0) & (clip <= 1)).all()):
        raise CheckpointError(
            f"cache layer {layer} has no usable {kind} clip ratio",
            where=f"{path}: {name}",
            expected=f"{groups} ratios in (0, 1]",
            got="no such tensor" if clip is None else f"{clip.flatten()[:8].tolist()}",
            next_step="fuse the checkpoint again; no default is substituted",
        )
    return clip.to(torch.float32)
