"""Fuse a checkpoint folder: shard by shard, resumable, and visible only once it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from quantmla.checkpoint.card import bytes_per_token, model_card
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.manifest import fingerprint, write_manifest, writer_hashes
from quantmla.checkpoint.plan import FusePlan
from quantmla.checkpoint.reader import CONFIG_NAME, INDEX_NAME, WRITER_NAME, CheckpointReader
from quantmla.checkpoint.writer import (
    BASE_CARD_NAME,
    CARD_NAME,
    copy_file,
    copy_side_files,
    kinds_of,
    link_shard,
    patch_shard,
    staged_folder,
    write_config,
    write_index,
    writer_tensors,
)
from quantmla.config import (
    FORMAT_VERSION,
    PLAIN_FORMAT_VERSION,
    QuantMLABlock,
    Recipe,
    canonical_sha256,
)
from quantmla.errors import CheckpointError
from quantmla.files import atomic_write, sha256_file, storage_errors
from quantmla.transform.layer import LayerTransform

PROGRESS_NAME = ".progress.json"
Progress = Callable[[str, int, int], None]


def fuse_checkpoint(
    source: str | Path,
    out: str | Path,
    transforms: list[LayerTransform],
    block: QuantMLABlock,
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a fused copy of a checkpoint as an ordinary Hugging Face folder.

    Shards without changed tensors are hard-linked. Work happens in a temporary folder beside `out`
    and is renamed at the end; after a kill or Ctrl-C the same call picks up the finished shards and
    gives the same bytes. Any other failure removes the temporary folder.

    Args:
        source: original checkpoint.
        out: result; must not exist, or be an empty folder.
        transforms: one a cache layer.
        block: bits and the like; what quantmla.safetensors decides is filled in here.
        recipe: what made the transforms, echoed into the manifest.
        progress: called with (shard, shards done, shards in all).

    Returns:
        The path of `out`.

    Raises:
        CheckpointError: an unusable source or `out`, a locked `out`, a storage failure.
        CalibrationError: transforms that do not fit the model.
        UnsupportedModelError: a family that is refused.

    Source: own.
    """
    source, out = Path(source).absolute(), Path(out).absolute()
    reader = CheckpointReader(source)
    plan = FusePlan.of(reader, transforms, block)
    if recipe is not None:
        block = block.model_copy(update={"recipe_sha256": recipe.sha256()})
    bytes_per_token(plan.layers.dims, block)  # refuse schemes that do not pack, before any work
    with folder_lock(out), storage_errors(out):
        refuse_out(source, out)
        with staged_folder(out, _job_key(plan, block, recipe)) as temporary:
            records = _write_shards(plan, temporary, progress)
            _finish(plan, temporary, block, recipe, records, out.name)
            (temporary / PROGRESS_NAME).unlink()
    return out


def refuse_out(source: Path, out: Path) -> None:
    """Raise CheckpointError unless `out` is absent or empty, and apart from the source."""
    if out.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(
        out.resolve()
    ):
        raise CheckpointError(
            "the output folder and the source folder overlap",
            where=out,
            expected="a folder outside the source",
            got=source,
            next_step="choose another --out",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            "the output folder already holds something",
            where=out,
            expected="no such folder, or an empty one",
            got="a file" if not out.is_dir() else f"{len(list(out.iterdir()))} entries",
            next_step="choose another --out, or remove it yourself",
        )


def _job_key(plan: FusePlan, block: QuantMLABlock, recipe: Recipe | None) -> str:
    """Digest of everything that decides the result: only the same job may go on with its shards."""
    reader = plan.layers.reader
    stats = {shard: (reader.path / shard).stat() for shard in reader.shards}
    return canonical_sha256(
        {
            "config": reader.config,
            "shards": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "transforms": [sha256(t.to_bytes()).hexdigest() for t in plan.transforms],
            "block": block.to_config(),
            "recipe": recipe.sha256() if recipe else None,
        }
    )[:16]


