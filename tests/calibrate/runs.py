"""Small recipes, a run of them, and the files that it leaves."""

from pathlib import Path

from calibrate.texts import ByteTokenizer
from quantmla.calibrate.run import run_calibration
from quantmla.config import Recipe

WINDOWS = {"sequences": 3, "heldout_sequences": 2, "sequence_tokens": 24}


def recipe(method="quarot_online", scheme="c4r4", **fields):
    return Recipe.model_validate({"method": method, "scheme": scheme, **WINDOWS, **fields})


def learned(**fields):
    train = {"curvature_steps": 3}
    settings = {"method": "quantmla", "steps": 4, "eval_every": 2, "protect": "none"}
    return recipe(**settings | {"train": train} | fields)


def run(model, text, recipes, folder, **options):
    return run_calibration(model, text, recipes, folder, tokenizer=ByteTokenizer(), **options)


def files_of(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
