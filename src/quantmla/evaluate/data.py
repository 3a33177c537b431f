"""Open the task files that ship with the package, or any JSONL file, with their hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from quantmla.errors import TextError
from quantmla.text import decode_text, read_text_bytes

ITEM_SLICES = {
    name: f"{name}.jsonl.gz" for name in ("arc_easy", "piqa", "hellaswag", "winogrande", "lambada")
}


@dataclass(frozen=True)
class Items:
    """One task file: `name`, the parsed `items` in file order, `sha256` of the file's bytes."""

    name: str
    items: list[dict]
    sha256: str


def open_items(name: str | Path) -> Items:
    """Open a task file by slice name or by path.

    Args: name [slice name of ITEM_SLICES, or the path of a JSONL file, plain or .gz].
    Returns: Items.
    Raises: TextError if the file is missing, not UTF-8, or a line is not a JSON object.
    Source: own.
    """
    data = read_text_bytes(name, ITEM_SLICES)
    items = []
    for number, line in enumerate(decode_text(data, name).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if not isinstance(item, dict):
                raise ValueError(f"a JSON {type(item).__name__}")
        except ValueError as error:
            raise TextError(
                "a line of the task file is not a JSON object",
                where=f"{name}, line {number}",
                expected="one JSON object a line",
                got=error,
                next_step="correct or remove the line",
            ) from error
        items.append(item)
    if not items:
        raise TextError(
            "the task file has no items",
            where=name,
            expected="one JSON object a line",
            got="only empty lines",
            next_step="check the path",
        )
    return Items(str(name), items, hashlib.sha256(data).hexdigest())
