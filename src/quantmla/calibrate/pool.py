"""Calibrate captured layers in processes of their own; tensors go through pipes, never files."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from quantmla.calibrate.layer import LayerWork
from quantmla.calibrate.record import LayerCapture
from quantmla.config import Recipe
from quantmla.errors import CalibrationError

CHUNK_BYTES = 1 << 24  # of a tensor in one message; what a transfer takes beside the tensor


@contextmanager
def calibration_threads(workers: int) -> Iterator[int]:
    """Set the torch threads of a run, in this process for as long as it captures.

    Args:
        workers: processes that calibrate; 1 leaves the number of threads as it is.

    Returns:
        Threads of each process: they, and not the workers, decide the bytes of a run.

    Raises:
        CalibrationError: there is no such number of workers.

    Source: own.
    """
    if workers < 1:
        raise CalibrationError(
            "this number of workers cannot be used",
            where="workers",
            expected="1 or more",
            got=workers,
        )
    before = torch.get_num_threads()
    threads = before if workers == 1 else max(1, available_cores() // workers)
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def calibrate_in_workers(
    work: LayerWork,
    captures: Iterable[LayerCapture],
    pending: dict[int, list[Recipe]],
    workers: int,
    threads: int,
) -> Iterator[tuple[int, int]]:
    """Calibrate several layers at a time, each in a process of its own.

    A layer is captured when a worker is free for it, so at most `workers` captures exist. Close the
    iterator to stop the workers.

    Args:
        work: what to do with a layer.
        captures: layers in order.
        pending: recipes of each layer.
        workers: processes.
        threads: torch threads of each.

    Returns:
        Iterator of (layer, recipes of it that are done).

    Raises:
        CalibrationError: a worker was killed.
        Whatever a worker raises.

    Source: own.
    """
    pool: list[_Worker] = []
    try:
        with _interrupts_held():
            for _ in range(min(workers, len(pending))):
                pool.append(_Worker(work, threads))
        for capture in captures:
            free = next(worker for worker in pool if worker.layer is None)
            free.take(capture, pending[capture.layer])
            del capture  # before the next layer is recorded
            while all(worker.layer is not None for worker in pool):
                yield from _wait(pool)
        while any(worker.layer is not None for worker in pool):
            yield from _wait(pool)
    finally:
        for worker in pool:
            worker.stop()
        work.folder.drop_left_overs()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Leave Ctrl-C to this process: those that start meanwhile inherit the blocked signal."""
    resource_tracker.ensure_running()  # else started with the first one, and then unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(pool: list[_Worker]) -> list[tuple[int, int]]:
    """Wait until a worker says something; return (layer, recipes done) of each that did."""
    busy = {worker.connection: worker for worker in pool if worker.layer is not None}
    return [busy[ready].hear() for ready in connection.wait(list(busy))]


class _Worker:
    """A process, the pipe to it, and the layer that it is working on, None when it is free."""

    def __init__(self, work: LayerWork, threads: int) -> None:
        context = get_context("spawn")  # a forked process must not use torch threads or a GPU
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, work, threads), daemon=True)
        self.process.start()
        other.close()  # so that the end of the process is the end of the pipe
        self.layer: int | None = None
        self.recipes = 0

    def take(self, capture: LayerCapture, recipes: Sequence[Recipe]) -> None:
        self.layer, self.recipes = capture.layer, len(recipes)
        try:
            _send(self.connection, capture, recipes)
        except OSError as error:
            raise self._died() from error

    def hear(self) -> tuple[int, int]:
        try:
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, Exception):
            raise message
        layer = self.layer
        if message == self.recipes:
            self.layer = None
        return layer, message

    def _died(self) -> CalibrationError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        killed = code is not None and code < 0
        return CalibrationError(
            "a calibration worker ended before its layer was done",
            where=f"cache layer {self.layer}",
            got=f"killed by signal {-code}" if killed else f"exit code {code}",
            next_step="if memory ran out, take fewer workers; go on with --resume"
            if killed
            else "read what it wrote above; a script that asks for workers needs "
            'if __name__ == "__main__":',
        )

    def stop(self) -> None:
        self.process.kill()  # it is idle, or its work is not wanted any more
        self.process.join()
        self.process.close()
        self.connection.close()


def _work(pipe: Connection, work: LayerWork, threads: int) -> None:
    """Calibrate what comes through the pipe until its other end closes (in the worker)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            capture, recipes = _receive(pipe)
            for message in _messages(work, capture, recipes):
                pipe.send(message)
            del capture  # before the next one comes


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _messages(
    work: LayerWork, capture: LayerCapture, recipes: Sequence[Recipe]
) -> Iterator[int | Exception]:
    try:
        yield from work.run(capture, recipes)
    except Exception as error:
        yield _portable(error)


def _portable(error: Exception) -> Exception:
    """Return an error that survives the pipe, with the traceback of this process as a note."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _send(pipe: Connection, capture: LayerCapture, recipes: Sequence[Recipe]) -> None:
    values = {field.name: getattr(capture, field.name) for field in fields(capture)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    pipe.send(({name: values[name] for name in values.keys() - shapes}, shapes, list(recipes)))
    for tensor in tensors.values():
        for chunk in _chunks(tensor.contiguous()):
            pipe.send_bytes(chunk)


def _receive(pipe: Connection) -> tuple[LayerCapture, list[Recipe]]:
    values, shapes, recipes = pipe.recv()
    for name, (shape, dtype) in shapes.items():
        values[name] = torch.empty(shape, dtype=dtype)
        for chunk in _chunks(values[name]):
            pipe.recv_bytes_into(chunk)
    return LayerCapture(**values), recipes


def _chunks(tensor: torch.Tensor) -> Iterator[Any]:
    """Return the bytes of a contiguous tensor, as views."""
    flat = tensor.view(-1).view(torch.uint8).numpy()
    return (flat[start : start + CHUNK_BYTES] for start in range(0, len(flat), CHUNK_BYTES))
