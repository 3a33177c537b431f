"""Calibration text: strict UTF-8, non-overlapping windows, BOS rule, hashes."""

import gzip
import hashlib

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from calibrate.texts import WORDS, ByteTokenizer, write_text
from quantmla.calibrate.capture import load_tokenizer
from quantmla.calibrate.data import load_windows
from quantmla.errors import CalibrationError


def test_windows_follow_the_text_without_overlap(tmp_path):
    path = write_text(tmp_path / "text.txt")
    data = load_windows(path, ByteTokenizer(), 3, 2, 16)
    whole = ByteTokenizer()(path.read_text())["input_ids"]
    assert data.windows.shape == (5, 16)
    assert data.windows.dtype == torch.int64
    assert data.windows.flatten().tolist() == whole[:80]
    assert data.train_sequences == 3
    assert data.text_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    record = data.provenance()
    assert (record["train_sequences"], record["heldout_sequences"]) == (3, 2)
    assert record["bos_token_id"] is None


def test_tokenizer_with_bos_starts_every_window_with_it(tmp_path):
    path = write_text(tmp_path / "text.txt")
    data = load_windows(path, ByteTokenizer(bos_token_id=1), 3, 2, 16)
    plain = load_windows(path, ByteTokenizer(), 3, 2, 15)
    assert data.windows[:, 0].tolist() == [1] * 5
    assert torch.equal(data.windows[:, 1:], plain.windows)
    assert data.provenance()["bos_token_id"] == 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_hugging_face_tokenizer_of_a_checkpoint_folder(tmp_path, adds_bos):
    words = ["<s>", *WORDS]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(tmp_path)
    path = write_text(tmp_path / "text.txt")
    data = load_windows(path, load_tokenizer(tmp_path), 2, 1, 9)
    text = path.read_text().split()
    assert [words[i] for i in data.windows[0]] == (["<s>", *text[:8]] if adds_bos else text[:9])
    assert data.provenance()["bos_token_id"] == (0 if adds_bos else None)


def test_only_the_needed_part_is_tokenised(tmp_path):
    class Counting(ByteTokenizer):
        longest = 0

        def __call__(self, text, **options):
            self.longest = max(self.longest, len(text))
            return super().__call__(text, **options)

    path = write_text(tmp_path / "text.txt", characters=50_000)
    tokenizer = Counting()
    load_windows(path, tokenizer, 1, 1, 16)
    assert tokenizer.longest < 2000


def test_gz_gives_the_same_windows_and_hash(tmp_path):
    path = write_text(tmp_path / "text.txt")
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    one, other = (load_windows(p, ByteTokenizer(), 2, 1, 16) for p in (path, packed))
    assert torch.equal(one.windows, other.windows)
    assert one.provenance() == other.provenance()


def test_short_text_says_how_many_tokens_are_needed_and_found(tmp_path):
    path = write_text(tmp_path / "text.txt", characters=100)
    load_windows(path, ByteTokenizer(), 5, 1, 16)  # 96 fit
    with pytest.raises(CalibrationError, match=r"too short(.|\n)*112 tokens(.|\n)*100 tokens"):
        load_windows(path, ByteTokenizer(), 5, 2, 16)


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"plain text \xe9t\xe9")
    with pytest.raises(CalibrationError, match=r"not UTF-8(.|\n)*byte 11(.|\n)*0xe9"):
        load_windows(path, ByteTokenizer(), 1, 1, 4)


def test_missing_text_is_one_clear_error(tmp_path):
    with pytest.raises(CalibrationError, match=r"cannot be read(.|\n)*nowhere\.txt"):
        load_windows(tmp_path / "nowhere.txt", ByteTokenizer(), 1, 1, 4)


def test_damaged_gz_is_one_clear_error(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"some text " * 1000)[:60])
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_windows(path, ByteTokenizer(), 1, 1, 4)
