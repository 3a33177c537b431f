"""Write checkpoint files: staged folders, rewritten or linked shards, side files, clip ratios."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quantmla.checkpoint.header import TensorInfo
from quantmla.checkpoint.reader import CONFIG_NAME, INDEX_NAME, WRITER_NAME, CheckpointReader
from quantmla.files import CHUNK_BYTES, atomic_write, fsync_folder

if TYPE_CHECKING:
    import torch

    from quantmla.dims import MLADims
    from quantmla.transform.layer import LayerTransform

CARD_NAME = "README.md"
BASE_CARD_NAME = "README.base.md"
# Other forms of the same weights: copying them would put unfused weights beside fused ones.
WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".pkl")
)


def link_shard(source: Path, target: Path) -> None:
    """Give an unchanged shard a second name; copy it where links are not possible."""
    target.unlink(missing_ok=True)
    real = source.resolve()  # a hub snapshot is made of symlinks, and the link must be to the data
    try:
        os.link(real, target)
    except OSError:
        copy_file(real, target)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file to stable storage and return the hex SHA-256 of what was copied."""
    # Never open an existing target: it may be a hard link to somebody's source shard.
    target.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as reading, target.open("xb") as writing:
        while chunk := reading.read(CHUNK_BYTES):
            digest.update(chunk)
            writing.write(chunk)
        writing.flush()
        os.fsync(writing.fileno())
    return digest.hexdigest()


def patch_shard(target: Path, tensors: Iterable[tuple[TensorInfo, torch.Tensor]]) -> None:
    """Overwrite tensors of a copied shard in place; header, order and all other bytes stay.

    Args:
        target: a private copy of the source shard.
        tensors: (place, new value of the stored shape and dtype); drawn one at a time.
    """
    with target.open("r+b") as file:
        for info, tensor in tensors:
            data = tensor_bytes(tensor)
            if tuple(tensor.shape) != info.shape or len(data) != info.end - info.start:
                raise AssertionError(f"{info} cannot hold {tensor.dtype} {list(tensor.shape)}")
            file.seek(info.start)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in row order, as safetensors stores them."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy everything that is neither weights, config, index nor hidden; our card takes README.md.

    Returns:
        Paths relative to the target, sorted.
    """
    copied = []
    ours = {CONFIG_NAME, INDEX_NAME, WRITER_NAME}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parts)
        if not path.is_file() or hidden or path.suffix in WEIGHT_SUFFIXES or str(name) in ours:
            continue
        if path.name.endswith(".index.json"):
            continue  # an index of other weights, such as pytorch_model.bin.index.json
        new = target / (BASE_CARD_NAME if str(name) == CARD_NAME else name)
        new.parent.mkdir(parents=True, exist_ok=True)
        copy_file(path, new)
        copied.append(new.relative_to(target).as_posix())
    return sorted(copied)


def write_config(target: Path, config: dict, block: dict) -> None:
    """Write the source config with the `quantmla` block added."""
    atomic_write(target / CONFIG_NAME, json.dumps({**config, "quantmla": block}, indent=2) + "\n")


def write_index(target: Path, reader: CheckpointReader) -> None:
    """Write the index with the true total size.

    A single-file checkpoint gets one too: engines that load every *.safetensors of a folder use
    the index to leave out the clip ratios.
    """
    old = reader.index or {}
    tensors = reader.tensors
    total_bytes = sum(info.end - info.start for info in tensors.values())
    weight_map = old.get("weight_map") or {name: info.shard for name, info in tensors.items()}
    metadata = {**(old.get("metadata") or {}), "total_size": total_bytes}
    index = {**old, "metadata": metadata, "weight_map": weight_map}
    atomic_write(target / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def clip_tensors(
    transforms: list[LayerTransform], dims: MLADims, group: int
) -> dict[str, torch.Tensor]:
    """Return the contents of quantmla.safetensors; empty when no layer clips.

    Every layer gets both entries, ones where it does not clip, so that a reader can insist on them
    and never has to guess.

    Args:
        transforms: one a cache layer.
        dims: the model's dimensions.
        group: channels a quantisation group.

    Returns:
        `layers.{i}.content_clip` [G, float32] and `layers.{i}.rope_clip` [G, float32].
    """
    import torch

    from quantmla.quant import group_count

    if all(t.content_clip is None and t.rope_clip is None for t in transforms):
        return {}
    groups = {
        "content_clip": group_count(dims.kv_lora_rank, group),
        "rope_clip": group_count(dims.qk_rope_head_dim, group),
    }
    tensors = {}
    for layer, transform in enumerate(transforms):
        for name, count in groups.items():
            clip = getattr(transform, name)
            clip = torch.ones(count) if clip is None else clip.detach().cpu().float().contiguous()
            tensors[f"layers.{layer}.{name}"] = clip
    return tensors


@contextmanager
def staged_folder(out: Path, key: str | None = None) -> Iterator[Path]:
    """Work in a hidden folder beside `out` that takes its name when the block ends.

    The caller holds the lock of `out`, so other hidden folders of it belong to dead runs and are
    removed. An exception removes the folder.

    Args:
        out: result; absent, or an empty folder.
        key: names exactly this job; a kill or Ctrl-C then leaves the folder, and the next run with
            the same key gets it back. None never keeps anything.

    Source: own.
    """
    prefix = f".{out.name}.tmp-"
    temporary = out.with_name(prefix + (key or "new"))
    for other in out.parent.iterdir():
        if other.name.startswith(prefix) and (key is None or other != temporary):
            remove_folder(other)
    temporary.mkdir(exist_ok=True)
    for half_written in temporary.glob(".*.tmp"):
        half_written.unlink()
    try:
        yield temporary
        fsync_folder(temporary)
        temporary.replace(out)
        fsync_folder(out.parent)
    except BaseException as error:
        if key is None or isinstance(error, Exception):
            remove_folder(temporary)
        raise


def remove_folder(path: Path) -> None:
    """Remove a temporary folder, as far as the file system lets us."""
    shutil.rmtree(path, ignore_errors=True)
