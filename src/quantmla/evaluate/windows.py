"""Cut a text into scoring windows: no overlap, the tokenizer's own BOS rule, everything hashed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from quantmla.errors import EvaluationError
from quantmla.evaluate.data import Text


@dataclass(frozen=True)
class Windows:
    """Token ids to score.

    Args:
        ids [n, window, int64]: each row is scored on its own.
        bos: whether each row starts with the BOS token.
        text_sha256: hash of the whole text.
        tokens_sha256: hash of the ids that are scored.
    """

    ids: torch.Tensor
    bos: bool
    text_sha256: str
    tokens_sha256: str

    @property
    def window_tokens(self) -> int:
        """Tokens of one window."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return self.ids.numel()


def cut_windows(tokenizer, text: Text, *, window_tokens: int, tokens: int) -> Windows:
    """Take the first tokens of a text as windows without overlap.

    Args:
        tokenizer: transformers tokenizer; if it puts a BOS before a text, each window starts with
            one.
        text: Text.
        window_tokens [tokens]: length of one window.
        tokens [tokens]: how many to score; rounded down to whole windows.
    Returns: Windows.
    Raises: EvaluationError if the numbers make no window or the text is too short.
    Source: own; windows as in spec models_data.md 0.
    """
    if window_tokens < 2 or tokens < window_tokens:
        raise EvaluationError(
            "no whole window fits",
            expected="window of at least 2 tokens, and at least one window of tokens",
            got=f"window {window_tokens}, tokens {tokens}",
        )
    plain = tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = adds_bos(tokenizer)
    body_tokens = window_tokens - bos
    count = tokens // window_tokens
    if len(plain) < count * body_tokens:
        raise EvaluationError(
            "the text is too short",
            where=text.name,
            expected=f"{count * body_tokens} tokens for {count} windows of {window_tokens}",
            got=f"{len(plain)} tokens",
            next_step="give a longer text, or score fewer tokens",
        )
    ids = torch.tensor(plain[: count * body_tokens], dtype=torch.int64).view(count, body_tokens)
    if bos:
        ids = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), ids], dim=1)
    digest = hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    return Windows(ids, bos, text.sha256, digest)


def adds_bos(tokenizer) -> bool:
    """Tell whether the tokenizer itself puts a BOS before a text.

    Args: tokenizer [transformers tokenizer].
    Source: own.
    """
    with_special = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and with_special[:1] == [tokenizer.bos_token_id]
