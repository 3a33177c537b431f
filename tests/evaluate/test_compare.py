import pytest

from quantmla.errors import EvaluationError
from quantmla.evaluate.compare import mark_comparable, paired, task_mean

ROW = {
    "method": "rtn",
    "scheme": "c4r4",
    "text_sha256": "a" * 64,
    "tokens_sha256": "b" * 64,
    "tokenizer_sha256": "c" * 64,
    "window": 2048,
    "tokens": 4096,
    "bos": False,
    "dtype": "float32",
    "prefill": "strict",
    "chunk_tokens": 512,
    "reference_sha256": "f" * 64,
    "sink_tokens": 4,
    "window_tokens": 128,
}
BF16 = ROW | {"method": "bf16", "scheme": "bf16", "sink_tokens": None, "window_tokens": None}


@pytest.mark.parametrize(
    "change",
    [
        {"text_sha256": "d" * 64},
        {"tokenizer_sha256": "d" * 64},
        {"tokens": 8192},
        {"bos": True},
        {"dtype": "bfloat16"},
        {"prefill": "fast"},
        {"reference_sha256": "d" * 64},
        {"sink_tokens": 0},
        {"window_tokens": 0},
    ],
)
def test_rows_measured_otherwise_are_marked_or_refused(change):
    rows = [BF16, ROW, ROW | {"method": "quantmla"}, ROW | change]
    marked = mark_comparable(rows)
    assert [bool(row["differs"]) for row in marked] == [False, False, False, True]
    assert next(iter(change)) in marked[3]["differs"][0]
    with pytest.raises(EvaluationError, match="not measured alike"):
        mark_comparable(rows, strict=True)


def test_windows_and_tasks_are_compared_among_themselves():
    task = {"method": "rtn", "scheme": "c4r4", "task": "piqa", "items": 60, "shots": 5}
    rows = [ROW, ROW | {"window": 512, "tokens_sha256": "e" * 64}, task, task | {"shots": 0}]
    assert [row["differs"] for row in mark_comparable(rows)] == [[], [], [], ["shots: 0 | 5"]]


def test_chunks_matter_in_fast_mode_only():
    other = {"chunk_tokens": 64}
    assert mark_comparable([ROW, ROW | other])[1]["differs"] == []
    fast = ROW | {"prefill": "fast"}
    assert mark_comparable([fast, fast | other])[1]["differs"] == ["chunk_tokens: 64 | 512"]


def test_expanded_rows_have_no_prefill_mode_and_stay_comparable():
    assert mark_comparable([ROW, ROW | {"prefill": None}])[1]["differs"] == []


def test_paired_counts_the_items_on_which_two_methods_differ():
    first = [True] * 9 + [False] * 3
    second = [False] * 8 + [True] * 4
    assert paired(first, second) == {
        "only_first": 8,
        "only_second": 3,
        "p_value": pytest.approx(0.2266, abs=1e-4),
    }
    assert paired(first, first)["p_value"] == 1.0
    with pytest.raises(EvaluationError, match="same items"):
        paired([True], [])


def test_tasks_at_the_floor_stay_out_of_the_mean():
    baseline = [{"task": "a", "discriminative": True}, {"task": "b", "discriminative": False}]
    rows = [{"task": "a", "accuracy": 0.5}, {"task": "b", "accuracy": 0.9}]
    assert task_mean(rows, baseline) == {"mean": 0.5, "tasks": ["a"], "left_out": ["b"]}
    assert task_mean(rows[1:], baseline)["mean"] is None
