"""The run: layers outermost, resume with equal bytes, refusals, and the fused result."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from calibrate.runs import files_of, learned, recipe, run
from calibrate.texts import write_text
from exact import forward, tokens
from fusing import read_config
from quantmla.calibrate.layer import layer_seed
from quantmla.calibrate.run import run_calibration
from quantmla.calibrate.rundir import MANIFEST_NAME, RunDir, recipe_name
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.verify import verify
from quantmla.config import QuantMLABlock
from quantmla.engine.hf import QuantMLACache
from quantmla.errors import CalibrationError, CheckpointError, SchemeError
from tiny import load_tiny, write_tiny


@pytest.fixture
def model(tmp_path):
    return write_tiny(tmp_path / "model", layers=3)


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def test_every_layer_of_every_recipe_is_written(model, text, tmp_path):
    recipes = [recipe("rtn"), recipe("smoothquant"), recipe("quarot_offline", "c2r4")]
    calls = []
    result = run(model, text, recipes, tmp_path / "run", progress=lambda *call: calls.append(call))
    names = {str(name) for name in files_of(tmp_path / "run")}
    expected = {f"{recipe_name(r)}/layer-{i:04d}.safetensors" for r in recipes for i in range(3)}
    assert names == expected | {MANIFEST_NAME}
    assert all(t.content_identity and t.rope_identity for t in result.transforms(recipes[0]))
    assert all(t.rope_scale is not None for t in result.transforms(recipes[1]))
    for each in recipes:
        for stats in result.stats(each):
            assert 0 < stats["output_error_content"] < 1
            assert 0 < stats["output_error_rope"] < 1
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == calls[0][2]


def test_same_inputs_give_the_same_bytes_and_layers_differ(model, text, tmp_path):
    for name in ("one", "two"):
        run(model, text, [recipe()], tmp_path / name)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    layers = [data for name, data in files_of(tmp_path / "one").items() if "layer" in name.name]
    assert len(set(layers)) == 3
    assert len({layer_seed(recipe(seed=s), i) for s in range(3) for i in range(3)}) == 9


KILLED_RUN = """
import os, sys, torch
from quantmla.calibrate import methods, run as module
sys.path.insert(0, sys.argv[1])
from calibrate.texts import ByteTokenizer
from quantmla.config import Recipe
torch.set_num_threads(1)
real = methods.METHODS["smoothquant"]
def slow(layer, recipe):
    if layer.capture.layer == 1:
        print("reached", flush=True)
        import time; time.sleep(60)
    return real(layer, recipe)
