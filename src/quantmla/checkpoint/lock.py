"""One writer per output folder: an advisory lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantmla.errors import CheckpointError
from quantmla.files import storage_errors


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Hold the lock of an output folder, which need not exist yet.

    The lock file `.{name}.lock` lies beside the folder and is removed at the end. The kernel frees
    the lock of a killed process, so a left-over file never blocks.

    Args:
        folder: what is about to be written; its parent is created if needed.

    Raises:
        CheckpointError: another process holds it (its pid is named), or the parent is read-only.

    Source: own.
    """
    folder = Path(folder).absolute()
    path = folder.with_name(f".{folder.name}.lock")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is freed, so that no one else's file goes
        os.close(handle)


def _acquire(path: Path, folder: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            raise CheckpointError(
                "another run is writing into this folder",
                where=folder,
                expected="one writer at a time",
                got=f"locked by process {pid or '(unknown)'}",
                next_step="wait for that run, stop it, or choose another --out",
            ) from error
        if _same_file(handle, path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            return handle
        os.close(handle)  # the last holder removed the file between our open and our lock


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
