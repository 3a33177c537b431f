import pytest

from quantmla.config import KVScheme
from quantmla.errors import TextError
from quantmla.evaluate.continuation import Answer
from quantmla.evaluate.data import ITEM_SLICES, Items, open_items
from quantmla.evaluate.model import Settings, Subject, loaded
from quantmla.evaluate.tasks import build_task, run_task, wilson

CHOICE = {"id": "c", "task": "t", "context": "Q", "choices": [" aa", " b"], "gold": 1}
SCHEME = KVScheme.parse("c4r4")


def decode(tokenizer, request):
    return tokenizer.decode(request.context), tokenizer.decode(request.continuation)


def with_answers(monkeypatch, logprobs, greedy=False):
    """Let the model give these log-probabilities, whatever is asked."""

    def answers(model, subject, requests, settings, progress=None):
        given = [Answer(value, greedy, True) for value in logprobs]
        assert len(given) == len(requests)
        return given, {"packed_rows_read": 1, "packed_rows_expected": 1}

    monkeypatch.setattr("quantmla.evaluate.tasks.answer_requests", answers)


@pytest.mark.parametrize("name", ITEM_SLICES)
def test_every_slice_becomes_a_task(tokenizer, name):
    task = build_task(tokenizer, open_items(name), limit=5, shots=2)
    assert task.name == name
    assert len(task.requests) == len(task.gold) == 5
    assert task.kind == ("greedy" if name == "lambada" else "choice")
    floors = {"arc_easy": 0.25, "hellaswag": 0.25, "piqa": 0.5, "winogrande": 0.5, "lambada": 0}
    assert task.floor == pytest.approx(floors[name], abs=0.02)


def test_winogrande_asks_for_one_continuation_of_two_contexts(tokenizer):
    item = open_items("winogrande").items[0]
    task = build_task(tokenizer, Items("w", [item], "0"))
    pairs = [decode(tokenizer, request) for request in task.requests[0]]
    assert [context for context, _ in pairs] == item["contexts"]
    assert {continuation for _, continuation in pairs} == {item["continuation"]}


def test_shots_are_solved_items_that_are_not_scored(tokenizer):
    items = [CHOICE | {"id": str(i), "context": f"Q{i}"} for i in range(4)]
    task = build_task(tokenizer, Items("t", items, "0"), shots=2)
    assert len(task.requests) == 2
    context, continuation = decode(tokenizer, task.requests[1][0])
    assert context == "Q2 b\n\nQ3 b\n\nQ1"
    assert continuation == " aa"


@pytest.mark.parametrize(
    "broken",
    [
        {"choices": [" a", ""]},
        {"choices": "no list"},
        {"gold": 2},
        {"gold": "1"},
        {"context": None},
    ],
)
def test_items_that_do_not_fit_are_named(tokenizer, broken):
    with pytest.raises(TextError, match="t, item c"):
        build_task(tokenizer, Items("t", [CHOICE | broken], "0"))


def test_no_items_left_is_refused(tokenizer):
    with pytest.raises(TextError, match="no items left"):
        build_task(tokenizer, Items("t", [CHOICE], "0"), shots=1)


def test_sum_and_per_character_choose_apart(tokenizer, model_folder, monkeypatch):
    # the sum prefers the first choice, per character the second, which is the right one
    with_answers(monkeypatch, [-3.0, -3.1])
    items = [CHOICE | {"choices": [" a", " bbbb"]}]
    task = build_task(tokenizer, Items("t", items, "0"))
    row = run_task(None, Subject("rtn", model_folder, scheme=SCHEME), task, Settings())
    assert (row["accuracy"], row["accuracy_per_char"]) == (0.0, 1.0)
    assert row["correct"] == [False]
    assert row["gold_logprob"] == -3.1


def test_greedy_tasks_count_exact_answers(tokenizer, model_folder, monkeypatch):
    with_answers(monkeypatch, [-1.0, -2.0], greedy=True)
    items = [{"id": str(i), "task": "l", "context": "a", "continuation": " b"} for i in range(2)]
    task = build_task(tokenizer, Items("l", items, "0"))
    row = run_task(None, Subject("rtn", model_folder, scheme=SCHEME), task, Settings())
    assert row["accuracy"] == 1.0
    assert "accuracy_per_char" not in row


def test_a_task_through_the_packed_cache(tokenizer, model_folder):
    task = build_task(tokenizer, open_items("arc_easy"), limit=2, shots=1)
    subject = Subject("rtn", model_folder, scheme=SCHEME)
    with loaded(model_folder, Settings()) as model:
        row = run_task(model, subject, task, Settings(batch=4))
    assert row["valid"], row["invalid_reason"]
    assert row["items_with_packed_rows"] == row["items"] == 2
    assert row["packed_rows_read"] == row["packed_rows_expected"] > 0
    assert row["ci95"][0] <= row["accuracy"] <= row["ci95"][1]


def test_contexts_inside_the_window_make_an_invalid_row(tokenizer, model_folder):
    task = build_task(tokenizer, Items("t", [CHOICE], "0"))
    with loaded(model_folder, Settings()) as model:
        row = run_task(model, Subject("rtn", model_folder, scheme=SCHEME), task, Settings())
    assert not row["valid"]
    assert row["items_with_packed_rows"] == 0


def test_wilson_interval():
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(20, 20)[1] == 1.0
