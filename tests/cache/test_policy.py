"""Each key has exactly one representation, and the counts equal brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmla.cache.policy import packed_pairs, partition, representation, ring_slot
from quantmla.errors import CacheError

SIZES = {"sink": st.integers(0, 9), "window": st.integers(0, 20)}
SETTINGS = settings(deadline=None, max_examples=150, derandomize=True)


def chunk_borders(length, cuts):
    return sorted({0, *(cut % max(length, 1) for cut in cuts)})


def causal_packed(length, sink, window, chunk_starts=None):
    """Mask [query, key] of packed keys, from the definition."""
    pos = torch.arange(length)
    query, key = pos[:, None], pos[None, :]
    return (key <= query) & ~representation(query, key, sink, window, chunk_starts)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (0, (range(0), range(0, 0), range(0, 0))),
        (1, (range(1), range(1, 1), range(1, 1))),
        (3, (range(3), range(3, 3), range(3, 3))),
        (4, (range(4), range(4, 4), range(4, 4))),
        (5, (range(4), range(4, 4), range(4, 5))),
        (131, (range(4), range(4, 4), range(4, 131))),
        (132, (range(4), range(4, 4), range(4, 132))),
        (133, (range(4), range(4, 5), range(5, 133))),
        (4096, (range(4), range(4, 3968), range(3968, 4096))),
    ],
)
def test_partition_of_the_default_policy(visible, expected):
    got = partition(visible, 4, 128)
    assert [(r.start, r.stop) for r in got] == [(r.start, r.stop) for r in expected]


@SETTINGS
@given(visible=st.integers(0, 80), **SIZES)
def test_partition_covers_every_key_once_and_agrees_with_the_mask(visible, sink, window):
    parts = partition(visible, sink, window)
    assert [k for part in parts for k in part] == list(range(visible))
    if visible:
        mask = representation(torch.tensor(visible - 1), torch.arange(visible), sink, window)
        assert [k for k in range(visible) if not mask[k]] == list(parts[1])


def test_strict_mode_by_hand():
    pos = torch.arange(8)
    mask = representation(pos[:, None], pos[None, :], sink=1, window=3)
    assert mask[7].tolist() == [True, False, False, False, False, True, True, True]
    assert mask[3].tolist()[:4] == [True, True, True, True]
    assert mask[4].tolist()[:5] == [True, False, True, True, True]
    everything_packed = representation(pos[:, None], pos[None, :], sink=0, window=0)
    assert not (everything_packed & (pos[None, :] <= pos[:, None])).any()


def test_fast_mode_by_hand():
    pos = torch.arange(12)
    mask = representation(pos[:, None], pos[None, :], sink=1, window=3, chunk_starts=[0, 4, 8])
    # chunk 8..11 keeps itself and the window that ends at its first token: 6, 7, 8
    for query in range(8, 12):
        assert [k for k in range(query + 1) if not mask[query, k]] == [1, 2, 3, 4, 5]
    for query in range(4, 8):
        assert [k for k in range(query + 1) if not mask[query, k]] == [1]
    assert mask[:4, :4].all()
    no_window = representation(pos[:, None], pos[None, :], 0, 0, chunk_starts=[0, 4, 8])
    assert [k for k in range(12) if no_window[11, k]] == [8, 9, 10, 11]


@SETTINGS
@given(length=st.integers(1, 60), **SIZES)
def test_fast_mode_with_chunks_of_one_is_strict(length, sink, window):
    pos = torch.arange(length)
    query, key = pos[:, None], pos[None, :]
    fast = representation(query, key, sink, window, chunk_starts=range(length))
    assert torch.equal(fast, representation(query, key, sink, max(window, 1)))


@SETTINGS
@given(length=st.integers(1, 60), cuts=st.lists(st.integers(0, 59), max_size=5), **SIZES)
def test_fast_mode_never_packs_more_than_strict(length, cuts, sink, window):
    fast = causal_packed(length, sink, window, chunk_borders(length, cuts))
    strict = causal_packed(length, sink, window)
    assert not (fast & ~strict).any()


@SETTINGS
@given(
    first=st.integers(0, 60),
    n=st.integers(0, 60),
    cuts=st.none() | st.lists(st.integers(0, 119), max_size=5),
    **SIZES,
)
def test_packed_pairs_equals_brute_force(first, n, cuts, sink, window):
    starts = None if cuts is None else chunk_borders(first + n, cuts)
    packed = causal_packed(first + n, sink, window, starts)
    assert packed_pairs(first, n, sink, window, starts) == int(packed[first:].sum())


def test_packed_pairs_at_the_borders():
    assert packed_pairs(0, 132, 4, 128) == 0
    assert packed_pairs(0, 133, 4, 128) == 1
    assert packed_pairs(132, 1, 4, 128) == 1
    assert packed_pairs(0, 2048, 4, 128) == 1916 * 1917 // 2
    assert packed_pairs(0, 10**9, 4, 128) == (10**9 - 132) * (10**9 - 131) // 2
    whole = packed_pairs(0, 1000, 4, 128)
    assert whole == sum(packed_pairs(i, 10, 4, 128) for i in range(0, 1000, 10))
    assert packed_pairs(0, 2048, 4, 128, chunk_starts=[0]) == 0


def test_positions_broadcast_per_row():
    query = torch.tensor([[5], [9]])  # [B, S] with left padding already removed
    key = torch.arange(10)
    mask = representation(query[..., None], key, sink=1, window=2)
    assert mask.shape == (2, 1, 10)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 4, 5, 6, 7, 8, 9]
    assert mask[1, 0].nonzero().flatten().tolist() == [0, 8, 9]
    padded = torch.tensor([-2, -1, 0, 1])
    fast = representation(padded[:, None], padded[None, :], 1, 2, chunk_starts=[0, 1, 50])
    assert fast[:3, 2:].all()


@SETTINGS
@given(length=st.integers(0, 100), sink=st.integers(0, 5), ring=st.integers(1, 20))
def test_ring_rows_of_the_last_tokens_are_distinct(length, sink, ring):
    newest = range(max(sink, length - ring), length)
    rows = [ring_slot(pos, sink, ring) for pos in newest]
    assert len(set(rows)) == len(rows)
    assert all(0 <= row < ring for row in rows)
    if newest:
        tensor_rows = ring_slot(torch.tensor(list(newest)), sink, ring)
        assert tensor_rows.tolist() == rows


def test_ring_starts_after_the_sinks():
    assert [ring_slot(p, 4, 128) for p in (4, 5, 131, 132)] == [0, 1, 127, 0]
    for pos, ring in ((3, 128), (4, 0)):
        with pytest.raises(CacheError, match="no ring row"):
            ring_slot(pos, 4, ring)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition(-1, 4, 128), "negative length"),
        (lambda: partition(5, -1, 128), "negative protection"),
        (lambda: packed_pairs(0, -1, 4, 128), "negative position or count"),
        (lambda: packed_pairs(0, 8, 4, 128, chunk_starts=[]), "chunk borders"),
        (lambda: packed_pairs(0, 8, 4, 128, chunk_starts=[1, 4]), "chunk borders"),
        (lambda: packed_pairs(0, 8, 4, 128, chunk_starts=[0, 4, 4]), "chunk borders"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(CacheError, match=message):
        call()
