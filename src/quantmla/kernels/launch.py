"""How the attention kernels are launched: one table for all architectures, and the cost of a split.

Measured on an H200 (docs/performance.md); other GPUs take the nearest older row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch


@dataclass(frozen=True)
class Launch:
    """Parameters of one kernel launch.

    Fields:
        rows: (query, head) rows of a program.
        tile_tokens: packed tokens of a tile.
        chunks: tiles of a step, which share one update of the softmax.
        recent_tokens: BF16 tokens of a step.
        stages: depth of the copy pipeline; two of them go to the page table.
        warps: of a program.
        programs_an_sm: how many programs an SM holds.
    """

    rows: int
    tile_tokens: int
    chunks: int
    recent_tokens: int
    stages: int
    warps: int
    programs_an_sm: int


# (oldest compute capability, kernel, most rows of a request): the first row that fits is taken.
TABLE = {
    (9, 0): {
        "decode": ((16, Launch(16, 32, 2, 32, 5, 4, 2)), (None, Launch(32, 64, 1, 16, 5, 8, 1))),
        "prefill": ((None, Launch(32, 64, 1, 32, 5, 8, 1)),),
    },
    # less shared memory than (9, 0)
    (12, 0): {
        "decode": ((16, Launch(16, 32, 2, 16, 5, 4, 1)), (None, Launch(32, 32, 1, 16, 5, 8, 1))),
        "prefill": ((None, Launch(32, 32, 1, 16, 5, 8, 1)),),
    },
    (8, 0): {
        "decode": ((16, Launch(16, 32, 2, 16, 5, 4, 2)), (None, Launch(32, 32, 1, 16, 5, 8, 1))),
        "prefill": ((None, Launch(32, 32, 1, 16, 5, 8, 1)),),
    },
}
TWO_TILE_BITS = {2, 4}  # codes of these widths leave registers for a second tile
ONE_TILE_STAGES = {(9, 0): 7}  # where shared memory has room for them
# An interpreted program costs milliseconds, whatever it does.
INTERPRETER = Launch(32, 64, 1, 64, 1, 1, 1)
INTERPRETER_SMS = 1

# Cost of a split in units of one packed blob of one program.
START_BLOBS = 2.0  # loading queries, filling the pipeline, writing the partial result
MERGE_BLOBS = 0.03  # each part of each row, in the second launch
RECENT_BLOBS = 3.0  # the part that reads BF16 rows


def launch_of(
    kernel: str, rows: int, content_bits: int, rope_bits: int, capability: tuple[int, int] | None
) -> Launch:
    """Return the launch parameters of a kernel.

    Args:
        kernel: "decode" or "prefill".
        rows: (query, head) rows of one request.
        content_bits, rope_bits: code widths.
        capability: of the GPU; None for the interpreter.
    Returns: Launch.
    Source: own.
    """
    two_tiles = {content_bits, rope_bits} <= TWO_TILE_BITS
    if capability is None:
        if rows <= 16:  # the same order of work as on a GPU
            return replace(INTERPRETER, rows=16, tile_tokens=32, chunks=2 if two_tiles else 1)
        return INTERPRETER
    known = max(version for version in TABLE if version <= max(capability, (8, 0)))
    launches = TABLE[known][kernel]
    launch = next(one for most, one in launches if most is None or rows <= most)
    if launch.chunks > 1 and not two_tiles:
        return replace(launch, chunks=1, stages=ONE_TILE_STAGES.get(known, launch.stages))
    return launch


@lru_cache(maxsize=4096)
def split_blobs(batch: int, row_tiles: int, blobs: int, sms: int, programs_an_sm: int) -> int:
    """Return how many packed blobs one program should read, by the cost of all splits.

    Programs run in waves. A wave takes as long as one program; a split costs every program its
    start and the second launch one part more to merge.

    Args:
        batch: requests.
        row_tiles: tiles of (query, head) rows of a request.
        blobs: packed blobs of the longest request.
        sms: of the GPU.
        programs_an_sm: how many programs an SM holds.
    Returns: blobs of a part, at least 1.
    Source: own.
    """
    if blobs <= 1:
        return 1
    slots, work = sms * programs_an_sm, batch * row_tiles
    best, best_cost = blobs, float("inf")
    seen = None
    for parts in range(1, min(blobs, max(1, 4 * slots // work) + 1) + 1):
        size = -(-blobs // parts)
        if size == seen:
            continue
        seen = size
        parts = -(-blobs // size)
        waves = -(-work * parts // slots)
        cost = waves * (size + START_BLOBS) + MERGE_BLOBS * parts
        cost += RECENT_BLOBS * work / slots
        if cost < best_cost:
            best, best_cost = size, cost
    return best


@cache
def device_limits(index: int) -> tuple[tuple[int, int], int]:
    """Return the compute capability of a GPU and its number of SMs."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count
