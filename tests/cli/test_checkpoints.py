import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmla.checkpoint.reader import CheckpointReader
from quantmla.evaluate.manifest import checkpoint_sha256
from tiny_llama import write_llama
from tiny_text import write_tiny_with_tokenizer

RTN = ("--set", "sequences=1", "--set", "heldout_sequences=1", "--set", "sequence_tokens=32")
RTN += ("--set", "protect=none")


@pytest.fixture(scope="module")
def calibrated(model_folder, text, tmp_path_factory):
    """What `calibrate` said, and the folder that it wrote."""
    import contextlib
    import io
    import sys
    from unittest import mock

    from quantmla.cli import main

    out = tmp_path_factory.mktemp("out") / "fused"
    arguments = ["calibrate", model_folder, "--out", out, "--text", text, "--method", "rtn", *RTN]
    stdout, argv = io.StringIO(), ["quantmla", *map(str, arguments), "--json", "-q"]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(stdout),
        pytest.raises(SystemExit) as caught,
    ):
        main()
    assert not caught.value.code
    return json.loads(stdout.getvalue()), out


def test_calibrate_learns_and_fuses(calibrated, quantmla):
    said, out = calibrated
    assert said["checkpoint"] == str(out)
    assert (said["method"], said["scheme"], said["cache_layers"]) == ("rtn", "c4r4", 2)
    assert 0 < said["mean_output_error_content"] < said["mean_output_error_both"] < 1
    block = json.loads((out / "config.json").read_text())["quantmla"]
    assert block["recipe_sha256"] == said["recipe_sha256"]
    code, found, _ = quantmla("inspect", out, "--json")
    assert code == 0
    assert json.loads(found)["quantmla"] == block


def test_scores_say_which_recipe_and_reference(calibrated, quantmla, model_folder, text):
    said, out = calibrated
    size = ("--window", "200", "--tokens", "200")
    options = ("--reference", model_folder, "--text", text, *size, "--json", "-q")
    code, stdout, _ = quantmla("eval", out, *options)
    result = json.loads(stdout)
    assert code == 0
    assert result["manifest"]["recipes"] == {"model": said["recipe_sha256"]}
    digests = {row["reference_sha256"] for row in result["rows"]}
    assert digests == {checkpoint_sha256(model_folder)} != {checkpoint_sha256(out)}


def test_a_used_folder_is_refused_before_the_work(calibrated, quantmla, model_folder, text):
    _, out = calibrated
    code, _, err = quantmla("calibrate", model_folder, "--out", out, "--text", text, *RTN)
    assert code == 1
    assert "already holds something" in err


def test_a_fused_source_is_refused(calibrated, quantmla, text, tmp_path):
    _, out = calibrated
    code, _, err = quantmla("calibrate", out, "--out", tmp_path / "x", "--text", text, *RTN)
    assert code == 1
    assert "already fused" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "v_bits=4"), "content_bits"),
        (("--text", "no-such-file"), "no such text"),
        (("--method", "magic"), "Recipe.method"),
        (("--set", "sequences=1000"), "too short"),
    ],
)
def test_wrong_input_leaves_nothing(quantmla, model_folder, text, tmp_path, arguments, message):
    out = tmp_path / "out"
    options = ("--out", out, "--text", text, *RTN, *arguments)
    code, stdout, err = quantmla("calibrate", model_folder, *options)
    assert (code, stdout) == (1, "")
    assert message in err
    assert not out.exists()


def test_dry_run_estimates_and_writes_nothing(quantmla, model_folder, text, tmp_path):
    options = ("--out", tmp_path / "x", "--text", text, *RTN, "--dry-run")
    code, stdout, _ = quantmla("calibrate", model_folder, *options, "--json")
    found = json.loads(stdout)
    assert code == 0
    assert {"time_s", "peak_memory_bytes", "disk_bytes"} <= set(found)
    assert "time s: " in quantmla("calibrate", model_folder, *options)[1]
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_that_the_text_is_too_short(quantmla, model_folder, text, tmp_path):
    options = ("--out", tmp_path / "x", "--text", text, *RTN, "--set", "sequences=1000")
    code, stdout, err = quantmla("calibrate", model_folder, *options, "--dry-run")
    assert (code, stdout) == (1, "")
    assert f"the text is too short\n  where: {text}" in err


def test_a_slice_that_is_too_short_is_named(quantmla, model_folder, tmp_path):
    long = ("--set", "sequences=9000", "--set", "sequence_tokens=512")
    options = ("--out", tmp_path / "x", "--text", "haystack", *RTN, *long)
    code, _, err = quantmla("calibrate", model_folder, *options)
    assert code == 1
    assert "where: haystack\n" in err


