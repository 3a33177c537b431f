"""Calibration text: a local UTF-8 file becomes non-overlapping token windows with provenance."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantmla.errors import CalibrationError

CHARS_PER_TOKEN = 8  # first guess of how much to tokenise; doubled until there is enough
MAX_TEXT_BYTES = 1 << 30
SPARE_TOKENS = 64  # tokens near a cut of the text may differ from those of the whole text


@dataclass(frozen=True)
class CalibrationData:
    """Token windows for training and held-out choice, and where they come from.

    Args:
        windows [train + heldout, T, int64]: training windows first, then the held-out ones.
        train_sequences: how many of them are for training.
        text_sha256: hash of the text file's bytes.
        bos_token_id: token that starts every window, or None when the tokenizer adds none.
        tokenizer: class name and vocabulary size of the tokenizer.
    """

    windows: torch.Tensor
    train_sequences: int
    text_sha256: str
    bos_token_id: int | None
    tokenizer: str

    def provenance(self) -> dict[str, Any]:
        """Return what a manifest records about the text and its windows."""
        return {
            "text_sha256": self.text_sha256,
            "tokens_sha256": hashlib.sha256(self.windows.numpy().tobytes()).hexdigest(),
            "bos_token_id": self.bos_token_id,
            "tokenizer": self.tokenizer,
            "train_sequences": self.train_sequences,
            "heldout_sequences": self.windows.shape[0] - self.train_sequences,
            "sequence_tokens": self.windows.shape[1],
        }


def load_windows(
    text_path: str | Path,
    tokenizer: Any,
    sequences: int,
    heldout_sequences: int,
    sequence_tokens: int,
) -> CalibrationData:
    """Cut a text file into training windows followed by held-out windows.

    The windows follow each other in the text without overlap. A tokenizer that by itself starts a
    text with a BOS token gets that token at the start of every window; another one gets none.

    Args:
        text_path: UTF-8 text file.
        tokenizer: Hugging Face tokenizer, or any callable that returns {"input_ids": list[int]}.
        sequences: training windows.
        heldout_sequences: held-out windows.
        sequence_tokens: length of a window, BOS included.

    Returns:
        The windows with their provenance.

    Raises:
        CalibrationError: the file is missing, not UTF-8, or too short.

    Source: own; protocol of the QuantMLA study (held-out windows from the training text).
    """
    text, sha256 = read_text(text_path)
    bos = bos_rule(tokenizer)
    body_tokens = sequence_tokens - (bos is not None)
    count = sequences + heldout_sequences
    needed_tokens = count * body_tokens
    ids = first_tokens(text, tokenizer, needed_tokens)
    if len(ids) < needed_tokens:
        raise CalibrationError(
            "the calibration text is too short",
            where=str(text_path),
            expected=f"{needed_tokens} tokens ({count} windows of {body_tokens})",
            got=f"{len(ids)} tokens",
            next_step="use a longer text, or fewer or shorter windows in the recipe",
        )
    body = torch.tensor(ids[:needed_tokens], dtype=torch.int64).view(count, body_tokens)
    if bos is not None:
        body = torch.cat((torch.full((count, 1), bos, dtype=torch.int64), body), dim=1)
    vocabulary = getattr(tokenizer, "vocab_size", None)
    name = type(tokenizer).__name__ + (f"/{vocabulary}" if vocabulary else "")
    return CalibrationData(body.contiguous(), sequences, sha256, bos, name)


def read_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a UTF-8 file, plain or .gz, and the sha256 of its (unpacked) bytes.

    Raises:
        CalibrationError: missing, too large, or not UTF-8; the first bad byte is named.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, EOFError) as error:
        raise CalibrationError(
            "the calibration text cannot be read",
            where=path,
            expected="a text file, plain or .gz",
            got=getattr(error, "strerror", None) or error,
            next_step="check the path",
        ) from error
    if len(raw) > MAX_TEXT_BYTES:
        raise CalibrationError(
            "the calibration text is too large",
            where=path,
            expected=f"at most {MAX_TEXT_BYTES} bytes",
            got="more",
            next_step="use its first part; a few MB hold the default recipe",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            "the calibration text is not UTF-8",
            where=f"{path}, byte {error.start}",
            expected="UTF-8",
            got=f"byte 0x{raw[error.start]:02x}, {error.reason}",
            next_step="convert the file, for example with iconv -t UTF-8",
        ) from error
    return text.removeprefix("\ufeff"), hashlib.sha256(raw).hexdigest()


def bos_rule(tokenizer: Any) -> int | None:
    """Return the BOS id when the tokenizer itself puts it before a text, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer("a")["input_ids"])
    return bos if bos is not None and ids[:1] == [bos] else None


def first_tokens(text: str, tokenizer: Any, needed_tokens: int) -> list[int]:
    """Tokenise no more of the text than needed; a text with fewer tokens gives all it has."""
    chars = max(needed_tokens * CHARS_PER_TOKEN, 1024)
    while True:
        ids = list(tokenizer(text[:chars], add_special_tokens=False, verbose=False)["input_ids"])
        if chars >= len(text) or len(ids) >= needed_tokens + SPARE_TOKENS:
            return ids
        chars *= 2
