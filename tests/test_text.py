"""Texts and the windows cut from them: strict UTF-8, one line-end rule, BOS rule, hashes."""

import gzip
import hashlib
from pathlib import Path

import pytest
import torch

import quantmla
from calibrate.texts import ByteTokenizer
from quantmla import text as module
from quantmla.errors import TextError
from quantmla.evaluate.data import ITEM_SLICES
from quantmla.loading import load_tokenizer
from quantmla.text import TEXT_SLICES, Text, cut_windows, open_text
from tiny_text import write_text, write_tokenizer

FOLDER = Path(quantmla.__file__).parent / "data"
# sha256 of the unpacked slices: results are compared by these
TEXT_SHA256 = {
    "haystack": "0bab64f5f5741120434f05ed36a504c220192afa3ac31dfc399d4239fc491d8a",
    "wikitext2-test": "8f6853128203ddb26345a50b798e8cf151b22819a53d19c979b79b0251739efc",
    "wikitext2-train": "b4ef4702ea4f48eb29d391b8bd7482c53bba95c9cedd47245a66b00414ae7022",
    "wikitext2-valid": "00157e87ee2cbdfd7fea8bfad190ed62ba084805e726aace86f8ed1fde47584e",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return open_text(write_text(tmp_path_factory.mktemp("text") / "text.txt", 3000))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def tokenizer(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, bos=request.param)
    return load_tokenizer(folder)


def test_slices_are_what_results_were_measured_on():
    assert {name: open_text(name).sha256 for name in TEXT_SLICES} == TEXT_SHA256


def test_slices_stay_small_and_are_all_licensed():
    files = sorted(FOLDER.glob("*.gz"))
    assert {f.name for f in files} == {*TEXT_SLICES.values(), *ITEM_SLICES.values()}
    assert sum(f.stat().st_size for f in files) < 1_500_000
    notes = (FOLDER / "LICENSES.md").read_text(encoding="utf-8")
    assert [f.name for f in files if f.name not in notes] == []


def test_copies_of_other_systems_read_and_hash_like_the_original(tmp_path):
    plain = "one\ntwo é\n".encode()
    copies = [plain, plain.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + plain]
    for number, content in enumerate([*copies, gzip.compress(plain)]):
        path = tmp_path / f"{number}{'.gz' if number == 3 else ''}"
        path.write_bytes(content)
        text = open_text(path)
        assert (text.name, text.text) == (str(path), "one\ntwo é\n")
        assert text.sha256 == hashlib.sha256(plain).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain text \xe9t\xe9", r"not UTF-8(.|\n)*byte 11(.|\n)*0xe9"),
        (b" \n", "empty"),
    ],
)
def test_unusable_texts_are_refused(tmp_path, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(TextError, match=message):
        open_text(tmp_path / "text")


def test_missing_text_names_the_slices(tmp_path):
    with pytest.raises(TextError, match=r"nowhere(.|\n)*wikitext2-test"):
        open_text(tmp_path / "nowhere")
    with pytest.raises(TextError, match="a folder"):
        open_text(tmp_path)


def test_truncated_gzip_is_refused(tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"words" * 1000)[:-20])
    with pytest.raises(TextError, match="cannot be read"):
        open_text(tmp_path / "text.gz")


def test_size_is_bounded_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 100)
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"a" * 1000))
    with pytest.raises(TextError, match="too large"):
        open_text(tmp_path / "text.gz")


def test_windows_are_the_first_tokens_without_overlap(tokenizer, text):
    windows = cut_windows(tokenizer, text, window_tokens=100, tokens=350)
    assert (windows.ids.shape, windows.ids.dtype) == ((3, 100), torch.int64)
    assert (windows.tokens, windows.window_tokens) == (300, 100)
    plain = tokenizer(text.text, add_special_tokens=False)["input_ids"]
    body = windows.ids
    if tokenizer.bos_token_id is not None:
        assert windows.ids[:, 0].tolist() == [tokenizer.bos_token_id] * 3
        body = windows.ids[:, 1:]
    assert body.flatten().tolist() == plain[: body.numel()]
    assert windows.bos_token_id == tokenizer.bos_token_id
    assert windows.provenance() == {
        "text_sha256": text.sha256,
        "tokens_sha256": hashlib.sha256(windows.ids.numpy().tobytes()).hexdigest(),
        "bos_token_id": tokenizer.bos_token_id,
        "tokenizer": f"{type(tokenizer).__name__}/96",
        "sequence_tokens": 100,
    }


def test_a_bos_that_the_tokenizer_does_not_add_is_not_added(text):
    class Silent(ByteTokenizer):
        def __call__(self, text, add_special_tokens=True, verbose=True):
            return super().__call__(text, add_special_tokens=False)

    windows = cut_windows(Silent(bos_token_id=1), text, window_tokens=10, tokens=20)
    assert windows.bos_token_id is None
    assert 1 not in windows.ids


def test_hash_is_of_the_tokens_taken(tokenizer, text):
    one, other, again = (
        cut_windows(tokenizer, text, window_tokens=100, tokens=tokens) for tokens in (200, 300, 200)
    )
    assert one.tokens_sha256 == again.tokens_sha256 != other.tokens_sha256


def test_only_the_needed_part_is_tokenised(tmp_path):
    class Counting(ByteTokenizer):
        longest = 0

        def __call__(self, text, **options):
            self.longest = max(self.longest, len(text))
            return super().__call__(text, **options)

    text = open_text(write_text(tmp_path / "text.txt", 50_000))
    tokenizer = Counting()
    cut_windows(tokenizer, text, window_tokens=16, tokens=32)
    assert tokenizer.longest < 2000


def test_short_text_says_how_much_is_needed_and_names_the_text():
    text = Text("some-slice", "short", "0")
    with pytest.raises(
        TextError, match=r"some-slice\n  expected: 100 tokens(.|\n)*got: 5 tokens\n  next: do this"
    ):
        cut_windows(ByteTokenizer(), text, window_tokens=100, tokens=100, next_step="do this")


@pytest.mark.parametrize(("window", "tokens"), [(1, 10), (100, 99)])
def test_no_whole_window_is_refused(text, window, tokens):
    with pytest.raises(TextError, match="no whole window"):
        cut_windows(ByteTokenizer(), text, window_tokens=window, tokens=tokens)
