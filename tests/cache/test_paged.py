"""The paged cache: plans, sharing, roll-back, accounting and refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_rows import (
    FINGERPRINT,
    LAYOUTS,
    ROWS,
    SINK,
    SLACK,
    WINDOW,
    append,
    blobs_of,
    check_tokens,
    layout_of,
    paged,
    token_bytes,
    write,
)
from quantmla.cache.accounting import pool_bytes, resident
from quantmla.cache.layout import PageLayout
from quantmla.cache.paged import MAX_TOKENS, PagedLatentCache
from quantmla.cache.pages import RequestState, write_plan
from quantmla.config import KVScheme
from quantmla.errors import CacheError


def table(cache, request):
    return cache.read([request]).block_table[0].tolist()


def test_plans_of_a_short_life():
    cache = paged(n_pages=6)
    for request in ("a", "b"):
        cache.add(request)
    plan = cache.extend({"b": 2, "a": 66})
    assert plan.slot_mapping.tolist() == [0, 1, *range(64, 64 + 66)]
    assert plan.positions.tolist() == [0, 1, *range(66)]
    assert plan.row_slots.tolist() == [1] * 2 + [0] * 66
    assert plan.seq_ends.tolist() == [2] * 2 + [66] * 66
    dtypes = [x.dtype for x in (plan.slot_mapping, plan.positions, plan.row_slots, plan.seq_ends)]
    assert dtypes == [torch.int64, *[torch.int32] * 3]
    plan = cache.extend({"a": 1, "b": 0})
    assert [x.tolist() for x in (plan.slot_mapping, plan.positions, plan.seq_ends)] == [
        [2 * 64 + 2],
        [66],
        [67],
    ]
    read = cache.read(["a", "b"])
    assert read.block_table.tolist() == [[1, 2], [0, 0]]
    assert (read.seq_lens.tolist(), read.row_slots.tolist()) == ([67, 2], [0, 1])
    assert {x.dtype for x in (read.block_table, read.seq_lens, read.row_slots)} == {torch.int32}
    assert (read.page_tokens, cache.free_pages) == (64, 3)
    cache.free("a")
    assert cache.free_pages == 5
    assert "a" not in cache
    assert "b" in cache
    empty = cache.read([])
    assert (empty.block_table.shape, empty.seq_lens.shape) == ((0, 1), (0,))
    assert cache.extend({}).slot_mapping.shape == (0,)
    cache.add("new")
    assert cache.read(["new"]).block_table.tolist() == [[0]]


@pytest.mark.parametrize("page_tokens", [64, 256])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 131, 132, 133, 260])
def test_streaming_and_one_shot_give_the_same_bytes(length, page_tokens):
    # field report FR-042
    tokens = list(range(length))
    cache = paged(n_pages=15, page_tokens=page_tokens)
    for request, steps in (("whole", [length]), ("steps", [1] * length), ("odd", [50] * 6)):
        cache.add(request)
        done = 0
        for step in steps:
            append(cache, request, tokens[done : done + step])
            done = min(length, done + step)
        check_tokens(cache, request, tokens)
        assert len(table(cache, request)) == -(-length // page_tokens)
    other = {request: blobs_of(cache, request) for request in ("whole", "steps", "odd")}
    assert len(set(torch.cat(list(other.values())).tolist())) == 3 * len(other["odd"])


@given(data=st.data(), page_tokens=st.sampled_from([64, 128, 256]))
def test_a_plan_is_what_a_loop_over_tokens_gives(data, page_tokens):
    ids = data.draw(st.permutations(range(60)))
    runs, expected = [], []
    for slot in range(data.draw(st.integers(0, 4))):
        tokens = data.draw(st.integers(0, 700))
        count = data.draw(st.integers(0, tokens))
        state = RequestState(slot, 0, tokens=tokens)
        state.pages.extend(ids.pop() for _ in range(-(-tokens // page_tokens)))
        runs.append((state, count))
        for p in range(tokens - count, tokens):
            index = state.pages[p // page_tokens] * page_tokens + p % page_tokens
            expected.append((index, p, slot, tokens))
    plan = write_plan(runs, page_tokens, torch.device("cpu"))
    columns = (plan.slot_mapping, plan.positions, plan.row_slots, plan.seq_ends)
    assert list(zip(*(x.tolist() for x in columns), strict=True)) == expected


def test_token_addresses_pass_32_bits():
    # field report FR-030
    state = RequestState(0, 0, tokens=300)
    state.pages.extend([2**31 - 1, 2**30])
    plan = write_plan([(state, 300)], 256, torch.device("cpu"))
    first = (2**31 - 1) * 256
    assert plan.slot_mapping[[0, 255, 256]].tolist() == [first, first + 255, 2**38]


def test_fork_shares_pages_until_one_writes():
    cache = paged(n_pages=6)
    cache.add("a")
    append(cache, "a", list(range(100)))
    cache.fork("a", "b")
    assert cache.free_pages == 4
    assert table(cache, "a") == table(cache, "b") == [0, 1]
    assert len({int(cache.read([x]).row_slots[0]) for x in "ab"}) == 2
    append(cache, "b", [200, 201])  # copies the last page
    assert table(cache, "b") == [0, 2]
    append(cache, "a", [300])  # holds its page alone now
    assert table(cache, "a") == [0, 1]
    check_tokens(cache, "a", [*range(100), 300])
    check_tokens(cache, "b", [*range(100), 200, 201])
    cache.free("a")
    assert cache.free_pages == 4
    check_tokens(cache, "b", [*range(100), 200, 201])
    cache.free("b")
    assert cache.free_pages == 6


def test_forks_that_all_write_in_one_call_copy_once_less():
    cache = paged(n_pages=3)
    cache.add("a")
    append(cache, "a", list(range(10)))
    cache.fork("a", "b")
    cache.fork("a", "c")
    write(cache, cache.extend({"c": 1, "a": 2, "b": 1}), [50, 51, 52, 53])
    assert sorted(table(cache, x)[0] for x in "abc") == [0, 1, 2]
    assert table(cache, "b") == [0]
    for request, new in (("a", [51, 52]), ("b", [53]), ("c", [50])):
        check_tokens(cache, request, [*range(10), *new])


def test_only_blobs_in_use_are_copied():
    cache = paged(n_pages=2, page_tokens=256)
    cache.add("a")
    append(cache, "a", list(range(65)))
    cache.fork("a", "b")
    for layer in range(2):
        cache.pool(layer)[0][4:].fill_(0xEE)
    cache.extend({"b": 1})
    pages = cache.pool(0)[0]
    assert torch.equal(pages[4:6], pages[:2])
    assert (pages[6:] == 0xEE).all()


def test_a_fork_at_a_page_border_copies_nothing():
    cache = paged(n_pages=3)
    cache.add("a")
    append(cache, "a", list(range(64)))
    cache.fork("a", "b")
    for i, request in enumerate("ab"):
        append(cache, request, [100 + i])
    assert [table(cache, x) for x in "ab"] == [[0, 1], [0, 2]]


@pytest.mark.parametrize("page_tokens", [64, 128])
def test_truncate_across_a_page_border_and_go_on(page_tokens):
    cache = paged(n_pages=4, page_tokens=page_tokens)
    cache.add("a")
    append(cache, "a", list(range(page_tokens + 1)))
    cache.truncate("a", page_tokens - 2)
    assert cache.free_pages == 3
    check_tokens(cache, "a", list(range(page_tokens - 2)))
    append(cache, "a", [300, 301, 302])
    check_tokens(cache, "a", [*range(page_tokens - 2), 300, 301, 302])
    cache.truncate("a", SINK)
    cache.truncate("a", 0)
    assert cache.free_pages == 4
    append(cache, "a", [7])
    check_tokens(cache, "a", [7])


def test_truncate_into_a_shared_page_then_write():
    cache = paged()
    cache.add("a")
    append(cache, "a", list(range(70)))
    cache.fork("a", "b")
    cache.truncate("b", 67)
    append(cache, "b", [300])
    check_tokens(cache, "a", list(range(70)))
    check_tokens(cache, "b", [*range(67), 300])


def test_truncate_stops_where_the_slack_ends():
    cache = paged()
    cache.add("a")
    append(cache, "a", list(range(100)))
    with pytest.raises(CacheError, match="were overwritten") as error:
        cache.truncate("a", 100 - SLACK - 2)
    assert "expected: at least 96 tokens kept with slack_tokens=3, or at most 2" in str(error.value)
    assert "got: 95" in str(error.value)
    check_tokens(cache, "a", list(range(100)))
    cache.truncate("a", 100 - SLACK - 1)
    # the next token finds its rows, a query of the last one that is left would not
    with pytest.raises(CacheError, match="rows that these queries read"):
        cache.read(["a"])
    append(cache, "a", [200])
    check_tokens(cache, "a", [*range(96), 200])
    with pytest.raises(CacheError, match="were overwritten"):
        cache.truncate("a", 95)  # slack is not refilled by one token
    cache.truncate("a", 1)
    append(cache, "a", list(range(300, 308)))
    check_tokens(cache, "a", [0, *range(300, 308)])
    cache.truncate("a", 3)  # a ring that began anew has nothing overwritten
    append(cache, "a", [310])
    check_tokens(cache, "a", [0, 300, 301, 310])


def test_several_queries_at_once_need_slack():
    cache = paged()
    cache.add("a")
    append(cache, "a", list(range(50)))
    append(cache, "a", [50, 51, 52, 53])
    cache.read(["a"], query_tokens=SLACK + 1)
    with pytest.raises(CacheError, match="rows that these queries read") as error:
        cache.read(["a"], query_tokens=SLACK + 2)
    assert "expected: the last 9 rows in a ring of 8" in str(error.value)


def test_memory_is_what_accounting_says():
    # field reports FR-033 and FR-045
    layouts = [
        PageLayout(512, 64, KVScheme.parse("c4r4")),
        PageLayout(512, 64, KVScheme.parse("c2r4")),
    ]
    for page_tokens in (64, 256):
        sizes = {"n_pages": 8, "n_slots": 3, "page_tokens": page_tokens, "slack_tokens": 6}
        cache = PagedLatentCache(layouts, **sizes, device="cpu", fingerprint="x")
        tensors = [x for layer in range(2) for x in cache.pool(layer)]
        held = sum(x.nbytes for x in tensors)
        assert {x.untyped_storage().nbytes() for x in tensors} == {held}  # one allocation
        assert cache.resident_bytes() == held == pool_bytes(layouts, **sizes)
        assert held == 8 * cache.page_bytes + 3 * cache.slot_bytes
        assert [x.shape[0] for x in tensors] == [8 * page_tokens // 64, 3] * 2
    for tokens in (256, 4096):
        one = [resident(layout, tokens, slack_tokens=6) for layout in layouts]
        assert pool_bytes(layouts, n_pages=tokens // 64, n_slots=1, slack_tokens=6) == sum(
            x.packed_bytes + x.bf16_rows_bytes for x in one
        )


def test_nothing_is_read_that_was_not_written(poison_empty):
    layouts = (layout_of("c4r2"), LAYOUTS[1])
    cache = PagedLatentCache(
        layouts, n_pages=3, n_slots=2, slack_tokens=SLACK, device="cpu", fingerprint="x"
    )
    cache.add("a")
    append(cache, "a", list(range(66)))
    cache.fork("a", "b")
    append(cache, "b", [70])
    check_tokens(cache, "a", list(range(66)))
    check_tokens(cache, "b", [*range(66), 70])


def test_one_pass_of_inference_mode_does_not_lock_the_pools():
    with torch.inference_mode():
        cache = paged(n_pages=2)
        cache.add("a")
        append(cache, "a", [1, 2])
    append(cache, "a", [3])
    cache.fork("a", "b")
    append(cache, "b", [4])
    check_tokens(cache, "b", [1, 2, 3, 4])


def snapshot(cache):
    return {x: (cache.tokens(x), table(cache, x)) for x in cache.states}, cache.free_pages


REFUSALS = {
    "pages used up": (lambda c: c.extend({"a": 1, "b": 64 * 4 + 1}), "at most 4 more pages"),
    "pages used up by copies": (lambda c: c.extend({"f": 64 * 4 - 1}), "got: 5 pages needed"),
    "unknown in extend": (lambda c: c.extend({"a": 1, "x": 1}), "got: 'x'"),
    "negative count": (lambda c: c.extend({"a": 1, "b": -1}), "request 'b'"),
    "count is bool": (lambda c: c.extend({"a": True}), "got: True"),
    "count is float": (lambda c: c.extend({"a": 1.0}), "got: 1.0"),
    "too long": (lambda c: c.extend({"b": MAX_TOKENS + 1}), "0 to 2147483647 new tokens"),
    "used id": (lambda c: c.add("a"), "already in the cache"),
    "used child": (lambda c: c.fork("a", "b"), "already in the cache"),
    "child of itself": (lambda c: c.fork("a", "a"), "already in the cache"),
    "unknown in fork": (lambda c: c.fork("x", "y"), "PagedLatentCache.fork"),
    "unknown in free": (lambda c: c.free("x"), "not in the cache"),
    "unknown in read": (lambda c: c.read(["a", "x"]), "PagedLatentCache.read"),
    "unknown in tokens": (lambda c: c.tokens("x"), "PagedLatentCache.tokens"),
    "unknown in truncate": (lambda c: c.truncate("x", 0), "PagedLatentCache.truncate"),
    "unknown in offload": (lambda c: c.offload("x"), "PagedLatentCache.offload"),
    "longer": (lambda c: c.truncate("a", 71), "0 to 70 tokens"),
    "negative length": (lambda c: c.truncate("a", -1), "0 to 70 tokens"),
    "length is bool": (lambda c: c.truncate("a", False), "got: False"),
    "beyond slack": (lambda c: c.truncate("a", 60), "BF16 rows"),
    "slots used up": (lambda c: c.add("x"), "1 of 3 slots needed"),
    "slots used up by fork": (lambda c: c.fork("a", "x"), "at most 0 more requests"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_change_nothing(case):
    call, words = REFUSALS[case]
    cache = paged(n_pages=6, n_slots=3)
    for request in "ab":
        cache.add(request)
    append(cache, "a", list(range(70)))
    cache.fork("a", "f")
    before, tensors = snapshot(cache), [x.clone() for i in (0, 1) for x in cache.pool(i)]
    with pytest.raises(CacheError) as error:
        call(cache)
    assert words in str(error.value)
    for line in ("where: PagedLatentCache", "expected: ", "got: "):
        assert f"\n  {line}" in str(error.value)
    assert snapshot(cache) == before
    for old, new in zip(tensors, (x for i in (0, 1) for x in cache.pool(i)), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    for request in "af":
        check_tokens(cache, request, list(range(70)))


def test_double_free_is_refused():
    cache = paged()
    cache.add("a")
    append(cache, "a", [1])
    cache.free("a")
    with pytest.raises(CacheError, match="not freed or offloaded"):
        cache.free("a")
    assert (cache.free_pages, len(cache.free_slots)) == (8, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_tokens": 32}, "page_tokens in 64, 128, 256"),
        ({"n_pages": 0}, "1 <= n_pages"),
        ({"n_slots": True}, "n_slots cannot be used"),
        ({"slack_tokens": -1}, "0 <= slack_tokens"),
        ({"fingerprint": ""}, "no fingerprint"),
        ({"fingerprint": None}, "no fingerprint"),
        ({"layouts": ()}, "got: 0 layers"),
        ({"layouts": (LAYOUTS[0], layout_of("c4r4", window_tokens=6))}, "one sink and window"),
    ],
)
def test_arguments_that_cannot_be_used(settings, words):
    with pytest.raises(CacheError, match=words):
        paged(**settings)


def test_helpers_agree_with_the_layout():
    assert ROWS[0].bytes.shape[1] * 64 == LAYOUTS[0].payload_bytes
    pages = LAYOUTS[1].allocate(n_pages=1).fill_(7)
    assert (token_bytes(LAYOUTS[1], pages) == 7).all()
    assert (FINGERPRINT, WINDOW > SLACK) == ("a" * 64, True)
