"""`quantmla demo`: convert a real model, calibrate every method, fuse, compare through the cache.

Every step leaves whole files in one folder, so that a stopped demo goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import quantmla
from quantmla.calibrate.estimate import estimate_run
from quantmla.calibrate.joint import JOINT_SEQUENCES
from quantmla.calibrate.pool import available_cores
from quantmla.calibrate.run import CalibrationRun, run_calibration
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.writer import remove_folder
from quantmla.config import Recipe, canonical_sha256
from quantmla.convert.run import convert_model
from quantmla.convert.smollm2 import SMOLLM2, fetch_smollm2
from quantmla.errors import CheckpointError
from quantmla.evaluate.fidelity import measure_fidelity, summary
from quantmla.evaluate.manifest import build_manifest, checkpoint_sha256, git_revision
from quantmla.evaluate.model import (
    PATH_NAMES,
    Settings,
    Subject,
    default_settings,
    tokenizer_sha256,
)
from quantmla.evaluate.row import require_valid
from quantmla.files import atomic_write, storage_errors
from quantmla.loading import check_device, load_tokenizer
from quantmla.report import metrics_of, require_packages, write_report
from quantmla.text import Windows, cut_windows, open_text

# What the demo calibrates with: small enough for two CPU cores and a quarter of an hour.
DEMO_RECIPE = {
    "sequences": 16,
    "heldout_sequences": 2,
    "sequence_tokens": 512,
    "protect": "policy",
    "steps": 0,
    "eval_every": 160,
    "train": {"curvature_steps": 160, "curvature_windows": 16, "curvature_batch_tokens": 512},
}
# `make results`: longer windows, more of them, and steps on the exact objectives.
FULL_RECIPE = {
    "sequences": 20,
    "heldout_sequences": 2,
    "sequence_tokens": 1024,
    "protect": "policy",
    "steps": 60,
    "eval_every": 60,
    "train": {"curvature_steps": 200, "curvature_windows": 20, "curvature_batch_tokens": 1024},
}
METHODS = ("rtn", "smoothquant", "quarot_offline", "quarot_online", "quantmla")
SCHEMES = {
    "c4r4": {"content_bits": 4, "rope_bits": 4},
    "c2r4": {"content_bits": 2, "rope_bits": 4},
}
# At 2 bits clipping matters more than any transform, so every method gets it there, and none at 4.
CLIP_CONTENT = {"c4r4": None, "c2r4": "learned"}
QUICK = {"recipe": DEMO_RECIPE, "windows": (2048,), "tokens": 4096, "expanded": False}
FULL = {"recipe": FULL_RECIPE, "windows": (512, 1024, 2048), "tokens": 8192, "expanded": True}
CALIBRATION_TEXT, TEST_TEXT = "wikitext2-train", "wikitext2-test"
MODEL_NAME, RUN_NAME = "mla", "calibration"
STATE_NAME, SCORES_NAME = "demo.json", "scores.json"
METRICS_NAME, RESULTS_NAME, REPORT_NAME = "metrics.json", "results.json", "report.html"

SMOLLM2_VOCAB = 49152
DEMO_MINUTES = 14  # measured from a clean clone, virtual environment included
MODEL_NOTE = (
    "SmolLM2-135M-Instruct, converted to MLA without training. Rank methods by these "
    "numbers; do not expect the same losses of another model."
)

Say = Callable[[str], None]
ProgressOf = Callable[[str], object]


@dataclass(frozen=True)
class Demo:
    """What a demo run does.

    Args:
        out: folder of all results.
        model: checkpoint to use instead of the download; an MLA one is used as it is.
        recipe: fields of Recipe for all methods and schemes; `scheme` may hold its other settings.
        windows [tokens]: window lengths to score.
        tokens [tokens]: how much of the test text is scored at each length.
        expanded: score the stock expanded attention as well.
        keep_all: keep the folders of the baselines.
        seed: of every random choice.
        device: torch device for calibration and scoring, which runs in float32 on any of them.
        workers: layers calibrated at a time; see `run_calibration`.
    """

    out: Path
    model: Path | None = None
    recipe: dict = field(default_factory=lambda: dict(DEMO_RECIPE))
    windows: tuple[int, ...] = (2048,)
    tokens: int = 4096
    expanded: bool = False
    keep_all: bool = False
    seed: int = 0
    device: str = "cpu"
    workers: int = 1

    def recipes(self) -> list[Recipe]:
        """One recipe a scheme and method, alike but for these and the clip of the scheme."""
        own = {name: value for name, value in self.recipe.items() if name != "scheme"}
        policy = self.recipe.get("scheme", {})
        return [
            Recipe.model_validate(
                {"seed": self.seed, "clip_content": CLIP_CONTENT[name]}
                | own
                | {"method": method, "scheme": policy | bits}
            )
            for name, bits in SCHEMES.items()
            for method in METHODS
        ]

    def identity(self) -> dict:
        """What must be the same for a stopped demo to go on."""
        return {
            "model": str(self.model.resolve()) if self.model else None,
            "recipes": [recipe.sha256() for recipe in self.recipes()],
        }


def default_workers(device: str) -> int:
    """Say how many layers the demo calibrates at a time: two where a CPU has two cores.

    Its matrices are too small for a second thread: two processes of one thread are faster.

    Args: device [torch device name].
    Source: own.
    """
    return 2 if device == "cpu" and available_cores() >= 2 else 1


def run_demo(demo: Demo, *, resume: bool, say: Say, progress: ProgressOf) -> dict:
    """Run the demo.

    A folder that another revision of quantmla began may be resumed: its calibration is kept (and
    named in the manifest), everything after it is done again.

    Args:
        demo: what to do.
        resume: go on with what is in demo.out.
        say: called with one line at a time.
        progress: called with a title; gives a context manager of a (what, done, total) function.
    Returns: {"metrics", "rows", "layers", "report"}.
    Raises: any QuantMLAError; GateError if a row did not read the packed cache.
    Source: own.
    """
    require_packages()
    check_device(demo.device)
    with folder_lock(demo.out):
        return _run_steps(demo, resume, say, progress)


def _run_steps(demo: Demo, resume: bool, say: Say, progress: ProgressOf) -> dict:
    began = _open_folder(demo, resume, say)
    with _step("model", say):
        model = _model(demo, say, progress)
    with _step("calibration", say), progress("calibrate") as tell:
        run = _calibrate(demo, model, tell)
    with _step("evaluation", say):
        rows, context = _evaluate(demo, model, run, say)
    layers = [
        _layer(recipe, index, stats)
        for recipe in run.recipes
        for index, stats in enumerate(run.stats(recipe))
    ]
    manifest = {"calibrated_by": began} | build_manifest(
        models={"bf16": model},
        texts={name: open_text(name).sha256 for name in (CALIBRATION_TEXT, TEST_TEXT)},
        recipes={f"{r.method} {r.scheme.name}": r.sha256() for r in run.recipes},
        seed=demo.seed,
        **context,
    )
    results = {"rows": rows, "tasks": [], "layers": layers, "manifest": manifest}
    return _write(demo, results, say)


def code_version() -> dict:
    """Which code computes: version of the package and, in a checkout, its commit.

    Source: own.
    """
    return {"quantmla": quantmla.__version__, "revision": git_revision()}


def _open_folder(demo: Demo, resume: bool, say: Say) -> dict:
    """Begin a folder or check that it may go on; return the code version that calibrates in it."""
    path, identity, now = demo.out / STATE_NAME, demo.identity(), code_version()
    if not demo.out.exists() or not any(demo.out.iterdir()):
        with storage_errors(demo.out):
            demo.out.mkdir(parents=True, exist_ok=True)
        _write_state(path, {**identity, "calibrated_by": now, "fused_by": now})
        return now
    state = read_json(path) if path.is_file() else {}
    same = {name: state.get(name) for name in identity} == identity
    if not (resume and same):
        raise CheckpointError(
            "the folder of the demo already holds something",
            where=demo.out,
            expected="no such folder, an empty one, or with --resume a demo of the same settings",
            got="a demo of the same settings" if same else "other files or other settings",
            next_step="add --resume" if same else "choose another --out",
        )
    began = state.get("calibrated_by")
    if state.get("fused_by") != now:
        say(f"begun by {began}, this is {now}: model and calibration are kept, the rest is redone")
        for recipe in demo.recipes():
            remove_folder(_fused_folder(demo, recipe))
        _write_state(path, {**state, "fused_by": now})
    return began


def _write_state(path: Path, state: dict) -> None:
    with storage_errors(path):
        atomic_write(path, json.dumps(state, indent=1) + "\n")


@contextmanager
def _step(name: str, say: Say) -> Iterator[None]:
    started = time.perf_counter()
    say(f"{name} ...")
    yield
    say(f"{name}: {time.perf_counter() - started:.0f} s")


def _model(demo: Demo, say: Say, progress: ProgressOf) -> Path:
    """The MLA checkpoint: the one given, or a Llama-style one (by default SmolLM2) converted."""
    if demo.model is not None and _is_mla(demo.model):
        return demo.model
    converted = demo.out / MODEL_NAME
    if not converted.exists():  # it appears whole or not at all
        source = demo.model or fetch_smollm2(say=say)
        with progress("convert") as tell:
            convert_model(source, converted, progress=tell)
    return converted


def _calibrate(demo: Demo, model: Path, tell: Callable[[str, int, int], None]) -> CalibrationRun:
    """All recipes in one pass over the model; goes on where an earlier run stopped."""
    return run_calibration(
        model,
        CALIBRATION_TEXT,
        demo.recipes(),
        demo.out / RUN_NAME,
        resume=True,
        workers=demo.workers,
        progress=tell,
        device=demo.device,
    )


def _is_mla(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("kv_lora_rank") is not None


def _evaluate(demo: Demo, model: Path, run: CalibrationRun, say: Say) -> tuple[list[dict], dict]:
    """Score BF16 and every method at every window length; finished rows are kept in scores.json."""
    settings = default_settings(demo.device, "float32", "strict", 512, 1)
    tokenizer = load_tokenizer(model)
    digest = tokenizer_sha256(tokenizer)
    common = {"tokenizer_sha256": digest, "reference_sha256": checkpoint_sha256(model)}
    rows = []
    for window in demo.windows:
        windows = cut_windows(
            tokenizer, open_text(TEST_TEXT), window_tokens=window, tokens=demo.tokens
        )
        rows += _score_window(demo, model, run, windows, settings, say)
    context = {"device": settings.device, "tokenizer_sha256": digest}
    return [row | common for row in rows], context


def _score_window(
    demo: Demo, model: Path, run: CalibrationRun, windows: Windows, settings: Settings, say: Say
) -> list[dict]:
    path = demo.out / SCORES_NAME
    scores = read_json(path) if path.is_file() else {}
    measured = {"tokens": windows.tokens_sha256, "settings": vars(settings), **code_version()}
    key_end = f"{windows.window_tokens} {canonical_sha256(measured)[:16]}"

    def key(method: str, scheme: str, attention: str = PATH_NAMES["quantised"]) -> str:
        return f"{method} {scheme} {attention} {key_end}"

    keys = [key("bf16", "bf16", PATH_NAMES["absorbed"])]
    if demo.expanded:
        keys.append(key("bf16", "bf16", PATH_NAMES["expanded"]))
    keys += [key(recipe.method, recipe.scheme.name) for recipe in run.recipes]
    if any(name not in scores for name in keys):
        reference = Subject("bf16", model, path="absorbed")
        missing = [r for r in run.recipes if key(r.method, r.scheme.name) not in scores]
        subjects = _subjects(demo, model, run, missing)
        for row in measure_fidelity(reference, subjects, windows, settings, scratch=demo.out):
            say(f"  {summary(row)}")
            require_valid([row])
            scores[key(row["method"], row["scheme"], row["attention"])] = row
            with storage_errors(path):
                atomic_write(path, json.dumps(scores, indent=1) + "\n")
    return [scores[name] for name in keys]


def _subjects(
    demo: Demo, model: Path, run: CalibrationRun, recipes: list[Recipe]
) -> Iterator[Subject]:
    """Write the fused folders one by one; a baseline's goes when the next one is asked for."""
    if demo.expanded:
        yield Subject("bf16", model, path="expanded")
    for recipe in recipes:
        folder = _fused_folder(demo, recipe)
        if not folder.exists():
            run.fuse(recipe, folder)
        yield Subject(recipe.method, folder)
        if recipe.method != "quantmla" and not demo.keep_all:
            remove_folder(folder)


