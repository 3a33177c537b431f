"""What a benchmark leaves behind: its rows, and everything needed to repeat them."""

from __future__ import annotations

import json
from pathlib import Path

from quantmla.evaluate.manifest import build_manifest, package_version
from quantmla.files import atomic_write, storage_errors


def finish(rows: list[dict], seed: int, out: Path | None, device: str = "cuda") -> dict:
    """Add the manifest to the rows, and write both if a file is named.

    Args:
        rows: of a benchmark.
        seed: that it used.
        out: JSON file, or None.
        device: torch device that it ran on.
    Returns: {"rows", "manifest"}.
    Raises: CheckpointError if the file cannot be written.
    Source: own.
    """
    manifest = build_manifest(models={}, texts={}, seed=seed, device=device)
    result = {"rows": rows, "manifest": manifest | {"triton": package_version("triton")}}
    if out is not None:
        with storage_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(out, json.dumps(result, indent=1) + "\n")
    return result
