"""The ablate verb: dry run, one small run as JSON and as a table, refusals."""

import json

import pytest

SMALL = [
    *("--window", 200, "--tokens", 200, "--block-tokens", 50, "--resamples", 100),
    *("--chunk-tokens", 64, "--set", "sequences=2", "--set", "heldout_sequences=1"),
    *("--set", "sequence_tokens=160"),
]


@pytest.fixture
def ablate(quantmla, model_folder, text, tmp_path):
    def run(*arguments):
        texts = ("--text", text, "--calibration-text", text)
        return quantmla("ablate", model_folder, "-o", tmp_path / "out", *texts, *SMALL, *arguments)

    return run


def test_dry_run_lists_cells_and_writes_nothing(ablate, tmp_path):
    code, out, _ = ablate("--cells", "*fp4/rtn/*", "--dry-run")
    assert code == 0
    assert "nvfp4/rtn/bare" in out
    code, out, _ = ablate("--cells", "*fp4/rtn/*", "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["cells"]["nvfp4/rtn/bare"] == {"bytes_per_token": 27, "bytes_at_512_64": 324}
    assert plan["recipes_to_calibrate"] == ["rtn c4r16", "rtn c16r4"]
    assert plan["calibration"]["time_s"] >= 0
    assert plan["tokens_fed_at_most"] == 5 * 200
    assert not (tmp_path / "out").exists()


def test_a_run_and_its_continuation(ablate, quantmla, tmp_path):
    code, out, _ = ablate("--cells", "c4r4/rtn/policy", "--json")
    assert code == 0
    (row,) = json.loads(out)["ablation"]["rows"]
    assert row["valid"]
    assert (tmp_path / "out" / "report.html").is_file()
    code, _, err = ablate("--cells", "c4r4/rtn/policy")
    assert code == 1
    assert "add --resume" in err
    code, out, _ = ablate("--cells", "c4r4/rtn/*", "--resume")
    assert code == 0
    assert "c4r4/rtn/bare" in out
    assert "at most 8 times" in out
    code, _, _ = quantmla("report", tmp_path / "out", "-o", tmp_path / "merged.html")
    assert code == 0
    assert "<td>c4r4</td>" in (tmp_path / "merged.html").read_text()


def test_unknown_cells_are_refused(ablate):
    code, _, err = ablate("--cells", "c9r9/*")
    assert code == 1
    assert "--dry-run lists all cells" in err


@pytest.mark.parametrize("setting", ["method=rtn", "scheme=c2r4", "dither=true", "clip_rope=0.9"])
def test_fields_that_the_cells_decide_are_refused(ablate, setting):
    code, _, err = ablate("--cells", "c4r4/rtn/policy", "--set", setting)
    assert code == 1
    assert "the cells of an ablation decide this field" in err


def test_calibrate_refuses_what_cannot_be_folded(quantmla, model_folder, tmp_path):
    out = tmp_path / "fused"
    code, _, err = quantmla("calibrate", model_folder, "-o", out, "--method", "flatquant")
    assert code == 1
    assert "quantmla ablate" in err
    assert list(tmp_path.iterdir()) == []
