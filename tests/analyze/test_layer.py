"""A whole layer: its numbers against the objective that calibration trains on."""

import dataclasses
import json

import pytest
import torch

from cached_window import dense_jacobian, make_capture, make_window
from quantmla.analyze.formats import LayerFormat
from quantmla.analyze.layer import Settings, analyse_layer
from quantmla.analyze.summary import FIGURES, model_summary, require_sound
from quantmla.calibrate.objective import LayerAttention, ratio_of_sums
from quantmla.config import KVScheme
from quantmla.engine.clips import Writer
from quantmla.errors import GateError
from quantmla.quant.affine import fake_quantize
from quantmla.quant.feedback import Feedback

FORMAT = LayerFormat(KVScheme.parse("c4r4"))


def analysed(capture, nmse=0.01, probes=4, seed=0, layer_format=FORMAT):
    return analyse_layer(capture, layer_format, Settings(nmse, probes, seed, "cpu"))


def scaled_error(rows, nmse):
    error = fake_quantize(rows, 4) - rows
    return error * (nmse * rows.square().sum() / error.square().sum()).sqrt()


@pytest.mark.parametrize("nmse", [0.01, 0.2])
def test_responses_are_errors_of_the_calibrated_layer(nmse):
    capture = make_capture(n=3)
    attention = LayerAttention(capture, dtype=torch.float64)
    cached = capture.latent_unit * capture.gamma
    unit = capture.latent_unit + scaled_error(cached, nmse) / capture.gamma
    rope = capture.k_rope + scaled_error(capture.k_rope, nmse)
    layer = analysed(capture, nmse)
    content = ratio_of_sums(attention.error(i, latent_unit=unit[i].double()) for i in range(3))
    assert layer["content"]["response"] == pytest.approx(content, rel=1e-4)
    expected = ratio_of_sums(attention.error(i, k_rope=rope[i].double()) for i in range(3))
    assert layer["rope"]["response"] == pytest.approx(expected, rel=1e-4)
    assert layer["response_ratio"] == pytest.approx(expected / content, rel=1e-3)


def test_exact_statements_hold_in_every_layer():
    layer = analysed(make_capture(tokens=40))
    assert abs(layer["content_shares_sum"] - 1) < 1e-10
    for path in ("content", "rope"):
        numbers = layer[path]
        parts = numbers["t"] * numbers["a"] + numbers["o"]
        assert numbers["g"] == pytest.approx(parts, rel=1e-10)
    assert all(0 < form["largest"] <= 1 for form in layer["bound"].values())
    assert all(form["ratio"] <= form["largest"] for form in layer["bound"].values())
    assert 0 < layer["rope_share_of_scores"] < 1
    json.dumps(layer, allow_nan=False)


def test_a_small_error_answers_as_its_jacobian_and_a_random_one_as_the_mean():
    capture = make_capture(n=4)
    layers = [analysed(capture, nmse=1e-8, seed=seed) for seed in range(12)]
    for path in ("content", "rope"):
        numbers = layers[0][path]
        assert numbers["response"] == pytest.approx(1e-8 * numbers["g"], rel=1e-3)
        random, mean = (sum(one[path][name] for one in layers) for name in ("random_response", "t"))
        assert random == pytest.approx(1e-8 * mean, rel=0.1)


@pytest.mark.parametrize("path", ["content", "rope"])
def test_amplification_is_that_of_the_dense_jacobian(path):
    sizes = {"n": 1, "tokens": 7, "rank": 6, "rope": 4}
    numbers = analysed(make_capture(**sizes), probes=500)[path]
    window = make_window(**sizes)
    jacobian = dense_jacobian(window, path)
    rows = (window.latent if path == "content" else window.k_rope).float()
    error = (fake_quantize(rows, 4) - rows).double().flatten()
    sensitivity = jacobian.square().sum(0)
    norm = window.output(window.latent, window.k_rope).square().sum()
    kappa = rows.double().square().sum() / norm
    exact = {
        "g": kappa * (jacobian @ error).square().sum() / error.square().sum(),
        "t": kappa * sensitivity.mean(),
        "ta": kappa * (error.square() @ sensitivity) / error.square().sum(),
    }
    assert numbers["g"] == pytest.approx(float(exact["g"]), rel=1e-5)
    for name in ("t", "ta"):
        assert abs(numbers[name] - float(exact[name])) < 4 * numbers[f"{name}_se"]
    gap = abs(float(exact["ta"] - exact["t"]))
    assert gap > 8 * max(numbers["t_se"], numbers["ta_se"])  # so that neither stands for the other


