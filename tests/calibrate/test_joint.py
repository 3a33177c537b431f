"""The joint check measures each path and both, and flags paths that disturb each other."""

import pytest
import torch

from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.joint import joint_check
from quantmla.calibrate.objective import LayerAttention
from quantmla.config import KVScheme
from quantmla.transform.layer import LayerTransform
from tiny import write_tiny

WINDOWS = torch.randint(0, 96, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def attention(tmp_path):
    write_tiny(tmp_path, layers=1)
    return LayerAttention(next(capture_layers(tmp_path, WINDOWS)))


def check(attention, scheme):
    return joint_check(attention, LayerTransform(), KVScheme.parse(scheme), "half", range(1, 3))


def test_errors_shrink_with_bits_and_add_up(attention):
    two, four = check(attention, "c2r2"), check(attention, "c4r4")
    for name in ("output_error_content", "output_error_rope", "output_error_both"):
        assert 0 < four[name] < two[name] < 1
    total = four["output_error_content"] + four["output_error_rope"]
    assert four["output_error_both"] == pytest.approx(total, rel=0.3)
    assert four["joint_ok"] is True


def test_a_16_bit_path_has_no_error(attention):
    stats = check(attention, "c16r4")
    assert stats["output_error_content"] == 0
    assert stats["output_error_both"] == stats["output_error_rope"] > 0
    assert check(attention, "c16r16")["joint_ok"] is True


@pytest.mark.parametrize(("both", "ok"), [(3.2, True), (3.4, False)])
def test_paths_that_disturb_each_other_are_flagged(attention, monkeypatch, both, ok):
    def error(index, latent_unit=None, k_rope=None):
        value = both if latent_unit is not None and k_rope is not None else 1.5
        return torch.tensor(value), torch.tensor(1.0)

    monkeypatch.setattr(attention, "error", error)
    assert check(attention, "c4r4")["joint_ok"] is ok
