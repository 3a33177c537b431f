"""One tiny model with a tokenizer, a text, and a small ablation of it."""

import pytest

from quantmla.ablate.cells import select
from quantmla.ablate.plan import Ablation
from quantmla.config import KVScheme, Recipe, TrainConfig
from tiny_text import write_text, write_tiny_with_tokenizer

RECIPE = Recipe(
    scheme=KVScheme.parse("c4r4"),
    sequences=3,
    heldout_sequences=2,
    sequence_tokens=160,
    steps=2,
    eval_every=2,
    train=TrainConfig(curvature_steps=2, curvature_batch_tokens=64),
)
PATTERNS = [
    "c2r4/quantmla/policy",
    "c2r4/quantmla_plus/policy",
    "c2r4/flatquant/policy",
    "c2r4/rtn/*",
    "c2r4/rtn+quantmla/policy",
    "c4-kivi4/rtn/*",
    "norm2-r4/*+quantmla/policy",
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_tiny_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text_path(tmp_path_factory):
    return str(write_text(tmp_path_factory.mktemp("text") / "text.txt", 3000))


@pytest.fixture
def ablation(model_folder, text_path):
    """Make a small ablation with some fields changed."""

    def make(out, patterns=PATTERNS, **fields):
        settings = {
            "calibration_text": text_path,
            "text": text_path,
            "window_tokens": 200,
            "tokens": 400,
            "shard_tokens": 200,
            "block_tokens": 50,
            "resamples": 200,
        }
        return Ablation(model_folder, out, tuple(select(patterns)), RECIPE, **settings | fields)

    return make
