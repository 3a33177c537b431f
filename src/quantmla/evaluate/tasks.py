"""A small task runner over JSONL items (choice, winogrande form, LAMBADA) through the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantmla.errors import TextError
from quantmla.evaluate.continuation import Answer, Request, answer_requests
from quantmla.evaluate.data import Items
from quantmla.evaluate.model import Settings, Subject
from quantmla.evaluate.row import describe, validity
from quantmla.text import bos_token, encode

Z95 = 1.959964


@dataclass(frozen=True)
class Task:
    """Items of one task as scoring requests.

    Args:
        name: label.
        kind: "choice" (argmax over the item's requests) or "greedy" (the one request must be
            decoded exactly).
        requests: per item, one request per choice.
        characters: per item and choice, length of what is scored, for the per-character score.
        gold: per item, index of the right choice.
        floor: accuracy of guessing.
        shots: solved items before each context.
        items_sha256: hash of the file that the items come from.
    """

    name: str
    kind: str
    requests: list[list[Request]]
    characters: list[list[int]]
    gold: list[int]
    floor: float
    shots: int
    items_sha256: str


def build_task(tokenizer, items: Items, *, limit: int | None = None, shots: int = 0) -> Task:
    """Turn JSONL items into a task; the form is read off the fields of the first item.

    Args:
        tokenizer: transformers tokenizer.
        items: Items with `context, choices, gold`, or `contexts, continuation, gold`, or `context,
            continuation`.
        limit: score at most this many items.
        shots: solved items, taken from the end of the file and not scored, put before each context.
            Without them
            most contexts are shorter than sink + window and no packed row is read.
    Returns: Task.
    Raises: TextError if fields are missing or too few items are left.
    Source: schema of the evaluation pack.
    """
    scored = items.items[: len(items.items) - shots][:limit]
    if shots < 0 or not scored:
        raise TextError(
            "no items left to score",
            where=items.name,
            expected="more items than shots",
            got=f"{len(items.items)} items, {shots} shots, limit {limit}",
            next_step="use fewer --shots, or a longer task file",
        )
    prefix = [token for token in (bos_token(tokenizer),) if token is not None]
    for item in items.items[len(items.items) - shots :]:
        context, continuation = _pairs(item, items.name)[item.get("gold", 0)]
        prefix += encode(tokenizer, context + continuation + "\n\n")
    pairs = [_pairs(item, items.name) for item in scored]
    requests = [
        [Request(prefix + encode(tokenizer, c), encode(tokenizer, t)) for c, t in item]
        for item in pairs
    ]
    greedy = "choices" not in scored[0] and "contexts" not in scored[0]
    return Task(
        name=str(scored[0].get("task", items.name)),
        kind="greedy" if greedy else "choice",
        requests=requests,
        characters=[[len(t) for _, t in item] for item in pairs],
        gold=[item.get("gold", 0) for item in scored],
        floor=0.0 if greedy else sum(1 / len(item) for item in pairs) / len(pairs),
        shots=shots,
        items_sha256=items.sha256,
    )


def _pairs(item: dict, name: str) -> list[tuple[str, str]]:
    """Return the (context, continuation) pairs of an item, one per choice."""
    try:
        if "choices" in item:
            pairs = [(item["context"], choice) for choice in item["choices"]]
        elif "contexts" in item:
            pairs = [(context, item["continuation"]) for context in item["contexts"]]
        else:
            pairs = [(item["context"], item["continuation"])]
        lists = [item[name] for name in ("choices", "contexts") if name in item]
        valid = all(isinstance(texts, list) for texts in lists)
        valid = valid and all(isinstance(text, str) and text for pair in pairs for text in pair)
        gold = item.get("gold", 0)
        if not valid or type(gold) is not int or not 0 <= gold < len(pairs):
            raise KeyError("gold, or an empty text")
    except (KeyError, TypeError) as error:
        raise TextError(
            "an item does not fit the schema",
            where=f"{name}, item {item.get('id')}",
            expected="context and choices, contexts and continuation, or context and continuation",
            got=f"fields {', '.join(item)}; problem with {error}",
            next_step="correct the item, or leave it out",
        ) from error
    return pairs


def run_task(
    model: torch.nn.Module,
    subject: Subject,
    task: Task,
    settings: Settings,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Score one task with one model.

    Args: model [from `loaded(subject.folder)`]; subject; task; settings; progress [(done, total)
        requests].
    Returns: the result row, with `correct` per item for paired comparison; valid=False if no packed
        row was read.
    Raises: EvaluationError of the scoring.
    Source: algorithms.md 10.1, field reports FR-090 and FR-093.
    """
    started = time.perf_counter()
    flat = [request for item in task.requests for request in item]
    answers, counters = answer_requests(model, subject, flat, settings, progress=progress)
    remaining = iter(answers)
    grouped = [[next(remaining) for _ in item] for item in task.requests]
    if task.kind == "greedy":
        correct = [item[0].greedy for item in grouped]
    else:
        correct = _choose(task, grouped, per_character=False)
    low, high = wilson(sum(correct), len(correct))
    row = {
        "task": task.name,
        "method": subject.method,
        "accuracy": sum(correct) / len(correct),
        "ci95": [low, high],
        "floor": task.floor,
        "discriminative": low > task.floor,
        "items": len(correct),
        "items_with_packed_rows": sum(any(a.packed for a in item) for item in grouped),
        "gold_logprob": sum(item[g].logprob for item, g in zip(grouped, task.gold, strict=True))
        / len(correct),
        "shots": task.shots,
        "items_sha256": task.items_sha256,
        "correct": correct,
        "seconds_s": round(time.perf_counter() - started, 2),
        **counters,
    }
    if task.kind == "choice":
        per_character = _choose(task, grouped, per_character=True)
        row["accuracy_per_char"] = sum(per_character) / len(correct)
        row["ci95_per_char"] = list(wilson(sum(per_character), len(correct)))
    row |= describe(subject, settings)
    return row | validity(row)


def _choose(task: Task, grouped: list[list[Answer]], per_character: bool) -> list[bool]:
    correct = []
    for item, characters, gold in zip(grouped, task.characters, task.gold, strict=True):
        scores = [
            a.logprob / n if per_character else a.logprob
            for a, n in zip(item, characters, strict=True)
        ]
        correct.append(max(range(len(scores)), key=scores.__getitem__) == gold)
    return correct


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a proportion.

    Args: successes, trials [counts, trials > 0].
    Source: Wilson 1927.
    """
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)
