"""The prefill kernel against its reference in float64: strict mode, any chunks."""

import pytest
import torch

from paged_attention import Sequences, assert_close, decode_both, prefill_both
from quantmla.errors import CacheError
from quantmla.kernels import attention

BITS = [(4, 4), (3, 4), (2, 4), (4, 8), (8, 8), (4, 16)]


@pytest.mark.parametrize("bits", BITS)
def test_formats(device, bits):
    cache = Sequences([150], bits=bits, device=device)
    assert_close(*prefill_both(cache, [150], 2), device)


def test_chunks_of_several_sequences(device):
    """Chunks that begin inside the sinks, inside the window, and where keys leave it."""
    cache = Sequences([210, 140, 9], rank=64, device=device)
    for seed, counts in enumerate(([2, 1, 0], [129, 3, 1], [4, 130, 8], [66, 1, 0])):
        assert_close(*prefill_both(cache, counts, 3, seed=10 * seed), device)
    assert_close(*decode_both(cache, 1, 3), device)


@pytest.mark.parametrize(("rank", "rope", "heads"), [(512, 64, 1), (256, 32, 5), (64, 16, 20)])
def test_sizes(device, rank, rope, heads):
    cache = Sequences([140], rank=rank, rope=rope, device=device)
    assert_close(*prefill_both(cache, [140], heads), device)


@pytest.mark.parametrize("page_tokens", [128, 256])
def test_page_sizes(device, page_tokens):
    cache = Sequences([300], rank=64, page_tokens=page_tokens, device=device)
    assert_close(*prefill_both(cache, [150], 2), device)
    assert_close(*prefill_both(cache, [150], 2, seed=5), device)


def test_rows_of_no_sequence_are_zero(device):
    cache = Sequences([5], rank=64, device=device)
    new, before = cache.append([5])
    padded = torch.full((8, 96), float("nan"), dtype=torch.bfloat16, device=device)
    padded[:5] = new
    q = cache.queries(8, 2)
    bounds = torch.tensor([0, 5], dtype=torch.int32, device=device)
    out, lse = attention.prefill(
        *q, padded, cache.pages, before, *cache.tables(), bounds, cache.scale, *cache.formats, 5
    )
    assert out[:5].isfinite().all()
    assert not out[5:].any()
    assert (lse[5:] == float("-inf")).all()


def test_bad_arguments_are_named_together():
    cache = Sequences([5], rank=64)
    new, before = cache.append([5])
    q = cache.queries(5, 2)
    bounds = torch.tensor([0, 5], dtype=torch.int64)
    with pytest.raises(CacheError, match=r"starts is torch.int64.*most_tokens is 6"):
        attention.prefill(
            *q, new, cache.pages, before, *cache.tables(), bounds, cache.scale, *cache.formats, 6
        )


def test_the_op_has_a_fake(device):
    cache = Sequences([5], rank=64, device=device)
    new, before = cache.append([5])
    bounds = torch.tensor([0, 5], dtype=torch.int32, device=device)
    args = (*cache.queries(5, 2), new, cache.pages, before, *cache.tables(), bounds)
    torch.library.opcheck(
        torch.ops.quantmla.prefill.default,
        (*args, cache.scale, *cache.formats, 5),
        test_utils=("test_schema", "test_faketensor"),
    )
