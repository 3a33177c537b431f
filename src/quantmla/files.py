"""Files written whole or not at all, their hashes, and storage failures in words."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quantmla.errors import CheckpointError

CHUNK_BYTES = 1 << 22


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a file so that a reader, or the run after a crash, sees all of it or the old one.

    Args:
        path: target; its folder must exist.
        data: content; text is stored as UTF-8.

    Raises:
        OSError: the disk is full or the folder is not writable; the target is then as it was.

    Source: own.
    """
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Give a binary file to write that takes the place of the target when the block ends.

    Args:
        path: target; its folder must exist.

    Raises:
        OSError: as atomic_write; after any exception the target is as it was.

    Source: own.
    """
    path = Path(path)
    # a name of its own: process numbers repeat between containers that share a folder
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(path: str | Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: str | Path, start: int = 0, end: int | None = None) -> str:
    """Return the hex SHA-256 of a file or of its bytes [start, end), reading a few MB at a time."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        file.seek(start)
        left = float("inf") if end is None else end - start
        while left > 0 and (chunk := file.read(int(min(CHUNK_BYTES, left)))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


@contextmanager
def storage_errors(where: str | Path) -> Iterator[None]:
    """Turn a failure of the file system into one CheckpointError that says what to do.

    Args:
        where: file or folder that was being written.

    Raises:
        CheckpointError: in place of any OSError.

    Source: own.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, next_step = "the disk is full", "free some space, or choose another --out"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what, next_step = "the folder is not writable", "choose another --out, or its rights"
        else:
            what, next_step = "a file operation failed", "check the disk, then run again"
        raise CheckpointError(
            what, where=error.filename or where, got=error.strerror or error, next_step=next_step
        ) from error
