"""What `quantmla eval` does: fidelity by window and tasks, with the manifest, in one result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.checkpoint.verify import verify
from quantmla.config import KVScheme
from quantmla.dims import MLADims
from quantmla.errors import CheckpointError, EvaluationError
from quantmla.evaluate.data import open_items
from quantmla.evaluate.fidelity import measure_fidelity, summary
from quantmla.evaluate.manifest import build_manifest, checkpoint_sha256
from quantmla.evaluate.model import (
    Settings,
    Subject,
    effective_block,
    loaded,
    tokenizer_sha256,
)
from quantmla.evaluate.needle import build_needle_task
from quantmla.evaluate.tasks import Task, build_task, run_task
from quantmla.files import atomic_write, storage_errors
from quantmla.loading import load_tokenizer
from quantmla.text import Windows, cut_windows, open_text

RESULTS_NAME = "results.json"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        model: checkpoint folder under test.
        reference: checkpoint whose BF16 rows are the reference; the model itself if None.
        scheme, sink_tokens, window_tokens: instead of the folder's own.
        text: slice name or file for perplexity; used only with `windows`.
        windows [tokens]: window lengths, may be empty.
        tokens [tokens]: how much of the text is scored at each window length.
        expanded: score the stock expanded attention as well.
        tasks: slice names or JSONL files.
        limit: items a task.
        shots: solved items before each context.
        needle_contexts [tokens]: context lengths of the needle task, may be empty.
        needle_items: needles a context length.
        haystack: slice name or file.
        seed: of needle keys and places.
    """

    model: Path
    reference: Path | None = None
    scheme: KVScheme | None = None
    sink_tokens: int | None = None
    window_tokens: int | None = None
    text: str = "wikitext2-test"
    windows: tuple[int, ...] = (2048,)
    tokens: int = 4096
    expanded: bool = False
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    shots: int = 0
    needle_contexts: tuple[int, ...] = ()
    needle_items: int = 10
    haystack: str = "haystack"
    seed: int = 0


@dataclass(frozen=True)
class Material:
    """Texts of a plan, tokenised before any model is loaded, so that bad input stops early."""

    windows: tuple[Windows, ...]
    tasks: tuple[Task, ...]
    texts: dict[str, str]
    tokenizer_sha256: str


def prepare(plan: Plan) -> Material:
    """Open and tokenise everything that a plan scores.

    Args: plan.
    Returns: Material.
    Raises: TextError if a text is missing, not UTF-8, or too short, or an item does not fit.
    Source: own.
    """
    _check_folders(plan)
    tokenizer = load_tokenizer(plan.model)
    texts, windows, tasks = {}, [], []
    if plan.windows:
        text = open_text(plan.text)
        texts[text.name] = text.sha256
        windows = [
            cut_windows(tokenizer, text, window_tokens=w, tokens=plan.tokens) for w in plan.windows
        ]
    for name in plan.tasks:
        items = open_items(name)
        texts[items.name] = items.sha256
        tasks.append(build_task(tokenizer, items, limit=plan.limit, shots=plan.shots))
    if plan.needle_contexts:
        haystack = open_text(plan.haystack)
        texts[haystack.name] = haystack.sha256
        tasks += [
            build_needle_task(
                tokenizer, haystack, context_tokens=n, items=plan.needle_items, seed=plan.seed
            )
            for n in plan.needle_contexts
        ]
    return Material(tuple(windows), tuple(tasks), texts, tokenizer_sha256(tokenizer))


