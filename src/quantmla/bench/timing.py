"""Interleaved A/B timing: short bursts of CUDA graphs with pauses, and the median of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from quantmla.errors import KernelUnavailableError
from quantmla.kernels.support import implementation

BURST_S = 2e-3  # long against the clock of events, short against the heat of a burst
PAUSE_S = 3e-3
MOST_CALLS = 64


def require_gpu() -> None:
    """Refuse to time anything where the kernels do not run.

    Raises: KernelUnavailableError with every reason.
    Source: own.
    """
    name, reasons = implementation("cuda" if torch.cuda.is_available() else "cpu")
    if name != "triton":
        raise KernelUnavailableError(
            "there is nothing to time",
            where="quantmla bench",
            expected="an NVIDIA GPU on which Triton runs",
            got="; ".join(reasons),
            next_step="run it on such a machine; quantmla env says what this one has",
        )


def interleaved(calls: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Time several functions in turn, so that clocks and heat meet all of them alike.

    Args:
        calls: name to functions that do the same work on inputs of their own; a graph runs through
            them again and again, so that no input is still in the cache of the GPU.
        rounds: bursts of each.
    Returns: name to median time of one call [us].
    Source: own; the bursts follow the measurements in docs/performance.md.
    """
    bursts = {name: _burst(functions) for name, functions in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (graph, n_calls) in bursts.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            time.sleep(PAUSE_S)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / n_calls)
    return {name: statistics.median(values) for name, values in times.items()}


def _burst(functions: list[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture so many calls that a replay takes about BURST_S."""
    for function in functions:
        function()  # compiles
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for function in functions:
        function()
    torch.cuda.synchronize()
    one_s = (time.perf_counter() - begin) / len(functions)
    n_calls = min(MOST_CALLS, max(len(functions), round(BURST_S / max(one_s, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_calls):
            functions[i % len(functions)]()
    return graph, n_calls
