"""Put result rows beside each other, and refuse or mark those that were not measured alike."""

from __future__ import annotations

from math import comb

from quantmla.errors import EvaluationError

# a row differs from another one in what was measured if any of these differ; the method and its
# scheme may
MUST_MATCH = (
    "text_sha256",
    "tokens_sha256",
    "tokenizer_sha256",
    "window",
    "tokens",
    "bos",
    "dtype",
    "prefill",
)
TASK_MUST_MATCH = ("items_sha256", "tokenizer_sha256", "items", "shots", "dtype", "prefill")


def mark_comparable(rows: list[dict], *, strict: bool = False) -> list[dict]:
    """Add `differs` to each row: where it was measured otherwise than the first row of its kind.

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
        base = first.setdefault((row.get("task"), row.get("window")), row)
        fields = TASK_MUST_MATCH if row.get("task") else MUST_MATCH
        differs = [
            f"{field}: {_short(row.get(field))} | {_short(base.get(field))}"
            for field in fields
            if row.get(field) != base.get(field)
            and not (field == "prefill" and _expanded(row, base))
        ]
        if differs and strict:
            raise EvaluationError(
                "rows were not measured alike",
                where=f"{row['method']} {row['scheme']} against {base['method']} {base['scheme']}",
                got="; ".join(differs),
                next_step="score both with the same text, tokenizer, window and dtype",
            )
        marked.append({**row, "differs": differs})
    return marked


def _expanded(row: dict, base: dict) -> bool:
    """The stock attention has no prefill mode; it stands beside rows of any."""
    return None in (row["prefill"], base["prefill"])


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
            expected=f"{len(first)} items",
            got=f"{len(second)} items",
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
