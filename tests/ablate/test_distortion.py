"""Rung one: both paths together, static numbers, groups of tokens, and what is protected."""

import pytest
import torch

from quantmla.ablate.cells import Cell
from quantmla.ablate.distortion import LayerWindows, measure_layer
from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.joint import joint_check
from quantmla.calibrate.objective import LayerAttention, Protection
from quantmla.config import KVScheme
from quantmla.quant.kivi import PerChannel
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform
from tiny import write_tiny

WINDOWS = torch.randint(0, 96, (4, 150), generator=torch.Generator().manual_seed(3))
PICKED = LayerWindows(fit=(0, 1), heldout=(2, 3))
ROTATED = LayerTransform(
    content_rotation=random_hadamard(32, 1), content_scale=torch.ones(32, dtype=torch.float64)
)


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    return next(capture_layers(write_tiny(tmp_path_factory.mktemp("tiny"), layers=1), WINDOWS))


def measured(capture, cell, transform=None, policy=(4, 16)):
    cells = {cell: transform or LayerTransform()}
    return measure_layer(capture, cells, PICKED, "half", policy, "cpu")[cell.name]


def test_errors_are_those_of_the_joint_check(capture):
    row = measured(capture, Cell("c2r4", "rtn", "rtn", policy=False), ROTATED)
    check = joint_check(LayerAttention(capture), ROTATED, KVScheme.parse("c2r4"), "half", (2, 3))
    for name in ("content", "rope", "both"):
        assert row[name] == pytest.approx(check[f"output_error_{name}"], rel=1e-4), name
    assert len({row["content"], row["rope"], row["both"]}) == 3
    assert row["content_static"] is row["rope_static"] is None


def test_the_policy_protects(capture):
    bare, near, all_of_it = (
        measured(capture, Cell("c2r4", "rtn", "rtn", policy), policy=sizes)["both"]
        for policy, sizes in ((False, (4, 16)), (True, (4, 16)), (True, (4, 150)))
    )
    assert all_of_it < 1e-9 < near < bare


def test_static_numbers_come_from_the_training_windows_behind_the_sinks(capture):
    cell = Cell("fp8", "rtn", "rtn")
    row = measured(capture, cell)
    latent = (capture.latent_unit[:2, 4:] * capture.gamma).abs().max()
    assert row["content_static"] == pytest.approx(float(latent) / 448)
    assert row["rope_static"] == pytest.approx(float(capture.k_rope[:2, 4:].abs().max()) / 448)


def test_keys_in_groups_start_behind_the_sinks(capture):
    row = measured(capture, Cell("c4-kivi4", "rtn", "rtn"))
    attention = LayerAttention(capture, Protection(4, 16))
    square = norm = 0.0
    for window in (2, 3):
        key = capture.k_rope[window].clone()
        key[4:] = PerChannel(4).round_trip(key[4:])
        one, whole = attention.rope_error(window, key)
        square, norm = square + float(one), norm + float(whole)
    assert row["rope"] == pytest.approx(square / norm, rel=1e-4)


def test_cells_of_one_layer_do_not_disturb_each_other(capture):
    cells = [Cell("c4r4", m, m) for m in ("rtn", "quarot_offline")] + [Cell("hqq4", "rtn", "rtn")]
    transforms = [LayerTransform(), ROTATED, LayerTransform()]
    pairs = dict(zip(cells, transforms, strict=True))
    together = measure_layer(capture, pairs, PICKED, "half", (4, 16), "cpu")
    for cell, transform in pairs.items():
        assert measured(capture, cell, transform) == together[cell.name]
