"""A whole small ablation: its table against other parts of the package, resuming, refusals."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from quantmla.ablate.cells import Cell, select
from quantmla.ablate.folder import Folder
from quantmla.ablate.plan import estimate
from quantmla.ablate.run import require_valid_cells, run_ablation
from quantmla.ablate.transforms import Calibrations, combined
from quantmla.calibrate.run import run_calibration
from quantmla.config import KVScheme, Recipe
from quantmla.errors import EvaluationError, GateError, SchemeError
from quantmla.evaluate.fidelity import measure_fidelity
from quantmla.evaluate.model import Settings, Subject
from quantmla.loading import load_tokenizer
from quantmla.report import write_report
from quantmla.text import cut_windows, open_text

SETTINGS = Settings(chunk_tokens=64)


@contextmanager
def silent(title):
    yield lambda what, done, total: None


def run(ablation, resume=False, settings=SETTINGS):
    return run_ablation(ablation, settings, resume=resume, say=lambda line: None, progress=silent)


@pytest.fixture(scope="module")
def finished():
    """One ablation that several tests read."""
    return {}


@pytest.fixture
def done(finished, ablation, tmp_path_factory):
    if not finished:
        out = tmp_path_factory.mktemp("ablation") / "out"
        finished["ablation"] = ablation(out)
        finished["result"] = run(finished["ablation"])
    return finished["ablation"], finished["result"]


def row_of(result, name):
    (row,) = [row for row in result["ablation"]["rows"] if row["cell"] == name]
    return row


def test_the_table_says_what_was_measured_and_how(done):
    ablation, result = done
    rows = result["ablation"]["rows"]
    assert [row["cell"] for row in rows] == [cell.name for cell in ablation.cells]
    assert all(row["valid"] for row in rows if row["promoted"])
    assert row_of(result, "c2r4/rtn/policy")["storage"] == "packed"
    kivi = row_of(result, "c4-kivi4/rtn/bare")
    assert kivi["storage"] == "simulated"
    assert (kivi["bytes_per_token"], kivi["bytes_at_512_64"]) == (28, 316)
    assert kivi["page_bytes_per_token"] is None
    assert "times the smallest" in result["ablation"]["rule"]
    assert result["ablation"]["bootstrap"] == {
        "block_tokens": 50,
        "blocks": 8,
        "resamples": 200,
    }
    assert result["manifest"]["seed"] == 0
    assert result == json.loads((ablation.out / "results.json").read_text())


def test_intervals_hold_the_numbers(done):
    for row in done[1]["ablation"]["rows"]:
        low, high = row["kl_ci95"]
        assert 0 < low < row["kl"] < high
        low, high = row["ppl_ratio_ci95"]
        assert low < row["ppl_ratio"] < high
        bf16 = done[1]["ablation"]["bf16"]["ppl"]
        assert row["ppl_ratio"] == pytest.approx(row["ppl"] / bf16, rel=1e-6)
    rtn, ours = (row_of(done[1], f"c2r4/{m}/policy") for m in ("rtn", "quantmla"))
    assert rtn["kl_over_quantmla"] == pytest.approx(rtn["kl"] / ours["kl"])
    assert ours["kl_over_quantmla"] is None


def test_the_ceiling_is_simulated_and_at_least_as_close_on_every_path(done):
    flat, ours = (row_of(done[1], f"c2r4/{m}/policy") for m in ("flatquant", "quantmla"))
    assert (flat["storage"], ours["storage"]) == ("simulated", "packed")
    assert flat["bytes_per_token"] == ours["bytes_per_token"] == 22
    assert (flat["page_bytes_per_token"], ours["page_bytes_per_token"]) == (None, 22)
    for path in ("content", "rope"):
        assert 0 < flat[f"{path}_distortion"] <= 1.01 * ours[f"{path}_distortion"]


def test_without_the_policy_the_error_is_larger(done):
    policy, bare = (row_of(done[1], f"c2r4/rtn/{p}") for p in ("policy", "bare"))
    assert bare["kl"] > 3 * policy["kl"]
    assert bare["layer_distortion"] > 3 * policy["layer_distortion"]


@pytest.mark.parametrize("method", ["quantmla", "quantmla_plus"])
def test_a_packed_cell_scores_as_the_fused_folder_does(done, model_folder, tmp_path, method):
    """The ablation's own way (weights in memory, paths put together) against the product's."""
    ablation, result = done
    names = {"sequences", "heldout_sequences", "sequence_tokens", "steps", "eval_every", "train"}
    shared = ablation.base.model_dump(include=names)
    own = {"method": method, "scheme": "c2r4", "clip_content": "learned"}
    recipe = Recipe.model_validate(shared | own)
    calibrated = run_calibration(model_folder, ablation.text, [recipe], tmp_path / "run")
    folder = calibrated.fuse(recipe, tmp_path / "fused")
    text = open_text(ablation.text)
    windows = cut_windows(load_tokenizer(model_folder), text, window_tokens=200, tokens=400)
    reference = Subject("bf16", model_folder, path="absorbed")
    subjects = [Subject(method, folder)]
    _, row = measure_fidelity(reference, subjects, windows, SETTINGS, scratch=tmp_path)
    ours = row_of(result, f"c2r4/{method}/policy")
    for name in ("kl", "ppl", "top1_flips", "packed_rows_read"):
        assert ours[name] == pytest.approx(row[name], rel=1e-5), name


def test_single_paths_together_are_the_recipe_of_both(done, model_folder, tmp_path):
    ablation, _ = done
    base = ablation.base
    calibrations = Calibrations(ablation.out / "calibration", base, 2)
    ours = calibrations.transforms(Cell("c2r4", "quantmla", "quantmla"))
    recipe = base.model_copy(update={"scheme": KVScheme.parse("c2r4"), "clip_content": "learned"})
    whole = run_calibration(model_folder, ablation.text, [recipe], tmp_path / "run")
    for mine, theirs in zip(ours, whole.transforms(recipe), strict=True):
        for name in ("content_rotation", "content_scale", "rope_angle", "rope_scale"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert torch.equal(mine.content_clip, theirs.content_clip)
    mixed = combined(ours[0], calibrations.transforms(Cell("c2r4", "rtn", "rtn"))[0])
    assert mixed.rope_identity
    assert mixed.content_rotation is ours[0].content_rotation


def test_a_resumed_ablation_takes_more_cells_and_computes_only_them(done, monkeypatch):
    ablation, result = done
    scored = []
    save = Folder.save_scores
    monkeypatch.setattr(
        Folder,
        "save_scores",
        lambda self, cell, shard, scores: (
            scored.append((getattr(cell, "name", cell), shard)),
            save(self, cell, shard, scores),
        ),
    )
    more = replace(ablation, cells=(*ablation.cells, *select(["c2r4/quarot_online/policy"])))
    again = run(more, resume=True)
    expected = [(name, shard) for shard in (0, 1) for name in ("bf16", "c2r4/quarot_online/policy")]
    assert scored == expected
    before = {row["cell"]: row.get("kl") for row in result["ablation"]["rows"]}
    after = {row["cell"]: row.get("kl") for row in again["ablation"]["rows"]}
    assert {name: after[name] for name in before} == before
    assert estimate(more, SETTINGS)["recipes_to_calibrate"] == []


def test_folders_of_something_else_are_refused(done):
    ablation, _ = done
    with pytest.raises(EvaluationError, match="add --resume"):
        run(ablation)
    with pytest.raises(EvaluationError, match="other tokens, window_tokens"):
        run(replace(ablation, window_tokens=133), resume=True)


def test_a_cell_that_loses_is_not_scored(ablation, tmp_path):
    patterns = ["nvfp4/rtn/policy", "nvfp4/quarot_online/policy", "c4r4/rtn/policy"]
    result = run(ablation(tmp_path / "out", patterns, gate=1.0, tokens=200))
    rows = result["ablation"]["rows"]
    assert row_of(result, "c4r4/rtn/policy")["promoted"]
    lost = [row for row in rows if not row["promoted"]]
    assert lost
    assert all("kl" not in row and " x " in row["reason"] for row in lost)
    kept = {path.name.replace("~", "/") for path in (tmp_path / "out" / "scores").iterdir()}
    assert kept == {"bf16", *(row["cell"] for row in rows if row["promoted"])}
    assert write_report(result, tmp_path / "report.html").stat().st_size > 1000


def test_windows_without_packed_rows_are_invalid(ablation, tmp_path):
    result = run(ablation(tmp_path / "out", ["c4r4/rtn/policy"], window_tokens=132, tokens=264))
    with pytest.raises(GateError, match="c4r4/rtn/policy"):
        require_valid_cells(result)


def test_unusable_settings_are_refused(ablation, tmp_path):
    small = ablation(tmp_path / "out")
    with pytest.raises(EvaluationError, match="not those of an ablation"):
        run(small, settings=Settings(prefill="fast"))
    with pytest.raises(EvaluationError, match="too little text"):
        run(replace(small, block_tokens=1000, tokens=200))
    with pytest.raises(SchemeError, match="bits"):
        Cell("c4r4", "rtn", "rtn").format.scheme(policy=True, group=3)
    assert not (tmp_path / "out").exists()


def test_the_report_shows_table_and_frontier(done, tmp_path):
    page = write_report(done[1], tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "512 + 64 channels" in page
    assert "<td>c4-kivi4</td>" in page
    assert "QuantMLA content" not in page
    assert "RTN content, QuantMLA RoPE" in page
    assert "Quality by method" not in page
