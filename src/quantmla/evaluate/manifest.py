"""What a result was measured with: hashes of text, model and recipe, versions, device, seed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import quantmla
from quantmla.config import canonical_sha256
from quantmla.files import sha256_file

PACKAGES = ("torch", "transformers", "safetensors", "numpy")
HASH_WEIGHTS_UP_TO_BYTES = 4 * 2**30
REVISION = re.compile(r"[0-9a-f]{40}")


def build_manifest(
    *,
    models: dict[str, Path],
    texts: dict[str, str],
    seed: int,
    device: str,
    recipes: dict[str, str] | None = None,
    tokenizer_sha256: str | None = None,
) -> dict:
    """Collect everything that is needed to repeat or to compare a result.

    Args:
        models: label to checkpoint folder.
        texts: label to sha256 of the text.
        seed: of sampling, if any.
        device: torch device name.
        recipes: label to recipe sha256.
        tokenizer_sha256: of the tokenizer that cut the text.
    Returns: plain dict for JSON.
    Source: own.
    """
    return {
        "quantmla": quantmla.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: package_version(name) for name in PACKAGES},
        "device": device_name(device),
        "revision": git_revision(),
        "seed": seed,
        "command": command_line(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "models": {label: model_hashes(Path(folder)) for label, folder in models.items()},
        "texts": texts,
        "recipes": recipes or {},
        "tokenizer_sha256": tokenizer_sha256,
    }


def command_line() -> str:
    """Return the command of this process as one would type it again, without folders of programs.

    Source: own.
    """
    program = Path(sys.argv[0])
    name = "quantmla" if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed.

    Args: name [distribution].
    Source: own.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """Name the hardware behind a torch device.

    Args: device [torch device name].
    Returns: for example "cpu (2 threads)" or "cuda:0 (NVIDIA H200)".
    Source: own.
    """
    import torch

    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"


def git_revision() -> str | None:
    """Return the commit of the source that runs, "+dirty" if it was changed; None without git.

    A copy of the source says which commit it is in QUANTMLA_REVISION: it may come without its
    history, or with that of another commit.

    Source: own.
    """
    said = os.environ.get("QUANTMLA_REVISION", "")
    if REVISION.fullmatch(said):
        return said
    root = Path(quantmla.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + (
        "+dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def checkpoint_sha256(folder: Path) -> str:
    """Return one hash that says which checkpoint this is.

    Args: folder [checkpoint folder].
    Returns: the fingerprint of a fused checkpoint, else a digest of config and weights.
    Source: own.
    """
    hashes = model_hashes(folder)
    parts = {name: hashes[name] for name in ("config_sha256", "weights_sha256")}
    return hashes["fingerprint"] or canonical_sha256(parts)


def model_hashes(folder: Path) -> dict:
    """Hash a checkpoint folder.

    Args: folder [checkpoint folder].
    Returns: name, sha256 of config.json and of the weights, and what the second covers: "all" bytes
        of every
        safetensors file, or only names and sizes above HASH_WEIGHTS_UP_TO_BYTES; the quantmla
        fingerprint if any.
    Source: own.
    """
    config = (folder / "config.json").read_bytes()
    shards = sorted(folder.glob("*.safetensors"))
    whole = sum(shard.stat().st_size for shard in shards) <= HASH_WEIGHTS_UP_TO_BYTES
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.name}\0{shard.stat().st_size}\0".encode())
        if whole:
            digest.update(sha256_file(shard).encode())
    return {
        "name": folder.name,
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "weights_sha256": digest.hexdigest(),
        "weights_hashed": "all" if whole else "names and sizes",
        "fingerprint": json.loads(config).get("quantmla", {}).get("fingerprint"),
    }
