"""The manifest of a fused checkpoint and the fingerprint that readers of its cache compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from quantmla.checkpoint.header import read_header, read_json
from quantmla.checkpoint.reader import WRITER_NAME
from quantmla.config import canonical_sha256
from quantmla.errors import CheckpointError
from quantmla.files import atomic_write, sha256_file

if TYPE_CHECKING:
    from quantmla.config import QuantMLABlock

MANIFEST_NAME = "quantmla_manifest.json"
MANIFEST_VERSION = 1


def fingerprint(
    block: QuantMLABlock, attention_sha256: dict[str, str], writer_sha256: dict[str, str]
) -> str:
    """Identify everything that decides the bytes of a cache and their meaning.

    Two checkpoints with the same fingerprint can read each other's caches. Attention weights count
    whether or not fusing changed them, so that plain rounding of two models differs as well.

    Args:
        block: the `quantmla` block; its recipe hash and fingerprint are left out.
        attention_sha256: hash of each stored kv_a, norm, kv_b and q tensor of the cache layers.
        writer_sha256: hash of each tensor of quantmla.safetensors.

    Returns:
        hex SHA-256.

    Source: own.
    """
    fields = block.to_config()
    settings = {k: v for k, v in fields.items() if k not in ("fingerprint", "recipe_sha256")}
    return canonical_sha256(
        {"block": settings, "attention": attention_sha256, "writer": writer_sha256}
    )


def writer_hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each tensor of quantmla.safetensors; empty when there is no such file."""
    path = folder / WRITER_NAME
    if not path.is_file():
        return {}
    return {n: sha256_file(path, i.start, i.end) for n, i in read_header(path).items()}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write quantmla_manifest.json."""
    text = json.dumps({"format": MANIFEST_VERSION, **manifest}, indent=1, sort_keys=True)
    atomic_write(folder / MANIFEST_NAME, text + "\n")


def read_manifest(folder: Path) -> dict:
    """Read quantmla_manifest.json.

    Raises:
        CheckpointError: missing, damaged or of another version.
    """
    manifest = read_json(folder / MANIFEST_NAME)
    parts = ("files", "tensors", "source")
    if manifest.get("format") != MANIFEST_VERSION or not all(
        isinstance(manifest.get(part), dict) for part in parts
    ):
        raise CheckpointError(
            "the manifest has an unknown format",
            where=folder / MANIFEST_NAME,
            expected=f"format {MANIFEST_VERSION} with {', '.join(parts)}",
            got=f"format {manifest.get('format')} with {', '.join(sorted(manifest))}",
            next_step="fuse the checkpoint again with this version",
        )
    return manifest
