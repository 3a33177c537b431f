"""The gather kernel against its reference, and the reference against the layout."""

import pytest
import torch

from paged import PAGE, random_tokens, same_bits
from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme
from quantmla.kernels import ops, paged_reference
from quantmla.kernels.support import page_layout

NOWHERE = 2**31 - 1


def random_pages(blobs, rank, rope, bits):
    """Pages whose every token is written, from tokens in shuffled places."""
    tokens = random_tokens(blobs * PAGE, rank=rank, rope=rope, bits=bits, blobs=blobs)
    paged_reference.write(*tokens.args())
    return tokens.pages


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def check(device, pages, table, starts, ends, n_tokens, page_tokens, *sizes):
    """Gather with the kernel and with the reference; return the rows of the reference."""
    want = paged_reference.gather(pages, table, starts, ends, n_tokens, page_tokens, *sizes)
    stride = pages.stride()
    there = torch.empty(
        pages.untyped_storage().nbytes() - pages.storage_offset(), dtype=torch.uint8, device=device
    )
    there = there.as_strided(pages.shape, stride).copy_(pages)
    moved = (x.to(device) for x in (table, starts, ends))
    have = ops.gather(there, *moved, n_tokens, page_tokens, *sizes)
    assert same_bits(have.cpu(), want)
    return want


@pytest.mark.parametrize("rope_bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("content_bits", [2, 3, 4, 8, 16])
def test_every_pair_of_bits(device, content_bits, rope_bits):
    bits = content_bits, rope_bits
    pages = random_pages(2, 128, 32, bits)
    check(device, pages, ints([1, 0]), ints(50), ints(80), 32, 64, 128, 32, *bits)


@pytest.mark.parametrize("rope", [32, 64])
@pytest.mark.parametrize("rank", [256, 512, 96])
def test_sizes(device, rank, rope):
    pages = random_pages(2, rank, rope, (4, 4))
    table = ints([0, 1], [1, 0])
    check(device, pages, table, ints(0, 60), ints(33, 70), 34, 64, rank, rope, 4, 4)


@pytest.mark.parametrize("page_tokens", [64, 128, 256])
def test_pages_of_any_size(device, page_tokens):
    per_page = page_tokens // PAGE
    pages = random_pages(2 * per_page, 64, 32, (4, 4))
    starts, ends = ints(0, page_tokens - 3), ints(5, page_tokens + 4)
    table = ints([1, 0, NOWHERE], [0, 1, -5])
    rows = check(device, pages, table, starts, ends, 8, page_tokens, 64, 32, 4, 4)
    layout = page_layout(64, 32, 4, 4)
    latent, k_rope = layout.load(pages, 0, 2 * page_tokens)
    both = torch.cat([latent, k_rope], -1)
    assert same_bits(rows[0, :5], both[page_tokens : page_tokens + 5])
    assert same_bits(rows[1, :7], both[page_tokens - 3 : page_tokens + 4])


def test_what_is_not_asked_for_is_not_read(device):
    pages = random_pages(4, 128, 32, (4, 16))
    pages[2:] = 0xFF  # NaN
    table = ints([0, 2, NOWHERE], [1, -1, NOWHERE], [NOWHERE, 3, 3], [NOWHERE, -1, -1])
    rows = check(device, pages, table, ints(0, 0, 0, 9), ints(64, 1, 0, 3), 70, 64, 128, 32, 4, 16)
    assert rows.isfinite().all()
    assert not rows[0, 64:].any()
    assert not rows[1:, 1:].any()
    assert not rows[2:].any()


def test_pages_that_are_not_in_the_pool_read_as_zero(device):
    pages = random_pages(2, 64, 32, (4, 4))
    table = ints([0, NOWHERE], [-1, 1], [0, 2])
    ends = ints(200, 200, 65)  # the first two end behind their table
    rows = check(device, pages, table, ints(60, 60, 60), ends, 72, 64, 64, 32, 4, 4)
    assert not rows[0, 4:].any()
    assert not rows[1, :4].any()
    assert rows[1, 4:68].any()
    assert not rows[1, 68:].any()


@pytest.mark.parametrize(("batch", "n_tokens"), [(0, 5), (2, 0)])
def test_nothing(device, batch, n_tokens):
    pages = random_pages(1, 64, 32, (4, 4))
    table, zeros = torch.zeros(batch, 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    rows = check(device, pages, table, zeros, zeros, n_tokens, 64, 64, 32, 4, 4)
    assert rows.shape == (batch, n_tokens, 96)


def test_strided_pools_and_tables(device):
    pages = random_pages(2, 64, 32, (3, 4))
    pool = torch.full((4, pages.shape[1] + 128), 0xFF, dtype=torch.uint8)
    strided = pool[1::2, : pages.shape[1]]
    strided.copy_(pages)
    table = torch.full((2, 5), NOWHERE, dtype=torch.int32)
    table[:, :2] = ints([1, 0], [0, 1])
    args = ints(0, 30), ints(70, 64), 70, 64, 64, 32, 3, 4
    rows = check(device, strided, table[:, :2], *args)
    assert same_bits(rows, check(device, pages, table[:, :2].clone(), *args))


def test_addresses_pass_2_gib(device):
    pages = random_pages(2, 64, 32, (4, 4))
    far = 1 << 31
    pool = torch.empty(far + pages.shape[1], dtype=torch.uint8, device=device)
    pool = pool.as_strided(pages.shape, (far, 1)).copy_(pages)
    args = ints([1]), ints(3), ints(9)
    rows = ops.gather(pool, *(x.to(device) for x in args), 8, 64, 64, 32, 4, 4)
    assert same_bits(rows.cpu(), check(device, pages, *args, 8, 64, 64, 32, 4, 4))


@pytest.mark.parametrize("name", ["c4r4", "c3r8", "c2r16", "c16r4", "c16r16"])
def test_rows_are_those_of_the_layout(name):
    layout = PageLayout(128, 32, KVScheme.parse(name))
    bits = layout.scheme.content_bits, layout.scheme.rope_bits
    pages = random_pages(2, 128, 32, bits)
    rows = paged_reference.gather(pages, ints([0, 1]), ints(10), ints(100), 90, 64, 128, 32, *bits)
    assert same_bits(rows[0], torch.cat(layout.load(pages, 10, 100), -1))
