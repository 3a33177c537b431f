"""Headers of safetensors files and JSON files, read with bounded sizes and no data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from quantmla.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 200_000_000
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Args:
        shard: file name.
        dtype: safetensors spelling, for example "BF16".
        shape: sizes.
        start, end: absolute byte range in the shard.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_json(path: Path) -> dict:
    """Read one JSON object.

    Raises:
        CheckpointError: missing, too large, not JSON, or not an object.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ValueError(f"{size_bytes} bytes, more than {MAX_JSON_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}, not an object")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} is missing", where=path.parent, next_step="download the file"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read", where=path, expected="one JSON object", got=error
        ) from error
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file without touching its data.

    Args:
        path: the file.

    Returns:
        Tensors in file order; they fill the data part exactly.

    Raises:
        CheckpointError: the file is truncated, too long, or its header is damaged or too large.

    Source: safetensors format.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little") if size_bytes >= 8 else -1
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise ValueError(
                    f"a header of {header_bytes} bytes in a file of {size_bytes} bytes"
                    f" (limit {MAX_HEADER_BYTES})"
                )
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = {
            name: _tensor_info(path.name, name, entry, 8 + header_bytes)
            for name, entry in header.items()
        }
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
        _check_coverage(tensors, 8 + header_bytes, size_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "a safetensors file is damaged",
            where=path,
            expected="a complete safetensors file",
            got=f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error,
            next_step="download the file again",
        ) from error
    return tensors


def _tensor_info(shard: str, name: str, entry: dict, data_start: int) -> TensorInfo:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"{name} has a size or offset that is not a natural number")
    want_bytes = math.prod(shape) * DTYPE_BITS[dtype] / 8
    if end - start != want_bytes:
        raise ValueError(f"{name} takes {end - start} bytes, not {want_bytes:g}")
    return TensorInfo(shard, dtype, shape, data_start + start, data_start + end)


def _check_coverage(tensors: dict[str, TensorInfo], data_start: int, size_bytes: int) -> None:
    position = data_start
    for name, info in tensors.items():
        if info.start != position:
            raise ValueError(f"{name} starts at byte {info.start}, not at {position}")
        position = info.end
    if position != size_bytes:
        state = "truncated" if position > size_bytes else "followed by foreign bytes"
        raise ValueError(f"the file is {state}: {size_bytes} bytes, the header needs {position}")
