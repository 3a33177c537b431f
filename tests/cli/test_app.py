import json
import os
import resource
import subprocess
import sys

import pytest

VERBS = ("inspect", "convert", "calibrate", "verify", "eval", "report", "demo", "env")


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def python(*arguments):
    # the terminal of the test must not decide how help is laid out
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )


def test_help_is_fast_and_lists_the_verbs():
    times = []
    for _ in range(3):  # processor time: the wall clock of a shared machine says nothing
        before = cpu_s()
        run = python("-m", "quantmla", "--help")
        times.append(cpu_s() - before)
    assert run.returncode == 0
    assert [verb for verb in VERBS if verb not in run.stdout] == []
    assert min(times) < 0.5


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom quantmla.cli.app import app\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(quantmla, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = quantmla(verb, "--help")
    assert code == 0
    assert "--json" in out
    assert "--verbose" in out


@pytest.mark.parametrize("verb", ["calibrate", "demo"])
def test_workers_are_explained_and_checked(quantmla, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert "--workers" in quantmla(verb, "--help")[1]
    assert quantmla(verb, "--workers", "0")[0] == 2


def test_usage_errors_exit_with_2(quantmla):
    for arguments in (["nothing"], ["inspect"], ["env", "--no-such-option"]):
        code, out, err = quantmla(*arguments)
        assert (code, out) == (2, "")
        assert err


def test_user_errors_are_one_block_without_traceback(quantmla, tmp_path):
    code, out, err = quantmla("inspect", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error: config.json is missing\n  where: ")
    assert "Traceback" not in err
    code, _, err = quantmla("inspect", tmp_path, "-v")
    assert code == 1
    assert "Traceback" in err


def test_operating_system_errors_are_one_block(quantmla, monkeypatch):
    def fail():
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr("quantmla.cli.environment.environment", fail)
    assert quantmla("env")[2] == "error: Permission denied\n  where: /some/file\n"


def test_interrupted_says_how_to_go_on(quantmla, model_folder, text, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("quantmla.calibrate.run.run_calibration", stop)
    options = ("--out", tmp_path / "out", "--text", text)
    code, out, err = quantmla("calibrate", model_folder, *options)
    assert (code, out) == (130, "")
    assert err.startswith("error: interrupted\n  next: the same command with --resume")


def test_a_closed_pipe_is_no_bug():
    code = (
        "import sys\nsys.argv = ['quantmla', 'env', '--json']\n"
        "import quantmla.cli.app as a\n"
        "def closed(*_): raise BrokenPipeError\n"
        "import quantmla.cli.showcase as s\ns.emit = closed\na.main()"
    )
    run = python("-c", code)
    assert (run.returncode, run.stderr) == (1, "")


def test_bugs_are_called_bugs(quantmla, monkeypatch):
    def fail():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("quantmla.cli.environment.environment", fail)
    code, _, err = quantmla("env")
    assert code == 1
    assert "in a way it should not\n  got: ZeroDivisionError: oops" in err
    assert "Traceback" not in err


def test_env_says_what_is_installed(quantmla):
    code, out, _ = quantmla("env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["packages"]["torch"]
    assert "wikitext2-test" in found["texts"]
    assert quantmla("env")[1].startswith("quantmla: ")
