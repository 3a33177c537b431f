"""Open the slices that ship with the package, or any text or JSONL file, with their hashes."""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from quantmla.errors import EvaluationError

MAX_TEXT_BYTES = 256 * 2**20

TEXT_SLICES = {
    "wikitext2-train": "wikitext2_train.txt.gz",
    "wikitext2-valid": "wikitext2_valid_tokens.txt.gz",
    "wikitext2-test": "wikitext2_test.txt.gz",
    "haystack": "haystack.txt.gz",
}
ITEM_SLICES = {
    name: f"{name}.jsonl.gz" for name in ("arc_easy", "piqa", "hellaswag", "winogrande", "lambada")
}


@dataclass(frozen=True)
class Text:
    """One corpus: `name` as written, `text` with `\\n` line ends, `sha256` of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Items:
    """One task file: `name`, the parsed `items` in file order, `sha256` of the file's bytes."""

    name: str
    items: list[dict]
    sha256: str


def open_text(name: str | Path) -> Text:
    """Open a text by slice name or by path.

    Args: name [slice name of TEXT_SLICES, or the path of a UTF-8 file, plain or .gz].
    Returns: Text with universal line ends, so that a CRLF copy of a corpus scores and hashes like
        the LF one.
    Raises: EvaluationError if the file is missing, too large, empty or not UTF-8.
    Source: own.
    """
    text = _decode(_read(name, TEXT_SLICES), name).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise EvaluationError(
            "the text is empty", where=str(name), next_step="give a file with prose in it"
        )
    return Text(str(name), text, hashlib.sha256(text.encode()).hexdigest())


@contextmanager
def text_file(name: str | Path) -> Iterator[Path]:
    """Give the path of a plain UTF-8 file for code that reads one, unpacking a slice if need be.

    Args: name [as for open_text].
    Returns: the path itself where it is a plain file, else that of a temporary copy.
    Raises: EvaluationError as open_text.
    Source: own.
    """
    if name not in TEXT_SLICES and not str(name).endswith(".gz"):
        open_text(name)
        yield Path(name)
        return
    with tempfile.TemporaryDirectory(prefix="quantmla-") as folder:
        path = Path(folder) / "text.txt"
        path.write_text(open_text(name).text, encoding="utf-8")
        yield path


def open_items(name: str | Path) -> Items:
    """Open a task file by slice name or by path.

    Args: name [slice name of ITEM_SLICES, or the path of a JSONL file, plain or .gz].
    Returns: Items.
    Raises: EvaluationError if the file is missing, not UTF-8, or a line is not a JSON object.
    Source: own.
    """
    data = _read(name, ITEM_SLICES)
    items = []
    for number, line in enumerate(_decode(data, name).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationError(
                "a line of the task file is not JSON",
                where=f"{name}, line {number}",
                got=str(error),
            ) from error
        if not isinstance(item, dict):
            raise EvaluationError(
                "a line of the task file is not a JSON object",
                where=f"{name}, line {number}",
                got=type(item).__name__,
            )
        items.append(item)
    if not items:
        raise EvaluationError("the task file has no items", where=str(name))
    return Items(str(name), items, hashlib.sha256(data).hexdigest())


def _read(name: str | Path, slices: dict[str, str]) -> bytes:
    source = files("quantmla") / "data" / slices[name] if name in slices else Path(name)
    if not source.is_file():
        raise EvaluationError(
            "no such text",
            where=str(name),
            expected=f"a file, or one of {', '.join(sorted(slices))}",
            next_step="check the path",
        )
    compressed = source.name.endswith(".gz")
    try:
        with source.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            data = stream.read(MAX_TEXT_BYTES + 1)
    except (OSError, EOFError) as error:
        raise EvaluationError("the text cannot be read", where=str(name), got=str(error)) from error
    if len(data) > MAX_TEXT_BYTES:
        raise EvaluationError(
            "the text is too large",
            where=str(name),
            expected=f"at most {MAX_TEXT_BYTES} bytes",
            got="more",
        )
    return data


def _decode(data: bytes, name: str | Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError(
            "the text is not UTF-8",
            where=f"{name}, byte {error.start}",
            expected="UTF-8",
            next_step="convert the file, for example with iconv -t UTF-8",
        ) from error
