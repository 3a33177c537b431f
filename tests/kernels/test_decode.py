"""The decode kernel against its reference in float64, over poisoned pages."""

import pytest
import torch

from paged_attention import NOWHERE, Sequences, assert_close, decode_both
from quantmla.cache.latent import LatentLayer
from quantmla.errors import CacheError, KernelUnavailableError
from quantmla.kernels import attention, attention_reference
from quantmla.kernels.reference import attend

BITS = [(4, 4), (3, 4), (2, 4), (4, 8), (8, 8), (4, 16), (2, 2)]
LENGTHS = [0, 1, 63, 64, 65, 131, 132, 133, 200]


def written(lengths, **settings):
    cache = Sequences(lengths, **settings)
    cache.append(lengths)
    return cache


@pytest.mark.parametrize("bits", BITS)
def test_formats(device, bits):
    cache = written([140, 0, 197], bits=bits, device=device)
    assert_close(*decode_both(cache, 1, 3), device)


def test_lengths(device):
    cache = written(LENGTHS, rank=64, device=device)
    assert_close(*decode_both(cache, 1, 2), device)


@pytest.mark.parametrize("queries", [1, 2, 4, 8])
def test_several_queries(device, queries):
    cache = written([2, 130, 134, 196], rank=64, device=device)
    assert_close(*decode_both(cache, queries, 3), device)


@pytest.mark.parametrize("heads", [1, 5, 16, 20])
def test_heads(device, heads):
    cache = written([150, 7], rank=64, device=device)
    assert_close(*decode_both(cache, 1, heads), device)


@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (512, 64), (64, 16)])
def test_sizes(device, rank, rope):
    cache = written([170], rank=rank, rope=rope, device=device)
    assert_close(*decode_both(cache, 1, 2), device)


@pytest.mark.parametrize("page_tokens", [64, 128, 256])
def test_page_sizes_and_splits(device, page_tokens):
    cache = written([300, 133], rank=64, page_tokens=page_tokens, device=device)
    for split_tokens in (0, 64, 128):
        assert_close(*decode_both(cache, 1, 2, split_tokens=split_tokens), device)


def test_no_window_and_no_sinks(device):
    cache = written([70, 64], rank=64, sink=0, window=1, slack=0, device=device)
    assert_close(*decode_both(cache, 1, 2), device)


