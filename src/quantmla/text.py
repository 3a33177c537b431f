"""Texts: shipped slices and files, their hashes, and the token windows that are cut from them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmla.errors import TextError

if TYPE_CHECKING:
    import torch

MAX_TEXT_BYTES = 256 * 2**20
CHARS_PER_TOKEN = 8  # first guess of how much to tokenise; doubled until there is enough
SPARE_TOKENS = 64  # tokens near a cut of the text may differ from those of the whole text

TEXT_SLICES = {
    "wikitext2-train": "wikitext2_train.txt.gz",
    "wikitext2-valid": "wikitext2_valid_tokens.txt.gz",
    "wikitext2-test": "wikitext2_test.txt.gz",
    "haystack": "haystack.txt.gz",
}


@dataclass(frozen=True)
class Text:
    """One corpus: `name` as written, `text` with `\\n` line ends, `sha256` of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Windows:
    """Token windows without overlap, and where they come from.

    Args:
        ids [n, T, int64]: each row is read on its own.
        bos_token_id: token that starts every row, or None where the tokenizer adds none.
        text_sha256: hash of the whole text.
        tokenizer: class name and vocabulary size of the tokenizer.
    """

    ids: torch.Tensor
    bos_token_id: int | None
    text_sha256: str
    tokenizer: str

    @property
    def window_tokens(self) -> int:
        """Tokens of one window."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return self.ids.numel()

    @property
    def tokens_sha256(self) -> str:
        """Hash of the ids, as little-endian 64-bit integers."""
        return hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest()

    def provenance(self) -> dict[str, Any]:
        """Return what a manifest records about the text and its windows."""
        return {
            "text_sha256": self.text_sha256,
            "tokens_sha256": self.tokens_sha256,
            "bos_token_id": self.bos_token_id,
            "tokenizer": self.tokenizer,
            "sequence_tokens": self.window_tokens,
        }


def open_text(name: str | Path) -> Text:
    """Open a text by slice name or by path.

    Args: name [slice name of TEXT_SLICES, or the path of a UTF-8 file, plain or .gz].
    Returns: Text with universal line ends and no byte-order mark, so that a copy of a corpus from
        another system scores and hashes like the original.
    Raises: TextError if the file is missing, too large, empty or not UTF-8.
    Source: own.
    """
    text = decode_text(read_text_bytes(name, TEXT_SLICES), name).removeprefix("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise TextError(
            "the text is empty",
            where=name,
            expected="prose",
            got=f"{len(text)} characters of white space",
            next_step="give a file with prose in it",
        )
    return Text(str(name), text, hashlib.sha256(text.encode()).hexdigest())


def read_text_bytes(name: str | Path, slices: dict[str, str]) -> bytes:
    """Read a shipped slice or a file, plain or .gz, bounded before it is unpacked.

    Args: name [slice name, or path]; slices [slice name to file name in the package].
    Returns: the unpacked bytes.
    Raises: TextError if the file is missing, damaged or too large.
    Source: own.
    """
    source = files("quantmla") / "data" / slices[name] if name in slices else Path(name)
    if not source.is_file():
        raise TextError(
            "no such text",
            where=name,
            expected=f"a file, or one of {', '.join(sorted(slices))}",
            got="a folder" if source.is_dir() else "nothing of this name",
            next_step="check the path",
        )
    try:
        with source.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if source.name.endswith(".gz") else raw
            data = stream.read(MAX_TEXT_BYTES + 1)
    except (OSError, EOFError) as error:
        raise TextError(
            "the text cannot be read",
            where=name,
            expected="a text file, plain or .gz",
            got=getattr(error, "strerror", None) or error,
            next_step="check the file and its rights",
        ) from error
    if len(data) > MAX_TEXT_BYTES:
        raise TextError(
            "the text is too large",
            where=name,
            expected=f"at most {MAX_TEXT_BYTES} bytes",
            got="more",
            next_step="use its first part; a few MB are enough for any run",
        )
    return data


def decode_text(data: bytes, name: str | Path) -> str:
    """Decode strict UTF-8.

    Args: data; name [for the error].
    Raises: TextError naming the first bad byte.
    Source: own.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            "the text is not UTF-8",
            where=f"{name}, byte {error.start}",
            expected="UTF-8",
            got=f"byte 0x{data[error.start]:02x}, {error.reason}",
            next_step="convert the file, for example with iconv -t UTF-8",
        ) from error


def cut_windows(
    tokenizer: Any,
    text: Text,
    *,
    window_tokens: int,
    tokens: int,
    next_step: str = "give a longer text, or score fewer tokens",
) -> Windows:
    """Take the first tokens of a text as windows that follow each other without overlap.

    Args:
        tokenizer: transformers tokenizer, or any callable that returns {"input_ids": list[int]};
            if it puts a BOS before a text by itself, each window starts with one.
        text: Text.
        window_tokens [tokens]: length of one window, BOS included.
        tokens [tokens]: how many to take; rounded down to whole windows.
        next_step: what to do about a text that is too short.
    Returns: Windows.
    Raises: TextError if the numbers make no window or the text is too short.
    Source: own; windows as in spec models_data.md 0.
    """
    import torch

    if window_tokens < 2 or tokens < window_tokens:
        raise TextError(
            "no whole window fits",
            where=text.name,
            expected="window of at least 2 tokens, and at least one window of tokens",
            got=f"window {window_tokens}, tokens {tokens}",
            next_step="take more tokens or shorter windows",
        )
    bos = bos_token(tokenizer)
    body_tokens = window_tokens - (bos is not None)
    count = tokens // window_tokens
    ids = _first_tokens(tokenizer, text.text, count * body_tokens)
    if len(ids) < count * body_tokens:
        raise TextError(
            "the text is too short",
            where=text.name,
            expected=f"{count * body_tokens} tokens for {count} windows of {window_tokens}",
            got=f"{len(ids)} tokens",
            next_step=next_step,
        )
    body = torch.tensor(ids[: count * body_tokens], dtype=torch.int64).view(count, body_tokens)
    if bos is not None:
        body = torch.cat([torch.full((count, 1), bos, dtype=torch.int64), body], dim=1)
    vocabulary = getattr(tokenizer, "vocab_size", None)
    label = type(tokenizer).__name__ + (f"/{vocabulary}" if vocabulary else "")
    return Windows(body.contiguous(), bos, text.sha256, label)


def bos_token(tokenizer: Any) -> int | None:
    """Return the BOS id if the tokenizer itself puts it before a text, else None.

    Args: tokenizer [as for cut_windows].
    Source: own.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer("a")["input_ids"])
    return bos if bos is not None and ids[:1] == [bos] else None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a text without any special token.

    Args: tokenizer [as for cut_windows]; text.
    Returns: token ids.
    Source: own.
    """
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _first_tokens(tokenizer: Any, text: str, needed_tokens: int) -> list[int]:
    """Tokenise no more of the text than needed; a text with fewer tokens gives all it has."""
    chars = max(needed_tokens * CHARS_PER_TOKEN, 1024)
    while True:
        ids = encode(tokenizer, text[:chars])
        if chars >= len(text) or len(ids) >= needed_tokens + SPARE_TOKENS:
            return ids
        chars *= 2
