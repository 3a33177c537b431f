"""Saved transforms come back equal; unusable ones are refused by name."""

import pytest
import torch

from quantmla.dims import MLADims
from quantmla.errors import CalibrationError
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform

DIMS = MLADims(48, 2, 3, 96, 16, 12, 20, None, 1e-6)


def full_transform():
    generator = torch.Generator().manual_seed(0)
    rand = lambda n: torch.rand(n, dtype=torch.float64, generator=generator) + 0.5  # noqa: E731
    return LayerTransform(
        content_rotation=random_hadamard(96, 0),
        content_scale=rand(96),
        rope_angle=rand(8),
        rope_scale=rand(8),
        content_clip=rand(2).float() / 2,
        rope_clip=rand(1).float() / 2,
        rope_online="hadamard",
        stats={"content_error": 0.25, "picked": 3},
    )


def test_round_trip_gives_equal_values_and_bytes(tmp_path):
    transform = full_transform()
    transform.save(tmp_path / "a")
    loaded = LayerTransform.load(tmp_path / "a")
    assert torch.equal(loaded.content_rotation, transform.content_rotation)
    assert loaded.stats == transform.stats
    assert loaded.rope_online == "hadamard"
    assert loaded.to_bytes() == transform.to_bytes() == (tmp_path / "a").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_identity_round_trip(tmp_path):
    LayerTransform().save(tmp_path / "a")
    loaded = LayerTransform.load(tmp_path / "a")
    assert loaded.content_identity
    assert loaded.rope_identity


@pytest.mark.parametrize("damage", ["missing", "truncated", "version", "unknown"])
def test_damaged_files_are_refused(tmp_path, damage):
    from safetensors.torch import save_file

    path = tmp_path / "a"
    if damage == "truncated":
        path.write_bytes(full_transform().to_bytes()[:-5])
    if damage == "version":
        save_file({}, path, metadata={"quantmla": '{"format": 2}'})
    if damage == "unknown":
        text = '{"format": 1, "rope_online": null, "stats": {}}'
        save_file({"surprise": torch.ones(1)}, path, metadata={"quantmla": text})
    with pytest.raises(CalibrationError, match="layer transform"):
        LayerTransform.load(path)


def test_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    LayerTransform().save(path)
    old = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantmla.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        full_transform().save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_good_transform_passes():
    full_transform().check(DIMS, 64)
    LayerTransform().check(DIMS, 64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("content_rotation", torch.eye(64, dtype=torch.float64)),
        ("content_rotation", 1.001 * torch.eye(96, dtype=torch.float64)),
        ("content_scale", torch.zeros(96)),
        ("content_scale", torch.full((96,), float("nan"))),
        ("rope_angle", torch.zeros(16)),
        ("rope_scale", -torch.ones(8)),
        ("content_clip", torch.ones(1)),
        ("rope_clip", torch.zeros(1)),
        ("rope_clip", torch.full((1,), 1.01)),
    ],
)
def test_unusable_values_are_refused(field, value):
    transform = full_transform()
    setattr(transform, field, value)
    with pytest.raises(CalibrationError):
        transform.check(DIMS, 64)