def test_only_random_choices_follow_the_seed():
    capture = make_capture()
    first, again, other = (analysed(capture, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["rope"]["g"] == other["rope"]["g"]
    for name in ("t", "random_response"):
        assert first["rope"][name] != other["rope"][name]


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers():
    capture = make_capture(tokens=40)
    here = analysed(capture)
    there = analyse_layer(capture, FORMAT, Settings(0.01, 4, 0, "cuda"))
    for path in ("content", "rope"):
        for name in ("response", "random_response", "g"):
            assert there[path][name] == pytest.approx(here[path][name], rel=1e-9)
        for name in ("t", "ta"):
            assert there[path][name] == pytest.approx(here[path][name], rel=1e-4)
    assert there["content_shares"] == pytest.approx(here["content_shares"], rel=1e-8)
    assert there["bound"]["centred"] == pytest.approx(here["bound"]["centred"], rel=1e-9)


def test_bits_of_a_path_and_its_clip_change_its_direction_alone():
    capture = make_capture()
    plain = analysed(capture)
    fewer = analysed(capture, layer_format=LayerFormat(KVScheme.parse("c2r4")))
    clipped = analysed(capture, layer_format=written(rope_clip=0.5))
    assert fewer["content"]["response"] != plain["content"]["response"]
    assert fewer["rope"] == plain["rope"]
    assert clipped["rope"]["rounding_nmse"] > plain["rope"]["rounding_nmse"]
    assert clipped["content"] == plain["content"]


def test_shift_and_feedback_of_the_writer_are_in_the_direction():
    capture = make_capture()
    plain = analysed(capture)
    size = capture.k_rope.shape[-1]
    mean = capture.k_rope.flatten(0, 1).mean(0)
    shifted = analysed(capture, layer_format=written(rope_shift=mean))
    rows = torch.stack([one - mean for one in capture.k_rope])
    error = fake_quantize(rows, 4, group=64, zero="zp8") - rows
    expected = float(error.square().sum() / rows.square().sum())
    assert shifted["rope"]["rounding_nmse"] == pytest.approx(expected, rel=1e-5)
    mix = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(1))
    fed = analysed(capture, layer_format=written(feedback=Feedback.of(mix.T @ mix)))
    assert fed["rope"]["rounding_nmse"] > plain["rope"]["rounding_nmse"]
    assert shifted["content"] == fed["content"] == plain["content"]


def written(**writer):
    return LayerFormat(FORMAT.scheme, Writer(**writer))


def layers_of_two_seeds(n=6, nmse=0.01):
    captures = [make_capture(n=n, tokens=12, seed=seed) for seed in (0, 1)]
    return captures, [analysed(capture, nmse=nmse, probes=2) for capture in captures]


def test_figures_of_the_model():
    _, layers = layers_of_two_seeds()
    summary = model_summary(layers, seed=0)
    content, rope = ([layer[p]["response"] for layer in layers] for p in ("content", "rope"))
    expected = {
        "content": sum(content) / 2,
        "rope": sum(rope) / 2,
        "ratio_of_means": sum(rope) / sum(content),
        "mean_of_ratios": sum(r / c for r, c in zip(rope, content, strict=True)) / 2,
        "ratio_of_mean_roots": sum(r**0.5 for r in rope) / sum(c**0.5 for c in content),
    }
    assert list(expected) == list(FIGURES) == list(summary["response"])
    for name, value in expected.items():
        figure = summary["response"][name]
        assert figure["value"] == pytest.approx(value, rel=1e-12)
        assert figure["ci95"][0] < value < figure["ci95"][1]
    assert summary["rope"]["g"] == pytest.approx(sum(one["rope"]["g"] for one in layers) / 2)
    assert summary["decomposition_closes"] is summary["bound_holds"] is True
    require_sound(summary)


def test_a_draw_of_windows_is_an_analysis_of_these_windows():
    captures, layers = layers_of_two_seeds(nmse=1e-8)
    seen = {}

    def spy(statistic, windows, seed):
        counts = torch.tensor([[2.0, 0, 1, 3, 0, 0]], dtype=torch.float64)
        seen.setdefault("ratio", float(statistic(counts)))

    drawn = torch.tensor([0, 0, 2, 3, 3, 3])
    fields = ("latent_unit", "k_rope", "q_nope", "q_rope")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantmla.analyze.summary.window_interval", spy)
        patch.setattr("quantmla.analyze.summary.FIGURES", {"x": FIGURES["mean_of_ratios"]})
        model_summary(layers, seed=0)
    again = [
        analysed(
            dataclasses.replace(one, **{name: getattr(one, name)[drawn] for name in fields}),
            nmse=1e-8,
            probes=2,
        )
        for one in captures
    ]
    expected = sum(layer["response_ratio"] for layer in again) / 2
    assert seen["ratio"] == pytest.approx(expected, rel=1e-4)


def test_few_windows_give_values_without_intervals():
    summary = model_summary([analysed(make_capture(n=2))], seed=0)
    assert [figure["ci95"] for figure in summary["response"].values()] == [None] * len(FIGURES)


def test_a_gap_or_a_broken_bound_is_refused():
    layer = analysed(make_capture())
    gap = layer | {"content_shares_sum": 1 + 2e-6}
    with pytest.raises(GateError, match="do not add up"):
        require_sound(model_summary([layer, gap], seed=0))
    bound = layer["bound"] | {"centred": {"ratio": 0.5, "largest": 1 + 1e-6}}
    with pytest.raises(GateError, match=r"larger than its bound(.|\n)*centred"):
        require_sound(model_summary([layer | {"bound": bound}], seed=0))
