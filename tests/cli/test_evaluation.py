import json

import pytest
from safetensors.torch import load_file, save_file

from quantmla.checkpoint.lock import folder_lock
from quantmla.cli.merging import merge_results
from quantmla.errors import EvaluationError
from tiny_text import write_tiny_with_tokenizer

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


def test_a_result_is_not_written_over(quantmla, model_folder, text, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    options = ("--text", text, *SCORE, "--out", tmp_path)
    code, stdout, err = quantmla("eval", model_folder, *options)
    assert (code, stdout) == (1, "")
    assert "this result already exists" in err
    assert (tmp_path / "results.json").read_text() == "{}"


def test_two_runs_do_not_share_a_folder(quantmla, model_folder, text, tmp_path):
    with folder_lock(tmp_path / "out"):
        options = ("--text", text, *SCORE, "--out", tmp_path / "out")
        code, _, err = quantmla("eval", model_folder, *options)
    assert code == 1
    assert "another run is writing" in err


def test_without_a_reference_the_model_is_its_own_and_that_is_said(
    quantmla, model_folder, text, tmp_path
):
    options = ("--text", text, *SCORE, "--json", "--dry-run")
    assert "no --reference" in quantmla("eval", model_folder, *options)[2]
    _, _, err = quantmla("eval", model_folder, *options, "--reference", model_folder)
    assert "no --reference" not in err


def damage(folder, how):
    """Break a sharded checkpoint; return what the error must say."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    shard = folder / index["weight_map"][name]
    if how == "shard":
        shard.unlink()
        return "files that are not there"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-50])
        return "file is damaged"
    tensors = load_file(shard)
    del tensors[name], index["weight_map"][name]
    save_file(tensors, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return f"no {name}"


@pytest.mark.parametrize("how", ["tensor", "shard", "truncated"])
def test_a_damaged_checkpoint_is_not_scored(quantmla, text, tmp_path, how):
    folder = write_tiny_with_tokenizer(tmp_path / "m", max_shard_size="40KB")
    message = damage(folder, how)
    code, out, err = quantmla("eval", folder, "--text", text, *SCORE)
    assert (code, out) == (1, "")
    assert message in err


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
        (("--prefill", "lazy"), "unknown prefill"),
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
    both = (tmp_path / "a", tmp_path / "b")
    code, _, err = quantmla("report", *both, "--out", page)
    assert code == 1
    assert "this result already exists" in err
    code, _, err = quantmla("report", *both, "--out", tmp_path / "s.html", "--strict")
    assert code == 1
    assert "not measured alike" in err


def test_other_json_files_are_refused(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(EvaluationError, match="not a result file"):
        merge_results([tmp_path])
