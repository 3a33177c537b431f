"""A staged folder appears whole or not at all, and only its own job gets it back."""

import pytest

from quantmla.checkpoint.writer import staged_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_at_the_end(tmp_path):
    out = tmp_path / "out"
    with staged_folder(out) as folder:
        (folder / "file").write_text("x")
        assert not out.exists()
    assert names(tmp_path) == ["out"]
    assert names(out) == ["file"]


@pytest.mark.parametrize("key", [None, "job"])
def test_a_failure_leaves_nothing(tmp_path, key):
    with pytest.raises(ValueError, match="broken"), staged_folder(tmp_path / "out", key):
        raise ValueError("broken")
    assert names(tmp_path) == []


def work(out, key):
    with staged_folder(out, key) as folder:
        (folder / "done").write_text("x")
        (folder / ".half.1.tmp").write_text("x")
        raise KeyboardInterrupt


def interrupt(out, key):
    with pytest.raises(KeyboardInterrupt):
        work(out, key)


def test_only_the_same_job_goes_on_after_an_interruption(tmp_path):
    out, other = tmp_path / "out", tmp_path / ".out2.tmp-a"
    other.mkdir()  # of another result
    interrupt(out, None)
    assert names(tmp_path) == [other.name]
    interrupt(out, "a")
    with staged_folder(out, "a") as folder:
        assert names(folder) == ["done"]
    out.rename(tmp_path / "kept")
    interrupt(out, "a")
    with staged_folder(out, "b") as folder:
        assert names(folder) == []
    assert names(tmp_path) == [other.name, "kept", "out"]
