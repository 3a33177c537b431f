"""One tiny model with a tokenizer, and a text, for all tests of this folder."""

import pytest

from quantmla.loading import load_tokenizer
from quantmla.text import open_text
from tiny_text import write_text, write_tiny_with_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_tiny_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return open_text(write_text(tmp_path_factory.mktemp("text") / "text.txt", 3000))


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return load_tokenizer(model_folder)
