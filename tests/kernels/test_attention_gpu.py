"""What only a GPU can show: every shape in BF16 products, launches, graphs, and no BF16 history."""

import pytest
import torch

from paged_attention import Sequences, assert_close, decode_both, prefill_both
from quantmla.kernels import attention, ops

pytestmark = pytest.mark.gpu
HEADS = [1, 4, 5, 8, 10, 12, 16, 20, 32, 64, 128]
LENGTHS = [0, 1, 63, 64, 65, 131, 132, 133, 1000]


def written(lengths, **settings):
    cache = Sequences(lengths, device="cuda", **settings)
    cache.append(lengths)
    return cache


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32), (512, 32), (256, 64)])
def test_every_head_count(rank, rope):
    cache = written((LENGTHS * 4)[:33], rank=rank, rope=rope)
    for number, heads in enumerate(HEADS):
        assert_close(*decode_both(cache, (1, 2, 4)[number % 3], heads), "cuda")
    for queries in (1, 2, 4, 8):
        assert_close(*decode_both(cache, queries, 16), "cuda")


@pytest.mark.parametrize("lengths", [[65537], [8007, 1000, 65537], [8007] * 8])
def test_long_sequences(lengths):
    cache = written(lengths, rank=512, rope=64)
    for queries, heads in ((1, 16), (4, 16), (1, 128)):
        assert_close(*decode_both(cache, queries, heads), "cuda")


@pytest.mark.parametrize("bits", [(3, 4), (2, 4), (4, 8), (8, 8), (4, 16)])
def test_other_formats(bits):
    cache = written([3000, 200, 0], rank=512, rope=64, bits=bits)
    for heads in (16, 64):
        assert_close(*decode_both(cache, 1, heads), "cuda")


def test_prefill_of_a_long_prompt():
    cache = Sequences([3000, 500], rank=512, rope=64, device="cuda")
    assert_close(*prefill_both(cache, [2000, 500], 16), "cuda")
    assert_close(*prefill_both(cache, [1000, 0], 16, seed=5), "cuda")


def arguments(cache, heads, queries=1):
    q = cache.queries(len(cache.requests), queries, heads)
    return (*q, cache.pages, cache.rows, *cache.tables(), cache.scale, *cache.formats)


def test_two_launches_and_one_for_the_writer():
    cache = written([1000, 70], rank=512, rope=64)
    args = arguments(cache, 16)
    attention.decode(*args)  # compiles
    torch.cuda.synchronize()
    assert launches(lambda: attention.decode(*args)) == ["decode_parts", "merge_parts"]
    plan = cache.cache.extend({0: 1, 1: 1})
    new = torch.randn(2, 576, device="cuda").bfloat16()
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    write = (plan.slot_mapping, plan.positions, plan.row_slots, plan.seq_ends, count, None, None)
    tokens = (new[:, :512], new[:, 512:], cache.pages, cache.rows, *write, 4, 4, cache.sink)
    ops.write(*tokens)
    assert launches(lambda: ops.write(*tokens)) == ["write_kernel"]


def launches(call):
    """Names of the kernels that a call launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.events()
    return sorted(e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA)


def test_a_graph_follows_lengths_that_change():
    cache = written([300, 700], rank=512, rope=64)
    args = list(arguments(cache, 16))
    lens = args[5].clone()
    args[5] = lens
    attention.decode(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention.decode(*args)
    for lengths in ([300, 700], [299, 640], [150, 0]):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        want = attention.decode(*args)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])


def test_no_history_is_expanded():
    """A step takes memory for its parts, not for its context."""
    cache = written([65536], rank=512, rope=64)
    args = arguments(cache, 16)
    attention.decode(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.decode(*args)
    torch.cuda.synchronize()
    taken_bytes = torch.cuda.max_memory_allocated() - before
    assert taken_bytes < 65536 * 1152 / 4
