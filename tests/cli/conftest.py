"""Run the command line in this process: exit code, stdout, stderr."""

import sys

import pytest

from quantmla.cli import main
from quantmla.cli.common import state
from tiny_text import write_text, write_tiny_with_tokenizer


@pytest.fixture
def quantmla(monkeypatch, capsys):
    def run(*arguments):
        state.verbose = state.quiet = False
        monkeypatch.setattr(sys, "argv", ["quantmla", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_tiny_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 3000)
