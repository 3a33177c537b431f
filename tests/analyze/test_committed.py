"""The committed analysis of the converted SmolLM2: it follows from its own sums, and is sound."""

import json
from pathlib import Path

import pytest

from quantmla.analyze.summary import model_summary, require_sound

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "analyze.json"


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text(encoding="utf-8"))


def flat(data, name=""):
    """Every number of nested JSON data by its path."""
    if isinstance(data, dict):
        return {k: v for key, one in data.items() for k, v in flat(one, f"{name}/{key}").items()}
    if isinstance(data, list):
        return {k: v for i, one in enumerate(data) for k, v in flat(one, f"{name}/{i}").items()}
    return {name: data}


def test_its_figures_and_intervals_follow_from_the_sums_of_its_windows(result):
    again = model_summary(result["sensitivity"]["layers"], result["manifest"]["seed"])
    assert flat(again) == pytest.approx(flat(result["sensitivity"]["model"]), rel=1e-6)


def test_it_is_sound_on_every_layer(result):
    sensitivity = result["sensitivity"]
    require_sound(sensitivity["model"])
    assert [layer["layer"] for layer in sensitivity["layers"]] == list(range(30))
    for layer in sensitivity["layers"]:
        assert abs(layer["content_shares_sum"] - 1) < 1e-10
        assert all(form["largest"] <= 1 for form in layer["bound"].values())
    assert all(figure["ci95"] for figure in sensitivity["model"]["response"].values())


def test_it_says_nothing_of_the_machine_s_folders(result):
    assert result["manifest"]["command"].startswith("quantmla analyze SmolLM2-135M-MLA")
    assert "/" not in result["manifest"]["command"]
    assert result["sensitivity"]["settings"]["model"] == "SmolLM2-135M-MLA"
