import pytest
import torch

from quantmla.errors import EvaluationError
from quantmla.evaluate.data import Text
from quantmla.evaluate.model import load_tokenizer, tokenizer_sha256
from quantmla.evaluate.windows import cut_windows
from tiny_text import write_tokenizer


def test_windows_are_the_first_tokens_without_overlap(tokenizer, text):
    windows = cut_windows(tokenizer, text, window_tokens=100, tokens=350)
    assert windows.ids.shape == (3, 100)
    assert (windows.tokens, windows.window_tokens, windows.bos) == (300, 100, False)
    assert windows.ids.flatten().tolist() == tokenizer(text.text)["input_ids"][:300]
    assert windows.text_sha256 == text.sha256


def test_a_tokenizer_with_bos_starts_every_window_with_it(tmp_path, text):
    write_tokenizer(tmp_path, bos=True)
    tokenizer = load_tokenizer(tmp_path)
    windows = cut_windows(tokenizer, text, window_tokens=100, tokens=200)
    assert windows.bos
    assert windows.ids[:, 0].tolist() == [tokenizer.bos_token_id] * 2
    plain = tokenizer(text.text, add_special_tokens=False)["input_ids"]
    assert windows.ids[:, 1:].flatten().tolist() == plain[:198]


def test_hash_is_of_the_tokens_scored(tokenizer, text):
    one = cut_windows(tokenizer, text, window_tokens=100, tokens=200)
    other = cut_windows(tokenizer, text, window_tokens=100, tokens=300)
    assert one.tokens_sha256 != other.tokens_sha256
    again = cut_windows(tokenizer, text, window_tokens=100, tokens=200)
    assert one.tokens_sha256 == again.tokens_sha256
    assert torch.equal(one.ids, again.ids)


def test_short_text_says_how_much_is_needed(tokenizer):
    with pytest.raises(EvaluationError, match=r"expected: 100 tokens(.|\n)*got: 5 tokens"):
        cut_windows(tokenizer, Text("t", "short", "0"), window_tokens=100, tokens=100)


@pytest.mark.parametrize(("window", "tokens"), [(1, 10), (100, 99)])
def test_no_whole_window_is_refused(tokenizer, text, window, tokens):
    with pytest.raises(EvaluationError, match="no whole window"):
        cut_windows(tokenizer, text, window_tokens=window, tokens=tokens)


def test_tokenizer_hash_is_of_what_it_does(tmp_path):
    for name, bos in (("a", False), ("b", False), ("c", True)):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, bos=bos)
    hashes = [tokenizer_sha256(load_tokenizer(tmp_path / name)) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
