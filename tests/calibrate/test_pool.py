"""Worker processes: the same bytes as in one process, and what happens when one fails or dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calibrate.runs import files_of, learned, recipe, run
from calibrate.texts import write_text
from quantmla.calibrate import pool
from quantmla.calibrate.rundir import MANIFEST_NAME
from quantmla.errors import CalibrationError
from tiny import write_tiny


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    """So that two workers have one thread each, as the tests themselves."""
    monkeypatch.setattr(pool, "available_cores", lambda: 2)


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def in_workers(model, text, recipes, folder, **options):
    return run(model, text, recipes, folder, workers=2, **options)


def test_two_workers_write_the_bytes_of_one(text, tmp_path):
    model = write_tiny(tmp_path / "model", "longcat_flash", q_lora_rank=24, layers=2)
    recipes = [learned(scheme="c2r4", clip_content="learned"), recipe("smoothquant")]
    options = {"storage_dtype": torch.bfloat16}
    run(model, text, recipes, tmp_path / "one", **options)
    calls = []

    def progress(*call):
        calls.append(call)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGINT)  # as Ctrl-C does, which is for the run to answer

    in_workers(model, text, recipes, tmp_path / "two", progress=progress, **options)
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
    assert multiprocessing.active_children() == []
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == calls[0][2]
    assert {what.split()[-2] for what, *_ in calls if " c" in what} == {"quantmla", "smoothquant"}


def test_an_error_in_a_worker_is_that_of_the_run(text, tmp_path):
    model = write_tiny(tmp_path / "model", qk_rope_head_dim=12)
    with pytest.raises(CalibrationError) as here:
        run(model, text, [recipe("quarot_online")], tmp_path / "one")
    with pytest.raises(CalibrationError) as there:
        in_workers(model, text, [recipe("quarot_online")], tmp_path / "two")
    assert str(there.value) == str(here.value)
    assert vars(there.value) == vars(here.value) | {"__notes__": there.value.__notes__}
    assert "in quarot_online" in "".join(there.value.__notes__)
    assert multiprocessing.active_children() == []
    assert list(tmp_path.rglob(".*")) == []


def kill_workers():
    for worker in multiprocessing.active_children():
        worker.kill()


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (kill_workers, CalibrationError, r"ended before its layer(.|\n)*signal 9(.|\n)*--resume"),
        (interrupt, KeyboardInterrupt, None),
    ],
    ids=["killed", "interrupted"],
)
def test_a_stopped_run_ends_its_workers_and_goes_on_later(text, tmp_path, event, error, message):
    model = write_tiny(tmp_path / "model", layers=3)
    recipes = [recipe("rtn"), recipe("quarot_online")]

    def progress(what, done, total):
        if what.startswith("layer"):  # the third layer has no worker yet
            (tmp_path / "run" / ".layer.1.tmp").touch()  # as a worker leaves it that is killed
            event()

    with pytest.raises(error, match=message):
        in_workers(model, text, recipes, tmp_path / "run", progress=progress)
    assert multiprocessing.active_children() == []
    assert list(tmp_path.rglob(".*")) == []
    run(model, text, recipes, tmp_path / "run", resume=True)  # here, in one process
    run(model, text, recipes, tmp_path / "whole")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")


KILLED_RUN = """
import sys, time
sys.path.insert(0, sys.argv[1])
from calibrate.runs import run
from quantmla.calibrate import pool
from quantmla.config import Recipe
pool.available_cores = lambda: 2
def progress(what, done, total):
    if "smoothquant" in what:  # in one of the first two layers
        print("reached", flush=True)
        time.sleep(60)
model, text, folder, *recipes = sys.argv[2:]
recipes = [Recipe.model_validate_json(r) for r in recipes]
run(model, text, recipes, folder, workers=2, progress=progress)
"""


def test_resume_after_kill_gives_the_bytes_of_an_uninterrupted_run(text, tmp_path):
    model = write_tiny(tmp_path / "model", layers=4)
    recipes = [recipe("rtn"), recipe("smoothquant")]
    folder = tmp_path / "killed"
    arguments = [str(Path(__file__).parents[1]), str(model), str(text), str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, *arguments, *(r.model_dump_json() for r in recipes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout.readline() == b"reached\n"
    process.send_signal(signal.SIGKILL)
    # the workers write to the same pipe: it ends when the last of them is gone
    assert process.communicate(timeout=30)[0] == b""
    assert 0 < len(list(folder.glob("*/layer-*.safetensors"))) <= 4
    in_workers(model, text, recipes, folder, resume=True)
    run(model, text, recipes, tmp_path / "whole")
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_number_of_workers_and_threads(text, tmp_path, monkeypatch):
    model = write_tiny(tmp_path / "model", layers=1)
    with pytest.raises(CalibrationError, match="number of workers"):
        run(model, text, [recipe("rtn")], tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()
    before = torch.get_num_threads()
    for cores, workers, expected in ((8, 3, 2), (2, 5, 1), (8, 1, before)):
        monkeypatch.setattr(pool, "available_cores", lambda cores=cores: cores)
        with pool.calibration_threads(workers) as threads:
            assert threads == torch.get_num_threads() == expected
        assert torch.get_num_threads() == before
    run(model, text, [recipe("rtn")], tmp_path / "run")
    monkeypatch.setattr(pool, "available_cores", lambda: 8)
    assert MANIFEST_NAME in {path.name for path in files_of(tmp_path / "run")}
    with pytest.raises(CalibrationError, match="settings: threads"):
        in_workers(model, text, [recipe("rtn")], tmp_path / "run", resume=True)


def test_an_error_that_does_not_survive_the_pipe_keeps_its_words():
    class Local(Exception):
        pass

    error = pool._portable(Local("what happened"))
    assert (type(error), str(error)) == (RuntimeError, "Local: what happened")