def test_batch_mates_do_not_change_a_bit(device):
    """With parts of a fixed size a sequence has the same result alone and beside longer ones.

    The order of a sum shows on a GPU only: the interpreter adds parts one after the other.
    """
    lengths = [330, 400, 133] if device == "cpu" else [400, 900, 133]
    cache = written(lengths, rank=64, device=device)
    q_latent, q_rope = cache.queries(3, 1, 2)
    table, lens, slots = cache.tables()
    settings = (cache.scale, *cache.formats, 64, 64)
    pool = (cache.pages, cache.rows)
    whole = attention.decode(q_latent, q_rope, *pool, table, lens, slots, *settings)
    for b, length in enumerate(lengths):
        columns = -(-length // 64)
        one = slice(b, b + 1)
        alone = attention.decode(
            q_latent[one], q_rope[one], *pool,
            table[one, :columns].contiguous(), lens[one], slots[one], *settings,
        )  # fmt: skip
        assert torch.equal(alone[0], whole[0][one])
        assert torch.equal(alone[1], whole[1][one])


def test_strided_pools_and_tables(device):
    cache = written([140, 70], rank=64, device=device)
    q = cache.queries(2, 1, 2)
    table, lens, slots = cache.tables()
    pages = torch.full((len(cache.pages), 2, cache.pages.shape[1] + 128), 255, dtype=torch.uint8)
    pages = pages.to(device)[:, 1, : cache.pages.shape[1]]
    pages.copy_(cache.pages)
    wide = torch.full((2, table.shape[1] + 3), NOWHERE, dtype=torch.int32, device=device)
    wide[:, : table.shape[1]] = table
    settings = (cache.scale, *cache.formats, 64, 64)
    plain = attention.decode(*q, cache.pages, cache.rows, table, lens, slots, *settings)
    strided = attention.decode(*q, pages, cache.rows, wide, lens, slots, *settings)
    assert torch.equal(plain[0], strided[0])


def test_the_reference_agrees_with_the_cache_of_the_transformers_engine():
    cache = Sequences([150], rank=64, slack=0)
    layer = LatentLayer(cache.layout)
    new, _ = cache.append([150])
    cache._scramble(torch.arange(150))  # back to what was written
    layer.append(new[None, :-1, :64], new[None, :-1, 64:])
    rows = layer.append(new[None, -1:, :64], new[None, -1:, 64:])
    q_latent, q_rope = cache.queries(1, 1, 2)
    want, lse, _ = attend(q_latent.transpose(1, 2), q_rope.transpose(1, 2), rows, scale=cache.scale)
    have = attention_reference.decode(
        q_latent, q_rope, cache.pages, cache.rows, *cache.tables(), cache.scale,
        *cache.formats, 64, 0, torch.float32,
    )  # fmt: skip
    assert torch.allclose(have[0].transpose(1, 2), want, atol=1e-5)
    assert torch.allclose(have[1].transpose(1, 2), lse, atol=1e-5)


@pytest.mark.parametrize(("batch", "queries", "heads"), [(0, 1, 2), (2, 0, 2), (2, 1, 0)])
def test_nothing_to_do(device, batch, queries, heads):
    cache = written([140, 70], rank=64, device=device)
    q = cache.queries(batch, queries, heads)
    tables = [x[:batch].contiguous() for x in cache.tables()]
    settings = (cache.scale, *cache.formats, 64, 0, torch.float32)
    for decode in (attention.decode, attention_reference.decode):
        out, lse = decode(*q, cache.pages, cache.rows, *tables, *settings)
        assert out.shape == (batch, queries, heads, 64)
        assert lse.shape == (batch, queries, heads)


def test_too_many_parts_are_refused():
    from quantmla.kernels.decode import MOST_PARTS, _check_parts

    _check_parts(100, 16 * 512, 64)
    with pytest.raises(CacheError, match="raise split_tokens"):
        _check_parts(MOST_PARTS + 1, 1, 64)
    with pytest.raises(CacheError, match="bytes of partial results"):
        _check_parts(2049, 128 * 16 * 512, 64)


def test_two_devices_are_refused():
    cache = written([10], rank=64)
    q, tables = cache.queries(1, 1, 2), cache.tables()
    with pytest.raises(CacheError, match="meta"):
        attention.decode(
            *q, cache.pages, cache.rows.to("meta"), *tables, cache.scale, *cache.formats
        )


def test_the_fake_knows_the_type_of_the_output():
    cache = written([10], rank=64)
    args = [x.to("meta") for x in (*cache.queries(1, 1, 2), cache.pages, cache.rows)]
    args += [x.to("meta") for x in cache.tables()]
    settings = (cache.scale, *cache.formats, 64, 0)
    assert attention.decode(*args, *settings, torch.float32)[0].dtype == torch.float32
    assert attention.decode(*args, *settings, out_dtype=torch.float32)[0].dtype == torch.float32
    assert attention.decode(*args, *settings)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [(2, 4), (3, 4)])
def test_a_latent_too_narrow_for_a_product_is_refused(bits):
    cache = Sequences([10], rank=64, bits=bits)
    args = (*cache.queries(1, 1, 2), cache.pages, cache.rows, *cache.tables())
    with pytest.raises(KernelUnavailableError, match="not a power of two from 128 to 512"):
        attention.decode(*args, cache.scale, *cache.formats)


def test_bad_arguments_are_named_together():
    cache = written([10], rank=64)
    q_latent, q_rope = cache.queries(1, 9, 2)
    tables = cache.tables()
    settings = (cache.scale, *cache.formats)
    wrong = r"rows has 139 rows.*page_tokens is 63.*split_tokens is 5"
    with pytest.raises(CacheError, match=wrong):
        attention.decode(q_latent, q_rope, cache.pages, cache.rows, *tables, *settings, 63, 5)
    with pytest.raises(CacheError, match=r"q_rope is torch\.float32"):
        attention.decode(q_latent, q_rope.float(), cache.pages, cache.rows, *tables, *settings)
    wide = torch.zeros(1, 1, 2, 96, dtype=torch.bfloat16)
    with pytest.raises(KernelUnavailableError, match="kv_lora_rank is 96"):
        attention.decode(wide, q_rope[:, :1], cache.pages, cache.rows, *tables, *settings)


def test_the_op_has_a_fake(device):
    cache = written([70], rank=64, device=device)
    args = (*cache.queries(1, 1, 2), cache.pages, cache.rows, *cache.tables())
    torch.library.opcheck(
        torch.ops.quantmla.decode.default,
        (*args, cache.scale, *cache.formats, 64, 64),
        test_utils=("test_schema", "test_faketensor"),
    )