methods.METHODS["smoothquant"] = slow
model, text, folder, *recipes = sys.argv[2:]
recipes = [Recipe.model_validate_json(r) for r in recipes]
module.run_calibration(model, text, recipes, folder, tokenizer=ByteTokenizer())
"""


def test_resume_after_kill_gives_the_bytes_of_an_uninterrupted_run(text, tmp_path):
    model = write_tiny(tmp_path / "model", "longcat_flash", q_lora_rank=24, layers=2)
    recipes = [learned(scheme="c2r4", clip_content="learned"), recipe("smoothquant")]
    run(model, text, recipes, tmp_path / "whole")
    folder = tmp_path / "killed"
    arguments = [str(Path(__file__).parents[1]), str(model), str(text), str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, *arguments, *(r.model_dump_json() for r in recipes)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout.readline() == b"reached\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    done = [str(path) for path in files_of(folder) if "layer" in path.name]
    assert len(done) == 3  # both recipes of layer 0, one of layer 1
    with pytest.raises(CalibrationError, match="--resume"):
        run(model, text, recipes, folder)
    run(model, text, recipes, folder, resume=True)
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_resume_reads_no_layer_before_the_first_open_one(model, text, tmp_path, monkeypatch):
    from quantmla.calibrate import capture as capture_module

    folder = tmp_path / "run"
    monkeypatch.setattr("quantmla.calibrate.layer.joint_check", fail_at_layer(2))
    with pytest.raises(RuntimeError, match="stopped"):
        run(model, text, [recipe()], folder)
    monkeypatch.undo()
    loaded = []
    real = capture_module.load_decoder

    def spy(reader, config, decoder, *rest):
        loaded.append(decoder)
        return real(reader, config, decoder, *rest)

    monkeypatch.setattr(capture_module, "load_decoder", spy)
    run(model, text, [recipe()], folder, resume=True)
    assert loaded == [2]


def fail_at_layer(layer):
    from quantmla.calibrate.joint import joint_check

    def check(attention, *rest):
        if attention.capture.layer == layer:
            raise RuntimeError("stopped")
        return joint_check(attention, *rest)

    return check


def test_damaged_hidden_state_falls_back_to_the_embeddings(model, text, tmp_path, monkeypatch):
    run(model, text, [recipe()], tmp_path / "whole")
    folder = tmp_path / "run"
    monkeypatch.setattr("quantmla.calibrate.layer.joint_check", fail_at_layer(2))
    with pytest.raises(RuntimeError, match="stopped"):
        run(model, text, [recipe()], folder)
    monkeypatch.undo()
    kept = sorted(folder.glob("hidden-*"))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    run(model, text, [recipe()], folder, resume=True)
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_a_finished_run_resumes_at_once(model, text, tmp_path, monkeypatch):
    first = run(model, text, [recipe()], tmp_path / "run")
    before = files_of(tmp_path / "run")
    monkeypatch.setattr("quantmla.calibrate.layer.LayerWorkspace", None)
    again = run(model, text, [recipe()], tmp_path / "run", resume=True)
    assert files_of(tmp_path / "run") == before
    assert again.stats(recipe()) == first.stats(recipe())


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda model, text: write_text(text, characters=4100), "text: text_sha256"),
        (lambda model, text: write_tiny(model, layers=3, seed=9), "source: tensors_sha256"),
        (lambda model, text: torch.set_num_threads(2), "settings: threads"),
    ],
    ids=["text", "model", "threads"],
)
def test_resume_refuses_other_inputs_by_name(model, text, tmp_path, change, part):
    run(model, text, [recipe()], tmp_path / "run")
    threads = torch.get_num_threads()
    try:
        change(model, text)
        with pytest.raises(CalibrationError, match=part):
            run(model, text, [recipe()], tmp_path / "run", resume=True)
    finally:
        torch.set_num_threads(threads)


def test_resume_refuses_another_recipe(model, text, tmp_path):
    run(model, text, [recipe()], tmp_path / "run")
    with pytest.raises(CalibrationError, match="recipes"):
        run(model, text, [recipe(seed=1)], tmp_path / "run", resume=True)


def test_folder_of_something_else_is_refused(model, text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(CalibrationError, match="run"):
            run(model, text, [recipe()], tmp_path / "run", resume=resume)
    assert files_of(tmp_path / "run") == {Path("notes.txt"): b"mine"}


def test_second_run_into_a_locked_folder_is_refused(model, text, tmp_path):
    with folder_lock(tmp_path / "run"), pytest.raises(CheckpointError, match="another run"):
        run(model, text, [recipe()], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_read_only_folder_is_one_clear_error(model, text, tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("quantmla.calibrate.rundir.atomic_write", refuse)
    with pytest.raises(CheckpointError, match="not writable"):
        run(model, text, [recipe()], tmp_path / "run")


def full_disk(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_is_one_clear_error_and_the_run_goes_on_later(model, text, tmp_path, monkeypatch):
    run(model, text, [recipe()], tmp_path / "whole")
    folder = tmp_path / "run"
    for target in ("transform.layer.atomic_write", "calibrate.rundir.fsync_folder"):
        monkeypatch.setattr(f"quantmla.{target}", full_disk)
        with pytest.raises(CheckpointError, match="disk is full"):
            run(model, text, [recipe()], folder, resume=True)
        monkeypatch.undo()
    assert not list(folder.rglob(".*"))
    run(model, text, [recipe()], folder, resume=True)
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_full_disk_under_safetensors_is_the_same_error(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    with pytest.raises(CheckpointError, match="disk is full"):
        RunDir(tmp_path, 1).save_hidden(1, torch.zeros(1, 2, 3))


def test_recipes_must_share_their_windows_and_differ(model, text, tmp_path):
    longer = recipe("rtn", sequence_tokens=32)
    with pytest.raises(CalibrationError, match="sequence_tokens"):
        run(model, text, [recipe(), longer], tmp_path / "run")
    with pytest.raises(CalibrationError, match="twice"):
        run(model, text, [recipe(), recipe()], tmp_path / "run")
    with pytest.raises(CalibrationError, match="no recipe"):
        run(model, text, [], tmp_path / "run")
    with pytest.raises(SchemeError, match="content_bits"):
        recipe(k_bits=4)


def test_checkpoint_without_tokenizer_says_so(model, text, tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer"):
        run_calibration(model, text, [recipe()], tmp_path / "run")


@pytest.mark.parametrize(
    "method", ["rtn", "smoothquant", "quarot_offline", "quarot_online", "quantmla"]
)
def test_fused_result_is_the_same_model(model, text, tmp_path, method):
    each = learned(method=method, clip_content=0.9)
    result = run(model, text, [each], tmp_path / "run")
    out = result.fuse(each, tmp_path / "fused")
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        original, fused = (
            load_tiny(folder, "deepseek_v3", dtype=torch.float32)(tokens).logits
            for folder in (model, out)
        )
    torch.testing.assert_close(fused, original, rtol=0, atol=2e-5 * float(original.abs().max()))
    with pytest.raises(CheckpointError, match="already"):
        run(out, text, [each], tmp_path / "again")


def test_windows_inside_the_protection_teach_nothing(model, text, tmp_path):
    with pytest.raises(CalibrationError, match="nothing to learn"):
        run(model, text, [learned(protect="policy")], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resume_refuses_when_any_weight_changed(model, text, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "run"
    run(model, text, [recipe("rtn")], folder)
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".mlp." in name)
    tensors[name] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CalibrationError, match="tensors_sha256"):
        run(model, text, [recipe("rtn")], folder, resume=True)


def test_plus_from_the_text_to_the_cache(model, text, tmp_path):
    """What is learned, fused and read back by the cache is one thing: logits near the source's."""
    plus = learned(method="quantmla_plus", scheme="c8r8", train={"curvature_steps": 8})
    result = run(model, text, [plus], tmp_path / "run")
    out = result.fuse(plus, tmp_path / "fused")
    assert verify(out, model).ok
    block = QuantMLABlock.from_config(read_config(out))
    assert (block.method, block.shift, block.rope_feedback) == ("quantmla_plus", True, True)
    source, fused, ids = *(load_tiny(f, "deepseek_v3") for f in (model, out)), tokens(150)
    exact = QuantMLACache.from_scheme("c16r16", source.config, row_dtype=torch.float32)
    expected = forward(source, exact, ids)
    caches = (
        QuantMLACache.from_config(out),
        QuantMLACache.from_scheme("c8r8", fused.config),  # the weights alone mean the same
    )
    for cache in caches:
        error = (forward(fused, cache, ids) - expected).norm() / expected.norm()
        assert error < 0.02
