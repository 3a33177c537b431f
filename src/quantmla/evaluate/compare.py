"""Put result rows beside each other, and refuse or mark those that were not measured alike."""

from __future__ import annotations

from math import comb

from quantmla.errors import EvaluationError

# a row differs from another one in what was measured if any of these differ; the method and its
# scheme may
HOW_MEASURED = (
    "tokenizer_sha256",
    "reference_sha256",
    "dtype",
    "prefill",
    "chunk_tokens",
    "sink_tokens",
    "window_tokens",
)
MUST_MATCH = ("text_sha256", "tokens_sha256", "window", "tokens", "bos", *HOW_MEASURED)
TASK_MUST_MATCH = ("items_sha256", "items", "shots", *HOW_MEASURED)
# BF16 rows have no protection, and stock attention has no mode: they stand beside rows of any
NONE_FITS_ALL = ("prefill", "sink_tokens", "window_tokens")


def mark_comparable(rows: list[dict], *, strict: bool = False) -> list[dict]:
    """Add `differs` to each row: where it was measured otherwise than the first row of its kind.

    A field is compared with that of the first row that has it: BF16 rows have no sink or window.

    Args:
        rows: fidelity rows (with `window`) or task rows (with `task`); each window and each task is
            a kind of its own.
        strict: raise instead of marking.
    Returns: copies of the rows with `differs`, a list of "field: this | first".
    Raises: EvaluationError in strict mode, naming the first row that differs.
    Source: field report FR-091.
    """
    first: dict[tuple, dict] = {}
    marked = []
    for row in rows:
        differs = []
        for field in TASK_MUST_MATCH if row.get("task") else MUST_MATCH:
            if not _applies(field, row):
                continue
            base = first.setdefault((row.get("task"), row.get("window"), field), row)
            if row.get(field) != base.get(field):
                differs.append(f"{field}: {_short(row.get(field))} | {_short(base.get(field))}")
                against = base
        if differs and strict:
            names = [f"{one['method']} {one['scheme']}" for one in (row, against)]
            raise EvaluationError(
                "rows were not measured alike",
                where=" against ".join(names),
                expected="the same text, reference, policy and numbers",
                got="; ".join(differs),
                next_step="score both with the same options, or leave --strict out",
            )
        marked.append({**row, "differs": differs})
    return marked


def _applies(field: str, row: dict) -> bool:
    if field == "chunk_tokens":  # strict results do not depend on it
        return row.get("prefill") == "fast"
    return field not in NONE_FITS_ALL or row.get(field) is not None


def _short(value) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def paired(first: list[bool], second: list[bool]) -> dict:
    """Compare two methods item by item (exact McNemar test).

    Args: first, second [one bool per item: answered correctly].
    Returns: {"only_first", "only_second": items, "p_value": two-sided}.
    Raises: EvaluationError if the lists differ in length.
    Source: algorithms.md 10.1.
    """
    if len(first) != len(second):
        raise EvaluationError(
            "paired comparison needs the same items",
            where="lists of correct answers",
            expected=f"{len(first)} items",
            got=f"{len(second)} items",
            next_step="score both methods on the same task file, with the same --limit and --shots",
        )
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    discordant = only_first + only_second
    tail = sum(comb(discordant, k) for k in range(min(only_first, only_second) + 1)) / 2**discordant
    return {"only_first": only_first, "only_second": only_second, "p_value": min(1.0, 2 * tail)}


def task_mean(rows: list[dict], baseline: list[dict]) -> dict:
    """Average the accuracies of one method over the tasks on which the baseline beats chance.

    Args: rows, baseline [task rows of the method and of BF16].
    Returns: {"mean": accuracy or None, "tasks": used, "left_out": tasks at the baseline's floor}.
    Source: field report FR-093.
    """
    discriminative = {row["task"] for row in baseline if row["discriminative"]}
    used = [row for row in rows if row["task"] in discriminative]
    return {
        "mean": sum(row["accuracy"] for row in used) / len(used) if used else None,
        "tasks": [row["task"] for row in used],
        "left_out": sorted({row["task"] for row in rows} - discriminative),
    }
