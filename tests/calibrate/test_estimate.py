"""The dry run: costs of the right size, nothing written."""

import time

import pytest

from calibrate.texts import ByteTokenizer, write_text
from quantmla.calibrate import estimate as estimate_module
from quantmla.calibrate.estimate import estimate_run
from quantmla.calibrate.run import run_calibration
from quantmla.config import Recipe
from quantmla.errors import CalibrationError, CheckpointError
from tiny import write_tiny


def recipe(method="quantmla", **fields):
    windows = {"sequences": 4, "heldout_sequences": 2, "sequence_tokens": 32}
    settings = {"method": method, "scheme": "c4r4", "steps": 30, "eval_every": 10}
    settings |= {"train": {"curvature_steps": 40}, "protect": "none"}
    return Recipe.model_validate(settings | windows | fields)


def test_estimate_is_of_the_size_of_the_run(tmp_path, monkeypatch):
    model = write_tiny(tmp_path / "model", "longcat_flash", q_lora_rank=24, layers=2)
    text = write_text(tmp_path / "text.txt")
    before = sorted(tmp_path.rglob("*"))
    # processor time: other programs on the machine do not count
    monkeypatch.setattr(estimate_module, "clock", time.process_time)
    recipes = [recipe(), recipe("rtn")]
    estimate = estimate_run(model, recipes)
    assert sorted(tmp_path.rglob("*")) == before
    start = time.process_time()
    run_calibration(model, text, recipes, tmp_path / "run", tokenizer=ByteTokenizer())
    spent_s = time.process_time() - start
    assert spent_s / 2.5 < estimate["time_s"] < 2.5 * spent_s
    assert estimate["cache_layers"] == 4
    assert estimate["optimiser_steps"] == 4 * 2 * (30 + 40)
    files = [path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sum(files) / 2 < estimate["disk_bytes"] < 4 * sum(files)


def test_more_windows_take_more_memory_and_bf16_storage_takes_less(tmp_path):
    import torch

    model = write_tiny(tmp_path / "model", layers=1)
    few, many = (estimate_run(model, [recipe("rtn", sequences=n)]) for n in (8, 1008))
    extra = many["peak_memory_bytes"] - few["peak_memory_bytes"]
    assert extra > 1000 * 32 * (48 + 3 * 28 + 48) * 4
    half = estimate_run(model, [recipe("rtn", sequences=1008)], storage_dtype=torch.bfloat16)
    assert half["disk_bytes"] < many["disk_bytes"]


def test_workers_take_memory_and_share_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate_module, "clock", time.process_time)
    monkeypatch.setattr("quantmla.calibrate.pool.available_cores", lambda: 2)
    model = write_tiny(tmp_path / "model", layers=2)
    one, two, many = (
        estimate_run(model, [recipe(sequences=1000)], workers=workers) for workers in (1, 2, 9)
    )
    captured = 1000 * 32 * (48 + 3 * 28) * 4
    assert two["peak_memory_bytes"] > one["peak_memory_bytes"] + captured
    assert (one["workers"], two["workers"], many["workers"]) == (1, 2, 2)  # 2 layers
    assert two["disk_bytes"] > one["disk_bytes"]
    for plan in (one, two):  # two trials take different times on a busy machine: each by itself
        work_s = plan["sampling_time_s"] + sum(plan["method_time_s"].values())
        work_s += plan["capture_time_s"]
        expected = max(plan["capture_time_s"], work_s / plan["workers"])
        assert plan["time_s"] == pytest.approx(expected, abs=0.2)


def test_estimate_refuses_what_the_run_would_refuse(tmp_path):
    model = write_tiny(tmp_path / "model", layers=1)
    with pytest.raises(CalibrationError, match="twice"):
        estimate_run(model, [recipe(), recipe()])
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        estimate_run(tmp_path / "nowhere", [recipe()])
