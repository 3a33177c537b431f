"""One writer per folder, and a dead one does not block."""

import os
import subprocess
import sys

import pytest

from quantmla.checkpoint.lock import folder_lock
from quantmla.errors import CheckpointError

HOLD = """
import sys
from quantmla.checkpoint.lock import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_another_process_is_named(tmp_path, holder):
    with pytest.raises(CheckpointError) as caught, folder_lock(tmp_path / "out"):
        pass
    assert f"locked by process {holder.pid}" in str(caught.value)
    assert str(tmp_path / "out") in str(caught.value)


def test_a_killed_holder_does_not_block(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with folder_lock(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_is_exclusive_then_free_again(tmp_path):
    with (
        folder_lock(tmp_path / "out"),
        pytest.raises(CheckpointError, match=str(os.getpid())),
        folder_lock(tmp_path / "out"),
    ):
        pass
    with folder_lock(tmp_path / "out"), folder_lock(tmp_path / "other"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_is_released_on_errors(tmp_path):
    with pytest.raises(KeyboardInterrupt), folder_lock(tmp_path / "out"):
        raise KeyboardInterrupt
    with folder_lock(tmp_path / "out"):
        pass


def test_read_only_parent(tmp_path, monkeypatch):
    def read_only(*_args):
        raise OSError(30, "Read-only file system", "somewhere")

    monkeypatch.setattr("quantmla.checkpoint.lock.os.open", read_only)
    with pytest.raises(CheckpointError, match="not writable"), folder_lock(tmp_path / "out"):
        pass
