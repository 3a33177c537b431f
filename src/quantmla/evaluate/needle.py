"""Needle recall: a generated key and number hidden in a haystack, asked for at the end."""

from __future__ import annotations

import random

from quantmla.errors import TextError
from quantmla.evaluate.continuation import Request
from quantmla.evaluate.tasks import Task
from quantmla.text import Text, bos_token, encode

NEEDLE = " The secret number of {key} is {value}."
QUESTION = "\n\nThe secret number of {key} is"
SYLLABLES = (
    "ba",
    "der",
    "fi",
    "gol",
    "ka",
    "lum",
    "mo",
    "nir",
    "pa",
    "qua",
    "ros",
    "sel",
    "ta",
    "ver",
    "wi",
    "zen",
)
VALUE_DIGITS = 7


def build_needle_task(
    tokenizer, haystack: Text, *, context_tokens: int, items: int, seed: int = 0
) -> Task:
    """Build items whose needles lie at evenly spaced depths, from the very start to the end.

    Args:
        tokenizer: transformers tokenizer.
        haystack: prose; each item starts at another place of it.
        context_tokens [tokens]: length of context, question and answer together.
        items: how many.
        seed: of keys, numbers and places.
    Returns: Task of kind "greedy" named needle_<context_tokens>; nothing is ever cut from needle or
        question.
    Raises: TextError if the length leaves no room for hay or the haystack is too short.
    Source: the single-needle task of RULER (idea only; own wording and text).
    """
    rng = random.Random(seed)
    hay = encode(tokenizer, haystack.text)
    bos = [token for token in (bos_token(tokenizer),) if token is not None]
    requests = []
    for index in range(items):
        key = "".join(rng.sample(SYLLABLES, 3))
        value = str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))
        needle, question, answer = (
            encode(tokenizer, text)
            for text in (NEEDLE.format(key=key, value=value), QUESTION.format(key=key), f" {value}")
        )
        room = context_tokens - len(bos) - len(needle) - len(question) - len(answer)
        if not 0 < room <= len(hay):
            raise TextError(
                "the context length does not fit the haystack",
                where=haystack.name,
                expected=f"room for 1 to {len(hay)} tokens of hay",
                got=f"{room} tokens at a context length of {context_tokens}",
                next_step="use another --needle length or a longer --haystack",
            )
        start = rng.randrange(len(hay) - room + 1)
        depth = round(room * index / max(1, items - 1))
        body = hay[start : start + depth] + needle + hay[start + depth : start + room]
        requests.append([Request(bos + body + question, answer)])
    return Task(
        name=f"needle_{context_tokens}",
        kind="greedy",
        requests=requests,
        characters=[[VALUE_DIGITS + 1]] * items,
        gold=[0] * items,
        floor=0.0,
        shots=0,
        items_sha256=haystack.sha256,
    )
