"""Calibrate QuantMLA+ at several bits in one pass and score it; prints one JSON line a row.

    PYTHONPATH=src python benchmarks/plus.py OUT [--model MLA_FOLDER] [--device cuda] [--text TEXT]
        [--scheme c4r4 ..] [--budget 143 ..] [--recipe recipe.yaml] [--workers 2] [--json FILE]

Without --model SmolLM2 is fetched and converted as in `quantmla demo`. TEXT is what is scored, by
default the shipped test text; take windows of the training text to choose anything by.
"""

import argparse
import json
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM

from quantmla import Recipe, run_calibration
from quantmla.calibrate.budget import fuse_within
from quantmla.calibrate.data import load_windows
from quantmla.calibrate.weights import layer_weights
from quantmla.convert.run import convert_model
from quantmla.convert.smollm2 import fetch_smollm2
from quantmla.evaluate.fidelity import measure_fidelity
from quantmla.evaluate.manifest import build_manifest, git_revision
from quantmla.evaluate.model import Subject, default_settings, tokenizer_sha256
from quantmla.files import atomic_write
from quantmla.loading import load_model, load_tokenizer
from quantmla.text import cut_windows, open_text

SCHEMES = ("c4r4", "c3r4", "c2r4", "c3r3", "c2r3")
BUDGETS_BYTES = (103, 111, 127, 143)
COMMON = {
    "method": "quantmla_plus",
    "sequences": 48,
    "heldout_sequences": 4,
    "sequence_tokens": 2048,
    "steps": 0,
    "eval_every": 75,
    "train": {"curvature_steps": 150, "curvature_windows": 48},
}


def main() -> None:
    """Calibrate, fuse, score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", default="wikitext2-test")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--scheme", nargs="*", default=SCHEMES)
    parser.add_argument("--budget", nargs="*", type=int, default=BUDGETS_BYTES, help="bytes")
    parser.add_argument("--recipe", type=Path, help="instead of the recipe of this script")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for all rows and a manifest")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = args.out / "began.json"  # a resumed run says which commit calibrated
    if not began.exists():
        atomic_write(began, json.dumps({"revision": git_revision()}))
    model = args.model or args.out / "mla"
    if not model.exists():
        convert_model(fetch_smollm2(), model)
    common = yaml.safe_load(args.recipe.read_text(encoding="utf-8")) if args.recipe else COMMON
    recipes = [Recipe.model_validate(common | {"scheme": scheme}) for scheme in args.scheme]
    text, folder = "wikitext2-train", args.out / "calibration"
    settings = {"resume": True, "device": args.device, "workers": args.workers}
    run = run_calibration(model, text, recipes, folder, **settings)
    tokenizer = load_tokenizer(model)
    windows = load_windows(open_text(text), tokenizer, recipes[0]).windows.ids[:4]
    source = load_model(AutoModelForCausalLM, model, dtype=torch.float32).to(args.device)
    weights = layer_weights(source, windows, first_token=132, seed=0)
    del source
    settings = default_settings(args.device, "float32", "strict", 512, 1)
    scored = cut_windows(tokenizer, open_text(args.text), window_tokens=2048, tokens=args.tokens)

    def subjects():
        for recipe in recipes:
            out = args.out / recipe.scheme.name
            yield Subject("quantmla_plus", out if out.exists() else run.fuse(recipe, out))
        for budget in args.budget:
            out = args.out / f"budget-{budget}"
            if not out.exists():
                fuse_within(run, recipes, budget, weights, out)
            yield Subject(f"quantmla_plus within {budget} bytes", out)

    reference, rows = Subject("bf16", model, path="absorbed"), []
    for row in measure_fidelity(reference, subjects(), scored, settings, scratch=args.out):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        manifest = build_manifest(
            models={"bf16": model},
            texts={one.name: one.sha256 for one in map(open_text, (text, args.text))},
            seed=0,
            device=args.device,
            recipes={f"quantmla_plus {r.scheme.name}": r.sha256() for r in recipes},
            tokenizer_sha256=tokenizer_sha256(tokenizer),
        )
        manifest["calibrated_by"] = json.loads(began.read_text(encoding="utf-8"))
        result = {"rows": rows, "layer_weights": weights, "recipe": common, "manifest": manifest}
        atomic_write(args.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
