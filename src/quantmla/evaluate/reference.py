"""Log-probabilities of the reference model: on disk at the memory of one chunk, or on a device."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from quantmla.errors import EvaluationError

FREE_DISK_MARGIN_BYTES = 256 * 2**20


class Reference(Protocol):
    """Log-probabilities of the reference model, written once and read by every other model."""

    def write(self, first: int, start: int, logprobs: torch.Tensor) -> None:
        """Store one chunk of neighbouring windows."""

    def read(self, first: int, start: int, shape: tuple[int, int]) -> torch.Tensor:
        """Return one chunk."""


class ReferenceTensor:
    """The same array in the memory of a device, where there is room for it.

    Args:
        shape: (n, window, vocab).
        device: where to keep it.
    Source: own.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device | str) -> None:
        self.values = torch.empty(shape, dtype=torch.float32, device=device)

    def __enter__(self) -> ReferenceTensor:
        return self

    def __exit__(self, *_) -> None:
        del self.values

    def write(self, first: int, start: int, logprobs: torch.Tensor) -> None:
        """Store one chunk of neighbouring windows, as ReferenceFile.write."""
        windows, tokens = logprobs.shape[:2]
        self.values[first : first + windows, start : start + tokens] = logprobs

    def read(self, first: int, start: int, shape: tuple[int, int]) -> torch.Tensor:
        """Return one chunk, as ReferenceFile.read."""
        return self.values[first : first + shape[0], start : start + shape[1]]


class ReferenceFile:
    """A float32 array [n, window, vocab] in a file that is gone when closed, or when we die.

    Args:
        folder: where the file lies; needs room for n * window * vocab * 4 bytes.
        shape: (n, window, vocab).
    Raises: EvaluationError if the disk has no room.
    Source: own.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        self.folder, self.shape = folder, shape
        size_bytes = 4 * int(np.prod(shape, dtype=np.int64))
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < size_bytes + FREE_DISK_MARGIN_BYTES:
            raise EvaluationError(
                "no room for the log-probabilities of the reference model",
                where=str(folder),
                expected=f"{size_bytes + FREE_DISK_MARGIN_BYTES} bytes free",
                got=f"{free_bytes} bytes free",
                next_step="score fewer tokens, or put --out on a larger disk",
            )
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 closed by __exit__

    def __enter__(self) -> ReferenceFile:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, first: int, start: int, logprobs: torch.Tensor) -> None:
        """Store one chunk of neighbouring windows.

        Args: first [window index]; start [token]; logprobs [B, S, vocab, float32].
        Raises: EvaluationError if the disk is full.
        Source: own.
        """
        try:
            for row, chunk in enumerate(logprobs.cpu().contiguous(), start=first):
                # a plain write reports a full disk as an error; a store through the mapping would
                # be a bus error
                self._file.seek(self._offset(row, start))
                self._file.write(memoryview(chunk.numpy()).cast("B"))
            self._file.flush()
        except OSError as error:
            raise EvaluationError(
                "the log-probabilities of the reference model cannot be written",
                where=self.folder,
                expected="room for 4 bytes x tokens x vocabulary",
                got=error.strerror or error,
                next_step="score fewer tokens, or put --out on a larger disk",
            ) from error

    def read(self, first: int, start: int, shape: tuple[int, int]) -> torch.Tensor:
        """Map one chunk, so that only the chunk counts as resident memory.

        Args: first [window index]; start [token]; shape [(windows, tokens)].
        Returns: [windows, tokens, vocab, float32].
        Source: own.
        """
        windows, tokens = shape
        out = torch.empty(windows, tokens, self.shape[2])
        for row in range(windows):
            offset = self._offset(first + row, start)
            out[row] = torch.from_numpy(
                np.memmap(self._file, np.float32, "r+", offset, (tokens, self.shape[2]))
            )
        return out

    def _offset(self, row: int, start: int) -> int:
        return 4 * self.shape[2] * (row * self.shape[1] + start)
