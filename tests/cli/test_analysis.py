"""`quantmla analyze` end to end on a tiny checkpoint, fused and not."""

import json

import pytest
import torch
import typer

from fusing import block_for, random_transforms
from quantmla.analyze import summary
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.cli.analysis import parse_layers
from tiny_text import write_tiny_with_tokenizer

SMALL = ("--windows", "6", "--sequence-tokens", "24", "--probes", "2")


@pytest.fixture(scope="module")
def made(model_folder, text, tmp_path_factory):
    """The result of the command on the tiny model, and the file that it wrote."""
    from pathlib import Path

    from quantmla.analyze.run import Plan, run_analysis

    plan = Plan(Path(model_folder), str(text), windows=6, sequence_tokens=24, probes=2)
    with torch.no_grad():
        return run_analysis(plan)


def test_one_json_document_and_the_same_file(quantmla, model_folder, text, tmp_path, made):
    out = tmp_path / "deep" / "analyze.json"
    code, stdout, err = quantmla(
        "analyze", model_folder, "--text", text, *SMALL, "--json", "--out", out
    )
    result = json.loads(stdout)
    assert code == 0
    assert json.loads(out.read_text()) == result
    assert "analyze: " in err
    sensitivity, manifest = result["sensitivity"], result["manifest"]
    assert sensitivity["model"] == made["sensitivity"]["model"]
    assert [layer["layer"] for layer in sensitivity["layers"]] == [0, 1]
    assert len(sensitivity["layers"][0]["windows"]["output"]) == 6
    assert sensitivity["settings"]["coordinates"] == "untransformed"
    assert manifest["models"]["model"]["name"] == model_folder.name
    assert manifest["command"].startswith("quantmla analyze")
    assert manifest["texts"]
    assert manifest["seed"] == 0
    model = sensitivity["model"]
    assert model["decomposition_closes"]
    assert model["bound_holds"]
    low, high = model["response"]["ratio_of_means"]["ci95"]
    assert low < model["response"]["ratio_of_means"]["value"] < high
    code, stdout, err = quantmla("analyze", model_folder, "--out", out)
    assert (code, stdout) == (1, "")
    assert "already exists" in err


def test_chosen_layers_are_those_of_the_whole_run(quantmla, model_folder, text, made):
    code, stdout, err = quantmla(
        *("analyze", model_folder, "--text", text, *SMALL, "--layers", "1", "--json", "-q")
    )
    (layer,) = json.loads(stdout)["sensitivity"]["layers"]
    assert (code, err) == (0, "")
    assert layer == made["sensitivity"]["layers"][1]


def test_tables_for_a_reader(quantmla, model_folder, text):
    code, stdout, _ = quantmla("analyze", model_folder, "--text", text, *SMALL[2:], "--windows", 2)
    assert code == 0
    for word in ("ratio of means", "too few windows", "aggregation", "centred", "squared scores"):
        assert word in stdout


def test_a_fused_checkpoint_is_measured_in_its_own_coordinates(quantmla, text, tmp_path, made):
    source = write_tiny_with_tokenizer(tmp_path / "source")
    transforms = random_transforms(source)
    fused = fuse_checkpoint(source, tmp_path / "fused", transforms, block_for(source))
    code, stdout, _ = quantmla("analyze", fused, "--text", text, *SMALL, "--json")
    sensitivity = json.loads(stdout)["sensitivity"]
    assert code == 0
    assert sensitivity["settings"]["coordinates"] == "fused"
    for mine, plain in zip(sensitivity["layers"], made["sensitivity"]["layers"], strict=True):
        # the same function of other coordinates
        assert mine["windows"]["output"] == pytest.approx(plain["windows"]["output"], rel=1e-3)
        for path in ("content", "rope"):
            change = mine[path]["response"] / plain[path]["response"]
            assert abs(change - 1) > 0.02
        cache = mine["windows"]["content"]["cache"][0] / plain["windows"]["content"]["cache"][0]
        assert abs(cache - 1) > 0.02


def test_a_dry_run_says_what_it_costs_and_writes_nothing(quantmla, model_folder, text, tmp_path):
    out = tmp_path / "analyze.json"
    arguments = (*SMALL, "--dry-run", "--json", "--out", out)
    code, stdout, _ = quantmla("analyze", model_folder, "--text", text, *arguments)
    cost = json.loads(stdout)
    assert code == 0
    assert cost["cache_layers"] == 2
    assert cost["jacobian_products"] == 2 * 6 * 2 * (1 + 2 * 2)
    assert cost["time_s"] > 0
    assert cost["peak_memory_bytes"] > 1 << 20
    assert not out.exists()


def test_the_report_shows_an_analysis_beside_other_results(quantmla, tmp_path, made):
    (tmp_path / "analyze.json").write_text(json.dumps(made))
    page = tmp_path / "report.html"
    code, stdout, _ = quantmla("report", tmp_path / "analyze.json", "--out", page, "--json")
    assert code == 0
    assert json.loads(stdout)["sensitivity_analyses"] == 1
    text = page.read_text()
    assert f"Sensitivity of both paths: {made['sensitivity']['settings']['model']}" in text
    assert text.count("<svg") == 5


def test_a_failed_identity_exits_with_3(quantmla, model_folder, text, monkeypatch):
    monkeypatch.setattr(summary, "CLOSES_TO", -1.0)
    arguments = ("--windows", "1", "--sequence-tokens", "8", "--layers", "0", "--json")
    code, stdout, err = quantmla("analyze", model_folder, "--text", text, *arguments)
    assert code == 3
    assert json.loads(stdout)["sensitivity"]["model"]["decomposition_closes"] is False
    assert "do not add up" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "2"), "no such cache layer"),
        (("--scheme", "c16r4"), "not quantised"),
        (("--scheme", "c5r4"), "scheme name is not known"),
        (("--windows", "500"), "text is too short"),
        (("--device", "cuda:99"), "device cannot be used"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_work(
    quantmla, model_folder, text, arguments, message
):
    code, stdout, err = quantmla("analyze", model_folder, "--text", text, *arguments)
    assert (code, stdout) == (1, "")
    assert message in err


def test_layer_lists():
    assert parse_layers("0-3,7") == (0, 1, 2, 3, 7)
    assert parse_layers("5, 2") == (5, 2)
    for wrong in ("", "a", "3-1", "1-", "-2", "1,,2", "0-70000"):
        with pytest.raises(typer.BadParameter):
            parse_layers(wrong)
