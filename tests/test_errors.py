"""Error blocks and exit codes."""

import pickle

import pytest

from quantmla import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.QuantMLAError)
]


def test_message_has_only_the_parts_that_were_given():
    error = errors.CheckpointError(
        "a tensor is missing", where="model.norm.weight", expected="a shard", next_step="copy it"
    )
    assert str(error) == (
        "a tensor is missing\n  where: model.norm.weight\n  expected: a shard\n  next: copy it"
    )
    assert (error.what, error.got) == ("a tensor is missing", None)
    assert str(errors.CacheError("no hand-off", got=0)) == "no hand-off\n  got: 0"


@pytest.mark.parametrize("kind", CLASSES)
def test_exit_codes(kind):
    assert kind("x").exit_code == (3 if kind is errors.GateError else 1)


def test_crosses_process_borders():
    error = errors.SchemeError("bits", where="scheme", got=5)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.where, copy.got) == (str(error), "scheme", 5)
