"""Calibration data: token windows of a text, for training and for the held-out choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantmla.config import Recipe
from quantmla.text import Text, Windows, cut_windows


@dataclass(frozen=True)
class CalibrationData:
    """Training windows, followed by held-out windows.

    Args:
        windows: Windows of both, in the order of the text.
        train_sequences: how many of them are for training.
    """

    windows: Windows
    train_sequences: int

    def provenance(self) -> dict[str, Any]:
        """Return what a manifest records about the text and its windows."""
        return {
            **self.windows.provenance(),
            "train_sequences": self.train_sequences,
            "heldout_sequences": len(self.windows.ids) - self.train_sequences,
        }


def load_windows(text: Text, tokenizer: Any, recipe: Recipe) -> CalibrationData:
    """Cut the windows of a recipe from the start of a text.

    Args:
        text: Text.
        tokenizer: of the model; see `cut_windows`.
        recipe: says how many windows, and how long.

    Returns:
        CalibrationData.

    Raises:
        TextError: the text is too short.

    Source: own; protocol of the QuantMLA study (held-out windows from the training text).
    """
    count = recipe.sequences + recipe.heldout_sequences
    windows = cut_windows(
        tokenizer,
        text,
        window_tokens=recipe.sequence_tokens,
        tokens=count * recipe.sequence_tokens,
        next_step="use a longer --text, or fewer or shorter windows in the recipe "
        "(--set sequences=..., --set sequence_tokens=...)",
    )
    return CalibrationData(windows, recipe.sequences)