def _fused_folder(demo: Demo, recipe: Recipe) -> Path:
    return demo.out / f"{recipe.method}-{recipe.scheme.name}"


def _layer(recipe: Recipe, index: int, stats: dict) -> dict:
    return {
        "method": recipe.method,
        "scheme": recipe.scheme.name,
        "layer": index,
        "heldout_windows": min(JOINT_SEQUENCES, recipe.heldout_sequences),
        "content_error": stats["output_error_content"],
        "rope_error": stats["output_error_rope"],
        "both_error": stats["output_error_both"],
        "joint_ok": stats["joint_ok"],
    }


def _write(demo: Demo, results: dict, say: Say) -> dict:
    """Write metrics.json, results.json and report.html."""
    metrics = metrics_of(results["rows"], results["manifest"])
    results["notes"] = [] if demo.model else [MODEL_NOTE]
    results["rows"] = [row | {"differs": []} for row in results["rows"]]
    with storage_errors(demo.out):
        atomic_write(demo.out / METRICS_NAME, json.dumps(metrics, indent=1) + "\n")
        atomic_write(demo.out / RESULTS_NAME, json.dumps(results, indent=1) + "\n")
    report = write_report(results, demo.out / REPORT_NAME, title="quantmla demo")
    say(f"wrote {demo.out / METRICS_NAME} and {report}")
    return {"metrics": metrics, "report": str(report), **results}


