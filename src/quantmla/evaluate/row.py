"""What every result row says beside its score: scheme, bytes, policy, mode, and if it counts."""

from __future__ import annotations

from quantmla.cache.policy import packed_pairs
from quantmla.checkpoint.card import bytes_per_token
from quantmla.checkpoint.header import read_json
from quantmla.dims import MLADims
from quantmla.errors import GateError
from quantmla.evaluate.model import PATH_NAMES, Settings, Subject, effective_block

MIXED = "mixed"  # layers of different bits
BF16_ROWS = "c16r16"
NOT_FINITE_NEXT = "check the weights (quantmla verify), or use --dtype float32"


def describe(subject: Subject, settings: Settings) -> dict:
    """Say what a row was measured with: scheme, bytes, policy, numbers and mode.

    Args: subject; settings.
    Returns: fields for a result row; bytes_per_token is per layer, the mean where layers differ,
        and the scheme then is "mixed"; packed_layers are those that do not keep BF16 rows only.
    Raises: SchemeError or CheckpointError if the folder does not say.
    Source: own.
    """
    dims = MLADims.from_config(read_json(subject.folder / "config.json"))
    row = {
        "attention": PATH_NAMES[subject.path],
        "scheme": "bf16",
        "bytes_per_token": dims.bf16_bytes_per_token,
        "cache_layers": dims.num_cache_layers,
        "packed_layers": 0,
        "group": None,
        "zero": None,
        "clip": None,
        "sink_tokens": None,
        "window_tokens": None,
        "dtype": settings.dtype,
        "device": settings.device,
        "prefill": settings.prefill if subject.path != "expanded" else None,
        "chunk_tokens": settings.chunk_tokens if subject.path != "expanded" else None,
        "batch": settings.batch,
    }
    if subject.path == "quantised":
        block = effective_block(subject)
        sizes = bytes_per_token(dims, block)
        names = [block.scheme(layer).name for layer in range(dims.num_cache_layers)]
        row |= {
            "scheme": names[0] if len(set(names)) == 1 else MIXED,
            "bytes_per_token": round(sum(sizes) / len(sizes)),
            "packed_layers": sum(name != BF16_ROWS for name in names),
            "group": block.content.group,
            "zero": block.zero,
            "clip": block.clip,
            "sink_tokens": block.sink_tokens,
            "window_tokens": block.window_tokens,
        }
    return row


def expected_pairs(row: dict, tokens: int, chunk_starts: list[int]) -> int:
    """Count the packed keys that the queries of one sequence must read in one packed layer.

    Args: row [from describe]; tokens [fed to the model]; chunk_starts [borders, used in fast mode].
    Returns: count; 0 where nothing is packed.
    Source: own.
    """
    if not row["packed_layers"]:
        return 0
    starts = chunk_starts if row["prefill"] == "fast" else None
    return packed_pairs(0, tokens, row["sink_tokens"], row["window_tokens"], starts)


def validity(row: dict) -> dict:
    """Decide whether a row measured the packed cache at all.

    Args: row [with attention, packed_rows_read, packed_rows_expected].
    Returns: {"valid": bool, "invalid_reason": str | None}.
    Source: field report FR-090.
    """
    reason = None
    if row["attention"] == PATH_NAMES["quantised"]:
        read, expected = row["packed_rows_read"], row["packed_rows_expected"]
        if read == 0:
            reason = "no packed row was read: the sequences are no longer than sink + window"
        elif read != expected:
            reason = f"{read} packed rows were read, {expected} expected"
    return {"valid": reason is None, "invalid_reason": reason}


def require_valid(rows: list[dict]) -> None:
    """Stop if a row says nothing about the packed cache.

    Args: rows [from measure_fidelity or the task runner].
    Raises: GateError naming the rows.
    Source: field report FR-090.
    """
    bad = [row for row in rows if not row["valid"]]
    if bad:
        raise GateError(
            "the run is invalid: it did not measure the packed cache",
            where=", ".join(f"{r['method']} {r.get('task') or r.get('window')}" for r in bad),
            expected=f"{max(1, bad[0]['packed_rows_expected'])} packed rows read",
            got=bad[0]["invalid_reason"],
            next_step="use longer windows or contexts (--window, --shots), or --window-tokens 0",
        )
