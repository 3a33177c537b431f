"""Write checkpoint files: staged folders, rewritten or linked shards, side files, our tensors."""

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

    from quantmla.config import QuantMLABlock
    from quantmla.dims import MLADims
    from quantmla.transform.layer import LayerTransform

CARD_NAME = "README.md"
BASE_CARD_NAME = "README.base.md"
# Field of the block -> tensors of each layer in quantmla.safetensors.
WRITER_KINDS = {
    "clip": ("content_clip", "rope_clip"),
    "shift": ("content_shift", "rope_shift"),
    "rope_feedback": ("rope_order", "rope_feedback"),
}
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
    the index to leave out quantmla.safetensors.
    """
    old = reader.index or {}
    tensors = reader.tensors
    total_bytes = sum(info.end - info.start for info in tensors.values())
    weight_map = old.get("weight_map") or {name: info.shard for name, info in tensors.items()}
    metadata = {**(old.get("metadata") or {}), "total_size": total_bytes}
    index = {**old, "metadata": metadata, "weight_map": weight_map}
    atomic_write(target / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def writer_tensors(
    transforms: list[LayerTransform], dims: MLADims, group: int
) -> dict[str, torch.Tensor]:
    """Return the contents of quantmla.safetensors; empty when no layer needs any.

    Where one layer clips, shifts or feeds back, every layer gets the entries, neutral ones where it
    does not, so that a reader can insist on them and never has to guess.

    Args:
        transforms: one a cache layer.
        dims: the model's dimensions.
        group: channels a quantisation group.

    Returns:
        By kind, for every layer i: `layers.{i}.content_clip` and `.rope_clip` [G, float32];
        `.content_shift` [R, float32] and `.rope_shift` [P, float32]; `.rope_order` [P, int64] and
        `.rope_feedback` [P, P, float32].
    """
    import torch

    from quantmla.quant import group_count

    rank, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    neutral = {
        "content_clip": torch.ones(group_count(rank, group)),
        "rope_clip": torch.ones(group_count(rope, group)),
        "content_shift": torch.zeros(rank),
        "rope_shift": torch.zeros(rope),
        "rope_order": torch.arange(rope),
        "rope_feedback": torch.zeros(rope, rope),
    }
    tensors = {}
    for names in WRITER_KINDS.values():
        if all(getattr(t, name) is None for t in transforms for name in names):
            continue
        for layer, transform in enumerate(transforms):
            for name in names:
                own, value = getattr(transform, name), neutral[name]
                value = value if own is None else own.detach().cpu().to(value.dtype)
                tensors[f"layers.{layer}.{name}"] = value.clone().contiguous()
    return tensors


def kinds_of(names: Iterable[str]) -> dict[str, bool]:
    """Return which fields of the block tensors of quantmla.safetensors with these names set."""
    ends = {name.rpartition(".")[2] for name in names}
    return {kind: names[0] in ends for kind, names in WRITER_KINDS.items()}


def names_of(block: QuantMLABlock, layers: int) -> set[str]:
    """Return the names that quantmla.safetensors must hold for a block."""
    ends = [end for kind, ends in WRITER_KINDS.items() if getattr(block, kind) for end in ends]
    return {f"layers.{layer}.{end}" for layer in range(layers) for end in ends}


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