@pytest.mark.parametrize("verb", ["calibrate", "eval", "demo"])
def test_a_device_that_is_not_there_is_one_error(quantmla, model_folder, text, tmp_path, verb):
    options = {
        "calibrate": (model_folder, "--text", text),
        "eval": (model_folder, "--text", text, "--scheme", "c4r4"),
        "demo": ("--model", model_folder),
    }[verb]
    out = ("--out", tmp_path / "out", "--device", "cuda:99")
    code, stdout, err = quantmla(verb, *options, *out)
    assert (code, stdout) == (1, "")
    assert err.startswith("error: this device cannot be used\n  where: --device cuda:99")
    assert list(tmp_path.iterdir()) == []


def test_verify_passes_and_fails(calibrated, quantmla, model_folder):
    _, out = calibrated
    code, stdout, _ = quantmla("verify", out, "--source", model_folder, "--json")
    report = json.loads(stdout)
    assert (code, report["ok"]) == (0, True)
    assert len(report["layer_errors"]) == 2
    assert "ok" in quantmla("verify", out)[1]
    shard = out / "model.safetensors"
    data = shard.read_bytes()
    shard.unlink()  # it may be a hard link to the source
    try:
        shard.write_bytes(data[:-4] + b"\x01\x02\x03\x04")
        code, stdout, err = quantmla("verify", out, "--source", model_folder, "--json")
        assert code == 3
        assert json.loads(stdout)["ok"] is False
        assert "does not pass" in err
    finally:
        shard.write_bytes(data)


def test_a_folder_without_block_cannot_be_verified(quantmla, model_folder):
    code, _, err = quantmla("verify", model_folder)
    assert code == 1
    assert "quantmla block" in err


def test_convert_makes_an_mla_checkpoint(quantmla, text, tmp_path, monkeypatch):
    monkeypatch.setattr("quantmla.convert.run.WINDOW_TOKENS", 32)
    source, out = write_llama(tmp_path / "llama"), tmp_path / "mla"
    options = ("--out", out, "--text", text, "--kv-lora-rank", "32")
    code, planned, err = quantmla("convert", source, *options, "--json", "--dry-run")
    assert code == 0, err
    assert not out.exists()
    code, stdout, err = quantmla("convert", source, *options, "--json")
    report = json.loads(stdout)
    assert code == 0, err
    assert (report["checkpoint"], report["kv_lora_rank"]) == (str(out), 32)
    assert json.loads(quantmla("inspect", out, "--json")[1])["mla"] is True
    plan, reader = json.loads(planned), CheckpointReader(out)
    numbers = sum(math.prod(reader.shape_of(name)) for name in reader.tensor_names)
    assert plan["parameters_after"] == numbers
    assert plan["cached_numbers_after"] == report["cached_numbers_after"]
    code, _, err = quantmla("convert", source, *options)
    assert code == 1
    assert "already holds something" in err


def test_what_cannot_be_converted_is_one_error(quantmla, model_folder, text, tmp_path):
    options = ("--out", tmp_path / "out", "--text", text)
    code, _, err = quantmla("convert", model_folder, *options)
    assert code == 1
    assert "already is an MLA model" in err
    assert not (tmp_path / "out").exists()


def test_a_run_folder_inside_result_or_source_is_refused(quantmla, model_folder, text, tmp_path):
    out = tmp_path / "fused"
    for run in (out, out / "run", model_folder / "run"):
        options = ("--out", out, "--run", run, "--text", text, "--method", "rtn", *RTN)
        code, _, err = quantmla("calibrate", model_folder, *options)
        assert code == 1
        assert "the run folder lies in" in err
        assert not run.exists()


def test_eval_refuses_a_changed_artifact_and_a_foreign_reference(
    calibrated, quantmla, model_folder, text, tmp_path
):
    fused = shutil.copytree(calibrated[1], tmp_path / "fused")
    options = ("--text", text, "--window", "256", "--tokens", "256")
    code, _, err = quantmla("eval", fused, "--reference", fused, *options)
    assert (code, "not the model that the checkpoint was made from" in err) == (1, True)
    config = json.loads((fused / "config.json").read_text())
    config["quantmla"]["content"]["bits"] = 2
    (fused / "config.json").write_text(json.dumps(config))
    code, _, err = quantmla("eval", fused, "--reference", model_folder, *options)
    assert code == 1
    assert "fingerprint" in err


def test_eval_names_a_missing_folder_without_looking_elsewhere(quantmla, text):
    code, _, err = quantmla("eval", "some-org/some-model", "--scheme", "c4r4", "--text", text)
    assert code == 1
    assert "some-org/some-model" in err
    assert "huggingface" not in err


def test_eval_refuses_integer_weights(quantmla, text, tmp_path):
    folder = write_tiny_with_tokenizer(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name].mul(9).to(torch.int8)
    save_file(tensors, path, metadata={"format": "pt"})
    options = ("--text", text, "--window", "256", "--tokens", "256")
    code, _, err = quantmla("eval", folder, "--scheme", "c4r4", *options)
    assert code == 1
    assert name in err