def estimate_demo(demo: Demo) -> dict:
    """Say what a demo would cost; nothing is written or downloaded.

    Args: demo.
    Returns: numbers of models and tokens, disk in bytes, and what `estimate_run` says of the
        calibration where the MLA model is already there, else None; minutes of the usual demo.
    Raises: SchemeError for unusable recipe fields.
    Source: own.
    """
    recipes = demo.recipes()
    model = demo.model if demo.model and _is_mla(demo.model) else demo.out / MODEL_NAME
    known = _is_mla(model)
    models = 1 + demo.expanded + len(recipes)
    usual = not demo.model and all(getattr(demo, name) == QUICK[name] for name in QUICK)
    vocab = read_json(model / "config.json")["vocab_size"] if known else SMOLLM2_VOCAB
    return {
        "download": "none" if demo.model else SMOLLM2.requirement,
        "methods_and_schemes": [f"{recipe.method} {recipe.scheme.name}" for recipe in recipes],
        "models_scored": models,
        "tokens_scored": models * demo.tokens * len(demo.windows),
        "scratch_disk_bytes": 4 * demo.tokens * vocab,
        "calibration": estimate_run(model, recipes, workers=demo.workers, device=demo.device)
        if known
        else None,
        "minutes_on_two_idle_cores": DEMO_MINUTES if usual else None,
    }
