import gzip
import hashlib
from pathlib import Path

import pytest

import quantmla
from quantmla.errors import EvaluationError
from quantmla.evaluate import data
from quantmla.evaluate.data import ITEM_SLICES, TEXT_SLICES, open_items, open_text, text_file

FOLDER = Path(quantmla.__file__).parent / "data"
# sha256 of the unpacked slices: results are compared by these
TEXT_SHA256 = {
    "haystack": "0bab64f5f5741120434f05ed36a504c220192afa3ac31dfc399d4239fc491d8a",
    "wikitext2-test": "8f6853128203ddb26345a50b798e8cf151b22819a53d19c979b79b0251739efc",
    "wikitext2-train": "b4ef4702ea4f48eb29d391b8bd7482c53bba95c9cedd47245a66b00414ae7022",
    "wikitext2-valid": "00157e87ee2cbdfd7fea8bfad190ed62ba084805e726aace86f8ed1fde47584e",
}


def test_slices_are_what_results_were_measured_on():
    assert {name: open_text(name).sha256 for name in TEXT_SLICES} == TEXT_SHA256


@pytest.mark.parametrize("name", ITEM_SLICES)
def test_item_slices_have_sixty_items_of_their_task(name):
    items = open_items(name).items
    assert len(items) == 60
    assert {item["task"] for item in items} == {name}


def test_slices_stay_small_and_are_all_licensed():
    files = sorted(FOLDER.glob("*.gz"))
    assert {f.name for f in files} == {*TEXT_SLICES.values(), *ITEM_SLICES.values()}
    assert sum(f.stat().st_size for f in files) < 1_500_000
    notes = (FOLDER / "LICENSES.md").read_text(encoding="utf-8")
    assert [f.name for f in files if f.name not in notes] == []


def test_crlf_copy_scores_and_hashes_like_the_original(tmp_path):
    (tmp_path / "lf").write_bytes("one\ntwo é\n".encode())
    (tmp_path / "crlf").write_bytes("one\r\ntwo é\r\n".encode())
    lf, crlf = open_text(tmp_path / "lf"), open_text(tmp_path / "crlf")
    assert lf.text == crlf.text == "one\ntwo é\n"
    assert lf.sha256 == crlf.sha256 == hashlib.sha256(lf.text.encode()).hexdigest()


def test_gzip_file_opens(tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"words"))
    assert open_text(tmp_path / "text.gz").text == "words"
    with text_file(tmp_path / "text.gz") as path:
        assert path.read_text() == "words"
    assert not path.exists()


def test_text_file_gives_a_plain_file_itself(tmp_path):
    (tmp_path / "text").write_text("words")
    with text_file(tmp_path / "text") as path:
        assert path == tmp_path / "text"
    assert path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe broken", "not UTF-8"),
        (b" \n", "empty"),
    ],
)
def test_unusable_texts_are_refused(tmp_path, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(EvaluationError, match=message):
        open_text(tmp_path / "text")


def test_missing_text_names_the_slices(tmp_path):
    with pytest.raises(EvaluationError, match="wikitext2-test"):
        open_text(tmp_path / "nothing")


def test_truncated_gzip_is_refused(tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"words" * 1000)[:-20])
    with pytest.raises(EvaluationError, match="cannot be read"):
        open_text(tmp_path / "text.gz")


def test_size_is_bounded_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_TEXT_BYTES", 100)
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"a" * 1000))
    with pytest.raises(EvaluationError, match="too large"):
        open_text(tmp_path / "text.gz")


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 2"), ("[1]", "line 2"), ("", "no items")]
)
def test_broken_task_files_name_the_line(tmp_path, line, message):
    first = "\n" if line == "" else '{"id": 1}\n'
    (tmp_path / "items").write_text(first + line)
    with pytest.raises(EvaluationError, match=message):
        open_items(tmp_path / "items")