def _write_shards(plan: FusePlan, temporary: Path, progress: Progress | None) -> dict[str, dict]:
    """Write or link every shard and return what the manifest says about each."""
    path = temporary / PROGRESS_NAME
    records = _read_progress(path)
    shards = plan.layers.reader.shards
    for done, shard in enumerate(shards):
        if progress:
            progress(shard, done, len(shards))
        target = temporary / shard
        record = records.get(shard)
        if record and target.is_file() and sha256_file(target) == record["sha256"]:
            continue
        records[shard] = _write_shard(plan, shard, target)
        atomic_write(path, json.dumps(records, sort_keys=True))
    if progress:
        progress("", len(shards), len(shards))
    return {shard: records[shard] for shard in shards}


def _read_progress(path: Path) -> dict[str, dict]:
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except CheckpointError:
        return {}  # damaged by a crash of the machine: start over


def _write_shard(plan: FusePlan, shard: str, target: Path) -> dict:
    reader = plan.layers.reader
    attention = set(plan.layers.tensor_names())
    infos = {n: info for n, info in reader.tensors.items() if info.shard == shard}
    if shard not in plan.changed:
        link_shard(reader.path / shard, target)
        file_sha256 = sha256_file(target)
        tensors = {name: {"sha256": reader.sha256(name)} for name in infos if name in attention}
        return {"sha256": file_sha256, "source_sha256": file_sha256, "tensors": tensors}
    source_sha256 = copy_file(reader.path / shard, target)
    patch_shard(target, plan.fused_tensors(shard))
    fused = plan.fused_names()
    tensors = {
        name: {"sha256": sha256_file(target, info.start, info.end)}
        | ({"source_sha256": reader.sha256(name)} if name in fused else {})
        for name, info in infos.items()
    }
    return {
        "sha256": sha256_file(target),
        "source_sha256": source_sha256,
        "tensors": tensors,
    }


def _finish(
    plan: FusePlan,
    temporary: Path,
    block: QuantMLABlock,
    recipe: Recipe | None,
    records: dict[str, dict],
    name: str,
) -> None:
    """Write everything that is not a shard; all of it is made anew on a resume."""
    from safetensors.torch import save

    reader, dims = plan.layers.reader, plan.layers.dims
    side_files = copy_side_files(reader.path, temporary)
    side = writer_tensors(plan.transforms, dims, block.content.group)
    if side:
        atomic_write(temporary / WRITER_NAME, save(side, metadata={"format": "pt"}))
    if side or reader.index is not None:
        write_index(temporary, reader)
    tensors = {n: entry for record in records.values() for n, entry in record["tensors"].items()}
    attention = {n: tensors[n]["sha256"] for n in plan.layers.tensor_names()}
    writer, kinds = writer_hashes(temporary), kinds_of(side)
    newer = kinds["shift"] or kinds["rope_feedback"]
    block = block.model_copy(
        update={
            **kinds,
            "format": FORMAT_VERSION if newer else PLAIN_FORMAT_VERSION,
            "writer_sha256": canonical_sha256(writer) if side else None,
            "norm_eps": dims.norm_eps,
        }
    )
    mark = fingerprint(block, attention, writer)
    block = block.model_copy(update={"fingerprint": mark})
    write_config(temporary, reader.config, block.to_config())
    base = Path(str(reader.config.get("_name_or_path") or reader.path.name)).name
    card = model_card(
        name, base, reader.config["model_type"], dims, block, BASE_CARD_NAME in side_files
    )
    atomic_write(temporary / CARD_NAME, card)
    ours = [CONFIG_NAME, *([WRITER_NAME] if side else [])]
    ours += [INDEX_NAME] if (temporary / INDEX_NAME).is_file() else []
    write_manifest(
        temporary,
        {
            "fingerprint": mark,
            "recipe": recipe.model_dump(mode="json") if recipe else None,
            "files": {shard: record["sha256"] for shard, record in records.items()}
            | {file: sha256_file(temporary / file) for file in [*side_files, *ours]},
            "tensors": tensors,
            "source": {shard: record["source_sha256"] for shard, record in records.items()},
        },
    )