def run_plan(
    plan: Plan,
    settings: Settings,
    *,
    out: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """Measure everything in a plan.

    Args:
        plan, settings: what and how.
        out: folder for results.json, which must not be there yet, and for the scratch file; a
            temporary one if None.
        progress: called with one line at a time.
    Returns: {"rows": fidelity rows, "tasks": task rows, "manifest"}; rows that did not read the
        packed
        cache have valid=False.
    Raises: TextError, EvaluationError, SchemeError, CheckpointError or CacheError.
    Source: own.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="quantmla-") as temporary:
            return _measure(plan, settings, Path(temporary), progress)
    with folder_lock(out):
        with storage_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        refuse_existing(out / RESULTS_NAME)
        result = _measure(plan, settings, out, progress)
        with storage_errors(out):
            atomic_write(out / RESULTS_NAME, json.dumps(result, indent=1) + "\n")
    return result


def refuse_existing(path: Path) -> None:
    """Keep results that are there: no result file or report is written over.

    Args: path [file to write].
    Raises: EvaluationError.
    Source: own.
    """
    if path.exists():
        raise EvaluationError(
            "this result already exists",
            where=path,
            expected="a name that is free",
            got="a file or folder",
            next_step="choose another --out, or remove it yourself",
        )


def _check_folders(plan: Plan) -> None:
    """Refuse what is no MLA checkpoint, a damaged fused one, and a reference of another model."""
    reader = CheckpointReader(plan.model)
    dims = MLADims.from_config(reader.config)
    if reader.is_fused:
        report = verify(plan.model)
        if not report.ok:
            raise CheckpointError(
                "the fused checkpoint was changed after it was written",
                where=plan.model,
                got="; ".join(report.failures[:3]),
                next_step="see `quantmla verify`; fuse the checkpoint again from its source",
            )
    if plan.reference is None:
        return
    reference = CheckpointReader(plan.reference)
    if reference.is_fused or MLADims.from_config(reference.config) != dims:
        raise EvaluationError(
            "the reference is not the model that the checkpoint was made from",
            where=plan.reference,
            expected="the original checkpoint, with the same dimensions",
            got="a fused checkpoint" if reference.is_fused else "other dimensions",
            next_step="pass the source of the fused checkpoint as --reference",
        )


def _measure(
    plan: Plan, settings: Settings, scratch: Path, progress: Callable[[str], None]
) -> dict:
    material = prepare(plan)
    reference = Subject("bf16", plan.reference or plan.model, path="absorbed")
    subjects = [
        Subject(
            method_of(plan.model),
            plan.model,
            scheme=plan.scheme,
            sink_tokens=plan.sink_tokens,
            window_tokens=plan.window_tokens,
        )
    ]
    block = effective_block(subjects[0])  # refuses a folder without a scheme before any work
    if plan.expanded:
        subjects.insert(0, Subject("bf16", reference.folder, path="expanded"))
    common = {
        "tokenizer_sha256": material.tokenizer_sha256,
        "reference_sha256": checkpoint_sha256(reference.folder),
    }
    rows: list[dict] = []
    for windows in material.windows:
        progress(f"window {windows.window_tokens}: {windows.tokens} tokens")
        for row in measure_fidelity(reference, subjects, windows, settings, scratch=scratch):
            progress(summary(row))
            rows.append(row)
    tasks = run_tasks([reference, *subjects], material.tasks, settings, progress=progress)
    return {
        "rows": [row | common for row in rows],
        "tasks": [row | common for row in tasks],
        "manifest": build_manifest(
            models={"model": plan.model, "reference": reference.folder},
            texts=material.texts,
            recipes={"model": block.recipe_sha256} if block.recipe_sha256 else None,
            seed=plan.seed,
            device=settings.device,
            tokenizer_sha256=material.tokenizer_sha256,
        ),
    }


def run_tasks(
    subjects: list[Subject],
    tasks: tuple[Task, ...],
    settings: Settings,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Score all tasks with each subject, loading each model once.

    Args: subjects; tasks; settings; progress [one line a task].
    Returns: task rows.
    Raises: EvaluationError of the scoring.
    Source: own.
    """
    rows = []
    for subject in subjects if tasks else ():
        with loaded(subject.folder, settings) as model:
            for task in tasks:
                row = run_task(model, subject, task, settings)
                progress(
                    f"{row['method']} {row['attention']}: {row['task']} accuracy "
                    f"{row['accuracy']:.3f} ({row['seconds_s']:.0f} s)"
                )
                rows.append(row)
    return rows


def method_of(folder: Path) -> str:
    """Return the method that wrote a fused checkpoint, or "rtn" for one without a quantmla block.

    Args: folder [checkpoint folder].
    Raises: CheckpointError if there is no readable config.json.
    Source: own.
    """
    return read_json(folder / "config.json").get("quantmla", {}).get("method", "rtn")


def estimate(plan: Plan) -> dict:
    """Say what a plan would cost; no weight is read.

    Args: plan.
    Returns: tokens fed to a model in all, and bytes of scratch disk and of weights.
    Raises: TextError for unusable texts; SchemeError for a folder without a scheme.
    Source: own.
    """
    block = effective_block(Subject("", plan.model, scheme=plan.scheme))
    material = prepare(plan)
    models = 3 if plan.expanded else 2
    fed = sum(windows.tokens for windows in material.windows)
    fed += sum(r.fed_tokens for task in material.tasks for item in task.requests for r in item)
    vocab = read_json(plan.model / "config.json").get("vocab_size", 0)
    scored = max((windows.tokens for windows in material.windows), default=0)
    return {
        "scheme": block.scheme(0).name,
        "models_scored": models,
        "tokens_fed": models * fed,
        "scratch_disk_bytes": 4 * vocab * scored,
        "weights_bytes": sum(f.stat().st_size for f in plan.model.glob("*.safetensors")),
    }
