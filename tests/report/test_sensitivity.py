"""The section of a sensitivity analysis on the page."""

import copy
import re

import pytest

from quantmla.report import write_report
from quantmla.report.plots import stacks

PATH = {"response": 0.02, "random_response": 0.01, "ta": 1.5, "o": 0.5, "t": 1.0}
SHARES = {"matching": 0.2, "aggregation": 0.9, "interaction": 0.01}
SHARES |= {"matching_aggregation": -0.1, "matching_interaction": -0.02}
SHARES |= {"aggregation_interaction": 0.01}
FORMS = ("plain", "centred", "weighted", "weighted_centred")
FIGURES = ("content", "rope", "ratio_of_means", "mean_of_ratios", "ratio_of_mean_roots")


@pytest.fixture
def analysis():
    layer = {
        "content": PATH,
        "rope": PATH | {"response": 0.05, "o": -0.25},
        "content_shares": SHARES,
        "bound": {form: {"ratio": 1e-3, "largest": 2e-3} for form in FORMS},
    }
    figures = {name: {"value": 2.5, "ci95": [2.25, 2.75]} for name in FIGURES}
    return {
        "settings": {
            "model": "a <model>",
            "scheme": "c4r4",
            "coordinates": "untransformed",
            "nmse": 0.01,
            "windows": 8,
            "sequence_tokens": 1024,
            "probes": 4,
        },
        "model": {
            "response": figures | {"rope": {"value": 0.05, "ci95": None}},
            "rope_share_of_scores": 0.905,
            "decomposition_closes": True,
            "bound_holds": True,
        },
        "layers": [copy.deepcopy(layer) | {"layer": number} for number in (3, 4, 9)],
    }


def test_an_analysis_stands_on_a_page_without_rows(tmp_path, analysis):
    results = {"rows": [], "sensitivity": [analysis]}
    text = write_report(results, tmp_path / "r.html").read_text()
    assert "a &lt;model&gt;" in text
    assert re.search("2.25 . 2.75", text)
    assert "too few windows" in text
    assert "90.5%" in text
    assert "Quality by method" not in text
    assert "Not sound" not in text
    assert len(re.findall("<svg", text)) == 5  # response, shares, two paths, bound
    for words in ("random direction", "cross terms", "T A", "attention-weighted"):
        assert words in text


def test_a_broken_bound_is_said(tmp_path, analysis):
    analysis["model"]["bound_holds"] = False
    text = write_report({"rows": [], "sensitivity": [analysis]}, tmp_path / "r.html").read_text()
    assert "Not sound" in text


def test_negative_parts_hang_below_zero(monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    real = Axes.bar

    def spy(self, x, height, width, *, bottom, **kwargs):
        drawn.append((list(x), list(height), list(bottom)))
        return real(self, x, height, width, bottom=bottom, **kwargs)

    monkeypatch.setattr(Axes, "bar", spy)
    stacks("t", "u", {"a": [1.0, 2.0], "b": [-0.5, 1.0], "c": [-0.25, 0.5]}, [3, 7])
    assert drawn == [
        ([3, 7], [1.0, 2.0], [0.0, 0.0]),
        ([3, 7], [-0.5, 1.0], [0.0, 2.0]),
        ([3, 7], [-0.25, 0.5], [-0.5, 3.0]),
    ]
