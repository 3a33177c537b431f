import json

import pytest

from quantmla.cli.merging import merge_results
from quantmla.errors import EvaluationError

SCORE = ("--window", "200", "--tokens", "200", "--scheme", "c4r4")


def test_eval_prints_one_json_document_and_progress_apart(quantmla, model_folder, text, tmp_path):
    code, out, err = quantmla(
        "eval", model_folder, "--text", text, *SCORE, "--expanded", "--json", "--out", tmp_path
    )
    results = json.loads(out)
    assert code == 0
    assert [row["attention"] for row in results["rows"]] == [
        "absorbed BF16",
        "expanded BF16",
        "absorbed quantised",
    ]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results["manifest"]["texts"] == {str(text): results["rows"][0]["text_sha256"]}
    assert "perplexity" in err
    assert list(tmp_path.iterdir()) == [tmp_path / "results.json"]


def test_eval_prints_a_table_and_can_be_quiet(quantmla, model_folder, text):
    code, out, err = quantmla("eval", model_folder, "--text", text, *SCORE, "-q")
    assert (code, err) == (0, "")
    assert "absorbed quantised" in out


def test_a_run_without_packed_rows_exits_with_3(quantmla, model_folder, text):
    arguments = ("--window", "100", "--tokens", "100", "--scheme", "c4r4")
    code, out, err = quantmla("eval", model_folder, "--text", text, *arguments, "--json")
    assert code == 3
    assert json.loads(out)["rows"][-1]["valid"] is False
    assert "did not measure the packed cache" in err
    code, _, _ = quantmla("eval", model_folder, "--text", text, *arguments, "--window-tokens", "0")
    assert code == 0


def test_tasks_and_needles(quantmla, model_folder):
    code, out, _ = quantmla(
        *("eval", model_folder, "--scheme", "c4r4", "--task", "arc_easy", "--limit", "1"),
        *("--needle", "200", "--needle-items", "2", "--json", "-q", "--batch", "4"),
    )
    results = json.loads(out)
    assert code == 0
    assert results["rows"] == []
    named = [(row["task"], row["attention"]) for row in results["tasks"]]
    assert named == [
        (task, attention)
        for attention in ("absorbed BF16", "absorbed quantised")
        for task in ("arc_easy", "needle_200")
    ]


def test_dry_run_scores_nothing(quantmla, model_folder, text, monkeypatch):
    monkeypatch.setattr("quantmla.evaluate.run.loaded", None)
    monkeypatch.setattr("quantmla.evaluate.fidelity.loaded", None)
    code, out, _ = quantmla("eval", model_folder, "--text", text, *SCORE, "--dry-run", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["tokens_fed"] == 400
    assert found["scratch_disk_bytes"] == 4 * 200 * 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "no-such-file"), "no such text"),
        (("--prefill", "lazy"), "unknown prefill mode"),
        (("--dtype", "float8"), "unknown dtype"),
        (("--tokens", "100000", "--window", "200"), "too short"),
    ],
)
def test_wrong_input_is_one_error(quantmla, model_folder, text, arguments, message):
    options = ("--text", text, "--scheme", "c4r4", *arguments)
    code, out, err = quantmla("eval", model_folder, *options)
    assert (code, out) == (1, "")
    assert message in err
    assert "Traceback" not in err


def test_report_merges_results_and_marks_rows(quantmla, model_folder, text, tmp_path):
    for name, tokens in (("a", "200"), ("b", "400")):
        arguments = ("--window", "200", "--tokens", tokens, "--scheme", "c4r4", "-q")
        quantmla("eval", model_folder, "--text", text, *arguments, "--out", tmp_path / name)
    page = tmp_path / "r.html"
    code, out, _ = quantmla("report", tmp_path / "a", tmp_path / "b", "--out", page, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["rows"] == 4
    assert summary["not_measured_alike"] == ["bf16 bf16", "rtn c4r4"]
    assert "tokens: 400 | 200" in page.read_text()
    code, _, err = quantmla("report", tmp_path / "a", tmp_path / "b", "--out", page, "--strict")
    assert code == 1
    assert "not measured alike" in err


def test_other_json_files_are_refused(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(EvaluationError, match="not a result file"):
        merge_results([tmp_path])
