import re

import pytest

from quantmla.errors import TextError
from quantmla.evaluate.needle import build_needle_task
from quantmla.text import Text, open_text


def build(tokenizer, **kwargs):
    settings = {"context_tokens": 300, "items": 5} | kwargs
    return build_needle_task(tokenizer, open_text("haystack"), **settings)


def test_needle_and_question_are_whole_at_every_depth(tokenizer):
    task = build(tokenizer)
    depths = []
    for (request,) in task.requests:
        assert len(request.context) + len(request.continuation) == 300
        context = tokenizer.decode(request.context)
        found = re.search(r" The secret number of (\w+) is (\d{7})\.", context)
        assert context.endswith(f"\n\nThe secret number of {found[1]} is")
        assert tokenizer.decode(request.continuation) == f" {found[2]}"
        depths.append(found.start())
    assert depths[0] == 0
    assert depths == sorted(depths)
    last = tokenizer.decode(task.requests[-1][0].context)
    assert re.search(r"is \d{7}\.\n\nThe secret number", last)


def test_same_seed_same_needles(tokenizer):
    assert build(tokenizer, seed=1) == build(tokenizer, seed=1)
    assert build(tokenizer, seed=1) != build(tokenizer, seed=2)


def test_lengths_without_room_are_refused(tokenizer):
    with pytest.raises(TextError, match="does not fit the haystack"):
        build(tokenizer, context_tokens=60)
    with pytest.raises(TextError, match="does not fit the haystack"):
        build_needle_task(tokenizer, Text("h", "short", "0"), context_tokens=300, items=1)
