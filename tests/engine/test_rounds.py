"""Index tensors of rounds, against a walk over the tokens."""

import pytest
import torch

from quantmla.engine.rounds import round_of

N_PAGES = 5
CPU = torch.device("cpu")


def walk(start, count, order, columns):
    """(sequence, column among the new ones, position, length of the sequence) of each token."""
    found = []
    for b, (first, tokens) in enumerate(zip(start, count, strict=True)):
        for n in range(columns.start, min(columns.stop, tokens)):
            column = n if order is None else int(order[b, n])
            found.append((b, column, first + n, first + min(tokens, columns.stop)))
    return found


@pytest.mark.parametrize(
    ("start", "count"), [((0,), (200,)), ((3, 130, 0), (7, 7, 7)), ((64, 0, 5), (4, 9, 0))]
)
@pytest.mark.parametrize("columns", [slice(0, 200), slice(0, 4), slice(4, 7)])
def test_every_token_has_its_place(start, count, columns):
    columns = slice(columns.start, min(columns.stop, max(count)))
    width, order = max(count) + 3, None
    if len(set(count)) > 1:
        order = torch.stack([torch.randperm(width) for _ in count])
    here = round_of(start, count, order, columns, N_PAGES, CPU)
    expected = walk(start, count, order, columns)
    sequence, column, position, end = torch.tensor(expected).T
    assert torch.equal(here.slots, sequence * N_PAGES * 64 + position)
    assert here.slots.dtype == torch.int64
    for have, want in ((here.sequences, sequence), (here.positions, position), (here.ends, end)):
        assert torch.equal(have, want.to(torch.int32))
    if order is None:
        assert here.picked is None
    else:
        assert torch.equal(torch.stack(here.picked), torch.stack([sequence, column]))
    assert here.starts.tolist() == [int((sequence < b).sum()) for b in range(len(start) + 1)]
    assert here.most == max(int((sequence == b).sum()) for b in range(len(start)))
    assert here.row_slots.tolist() == list(range(len(start)))
    lengths = [first + min(n, columns.stop) for first, n in zip(start, count, strict=True)]
    assert here.lengths.tolist() == lengths
    pages = -(-max(lengths) // 64)
    wanted = torch.arange(pages) + torch.arange(len(start))[:, None] * N_PAGES
    assert torch.equal(here.table, wanted.to(torch.int32))
    assert here.table.stride(0) % 16 == 0


def test_layers_share_a_round_and_other_calls_do_not():
    ask = ((3, 3), (4, 4), None, slice(0, 4), N_PAGES, CPU)
    here = round_of(*ask)
    assert round_of(*ask) is here
    for at, other in enumerate([(3, 2), (4, 3), None, slice(0, 3), 6, torch.device("meta")]):
        if other is not None:
            assert round_of(*ask[:at], other, *ask[at + 1 :]) is not here
    # padding may lie elsewhere though starts and counts are the same
    orders = torch.tensor([[[0, 1, 2], [0, 1, 2]], [[2, 0, 1], [1, 2, 0]]])
    picked = [round_of((0, 0), (2, 2), order, slice(0, 2), 1, CPU).picked[1] for order in orders]
    assert [p.tolist() for p in picked] == [[0, 1, 0, 1], [2, 0, 1, 2]]
