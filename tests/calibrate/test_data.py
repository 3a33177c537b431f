"""Calibration data: the windows of a recipe and their provenance."""

import pytest

from calibrate.texts import ByteTokenizer, write_text
from quantmla.calibrate.data import load_windows
from quantmla.config import KVScheme, Recipe
from quantmla.errors import TextError
from quantmla.text import open_text


def recipe(sequences, heldout, tokens=16):
    return Recipe(
        scheme=KVScheme.parse("c4r4"),
        sequences=sequences,
        heldout_sequences=heldout,
        sequence_tokens=tokens,
        protect="none",
    )


def test_training_windows_come_first_then_the_heldout_ones(tmp_path):
    text = open_text(write_text(tmp_path / "text.txt"))
    data = load_windows(text, ByteTokenizer(bos_token_id=1), recipe(3, 2))
    whole = ByteTokenizer()(text.text)["input_ids"]
    assert data.windows.ids.shape == (5, 16)
    assert data.windows.ids[:, 1:].flatten().tolist() == whole[:75]
    assert data.train_sequences == 3
    record = data.provenance()
    assert record == data.windows.provenance() | {"train_sequences": 3, "heldout_sequences": 2}
    assert (record["text_sha256"], record["bos_token_id"]) == (text.sha256, 1)


def test_short_text_says_what_to_change_in_the_recipe(tmp_path):
    text = open_text(write_text(tmp_path / "text.txt", characters=100))
    load_windows(text, ByteTokenizer(), recipe(5, 1))  # 96 fit
    with pytest.raises(TextError, match=r"too short(.|\n)*112 tokens(.|\n)*100 tokens(.|\n)*--set"):
        load_windows(text, ByteTokenizer(), recipe(5, 2))
