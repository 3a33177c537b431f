import re

import pytest

from quantmla.errors import CheckpointError, QuantMLAError
from quantmla.report import page, plots, write_report

ROW = {
    "method": "bf16",
    "scheme": "bf16",
    "attention": "absorbed BF16",
    "ppl": 30.0,
    "kl": None,
    "top1_flips": None,
    "bytes_per_token": 640,
    "window": 2048,
    "packed_rows_read": 0,
    "valid": True,
    "invalid_reason": None,
    "differs": [],
}


def quantised(method, scheme, ppl, kl, size):
    return ROW | {
        "method": method,
        "scheme": scheme,
        "attention": "absorbed quantised",
        "ppl": ppl,
        "kl": kl,
        "top1_flips": kl / 2,
        "bytes_per_token": size,
        "packed_rows_read": 123456,
    }


@pytest.fixture
def results():
    rows = [
        ROW,
        quantised("rtn", "c4r4", 33.0, 0.08, 176),
        quantised("quantmla", "c2r4", 31.5, 0.03, 112),
    ]
    layers = [
        {
            "method": m,
            "scheme": s,
            "layer": i,
            "heldout_windows": 2,
            "content_error": 0.1 / (i + 1),
            "rope_error": 0.2,
        }
        for m, s in (("rtn", "c4r4"), ("quantmla", "c2r4"))
        for i in range(3)
    ]
    task = {
        "task": "piqa",
        "method": "rtn",
        "scheme": "c4r4",
        "attention": "absorbed quantised",
        "accuracy": 0.617,
        "ci95": [0.49, 0.73],
        "floor": 0.5,
        "discriminative": False,
        "items": 60,
        "items_with_packed_rows": 58,
        "valid": True,
    }
    return {"rows": rows, "layers": layers, "tasks": [task], "manifest": {"seed": 7}}


def test_page_holds_everything_and_needs_nothing(tmp_path, results):
    text = write_report(results, tmp_path / "r.html", title="A <title>").read_text()
    assert text.startswith("<!doctype html>")
    for address in ("http:", "https:", "src=", "<script", "@import", "url(http"):
        assert address not in text
    assert "A &lt;title&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert "+10.00%" in text  # 33 against 30
    assert "123,456" in text
    assert "3.64" in text  # 640 / 176
    assert "0.617" in text
    assert "not above it" in text
    assert "&#34;seed&#34;: 7" in text
    # KL, perplexity, bytes, and both paths of two schemes
    assert len(re.findall("<svg", text)) == len(re.findall("</svg>", text)) == 7


def test_layer_plots_say_what_was_measured(tmp_path, results):
    text = write_report(results, tmp_path / "r.html").read_text()
    assert text.count("relative attention output error") == 4
    assert "C2R4, only the RoPE path quantised" in text
    assert "nothing protected, 2 held-out windows" in text


def test_a_row_stands_against_its_own_reference(tmp_path, results):
    results["rows"] = [row | {"reference_sha256": "a"} for row in results["rows"]]
    results["rows"] += [
        ROW | {"ppl": 60.0, "reference_sha256": "b"},
        quantised("rtn", "c3r4", 63.0, 0.1, 150) | {"reference_sha256": "b"},
        quantised("rtn", "c8r8", 61.0, 0.1, 320) | {"reference_sha256": "c"},
    ]
    text = write_report(results, tmp_path / "r.html").read_text()
    assert "+10.00%" in text  # 33 against 30
    assert "+5.00%" in text  # 63 against 60
    assert len(re.findall(r"\+[\d.]+%", text)) == 3  # none for the row without a reference


def test_plots_follow_the_colours_of_the_page(tmp_path, results):
    text = write_report(results, tmp_path / "r.html").read_text()
    assert plots.INK not in text
    assert "currentColor" in text
    assert "<metadata" not in text
    assert "xmlns" not in text


def test_same_results_same_page(tmp_path, results):
    first = write_report(results, tmp_path / "a.html").read_bytes()
    assert write_report(results, tmp_path / "b.html").read_bytes() == first


def test_invalid_and_incomparable_rows_are_marked(tmp_path, results):
    results["rows"][1] |= {"valid": False, "invalid_reason": "no packed row was read"}
    results["rows"][2] |= {"differs": ["dtype: bfloat16 | float32"]}
    text = write_report(results, tmp_path / "r.html").read_text()
    assert 'class=" invalid"' in text
    assert "no packed row was read" in text
    assert "not measured alike: dtype: bfloat16 | float32" in text


def test_rows_alone_are_enough(tmp_path):
    text = write_report({"rows": [ROW]}, tmp_path / "r.html").read_text()
    assert "30.000" in text
    assert "Tasks" not in text


def test_a_result_without_rows_still_shows_its_tasks(tmp_path, results):
    results["rows"] = []
    assert "piqa" in write_report(results, tmp_path / "r.html").read_text()


def test_missing_packages_are_named(tmp_path, results, monkeypatch):
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(QuantMLAError, match=r"matplotlib, jinja2(.|\n)*quantmla\[report\]"):
        write_report(results, tmp_path / "r.html")


def test_unwritable_place_is_one_error(tmp_path, results):
    with pytest.raises(CheckpointError):
        write_report(results, tmp_path / "no" / "r.html")
    assert list(tmp_path.iterdir()) == []
