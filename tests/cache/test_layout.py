"""Page bytes: golden pages, streaming equals one shot, and no byte of another token is touched."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page_rows import P, R, encode, layout_of, numbers, stored
from quantmla.cache.layout import LAYOUT_VERSION, PAGE_TOKENS, PageLayout, pages_for_tokens
from quantmla.config import KVScheme
from quantmla.errors import CacheError, SchemeError
from quantmla.quant import dequantize, quantize

torch.set_num_threads(1)
LENGTHS = (0, 1, 63, 64, 65, 131, 132, 133, 260)

# Page of 70 tokens at 512+64 under layout version 2. A change here needs a new layout version.
GOLDEN_V2 = {
    "c4r4": "1380c7e04d2e042588dfd285d41a3df6c5863c4dcc70854f39fb733a6514bb97",
    "c2r4": "60ad721bb16b8e7e330dda521fa75017f30541da7f8a9e0776dd694858f86d4b",
    "c3r4": "388d387f3b4ab1fb4076392453ab71b4abe3ee015e5cd4e0d2c85797ea44cdc0",
    "c4r8": "e6dae564ac7c963b607c79195076a86d51dd1c247cdccf6fd9c0267dd23288f4",
    "c8r8": "d0bc2e3f02535d42abcf654cf0229a5a5e6ec1c7f9d9ff4efe67a227a74efa69",
    "c4r16": "d0b43574f4f2968eadf7ea66ad5f688ed8cd628d6f78a753264134035f2f9c10",
    "c16r16": "ba76261d641a5e868d3a75b8617327b059f3e608632ab97e9bd4c6b4a4748a0e",
    "c4r4 min16": "814e911c0a499b27455aa118623e20d20da685bc2ddec041ffef5dfdc06807d4",
}


def token_bytes_mask(layout, first, end, n_pages):
    """True for the bytes that belong to the tokens first..end-1."""
    mask = torch.zeros(n_pages, layout.page_bytes, dtype=torch.bool)
    for token in range(first, end):
        page, slot = divmod(token, PAGE_TOKENS)
        for plane in layout.planes:
            for entry in range(plane.entries):
                place = entry * PAGE_TOKENS + plane.place(slot)
                start = plane.offset_bytes + place * plane.entry_bytes
                mask[page, start : start + plane.entry_bytes] = True
    return mask


@pytest.mark.parametrize(
    ("name", "page_bytes", "token_bytes"),
    [
        ("c4r4", 20224, 316),
        ("c2r4", 12032, 188),
        ("c3r4", 16128, 252),
        ("c4r8", 22272, 348),
        ("c8r8", 38656, 604),
        ("c4r16", 26112, 408),
        ("c16r16", 73728, 1152),
        ("c4r4 min16", 20736, 324),
        ("c2r4 min16", 12544, 196),
    ],
)
def test_page_sizes_at_512_64(name, page_bytes, token_bytes):
    layout = layout_of(name, 512, 64)
    assert (layout.page_bytes, layout.token_bytes) == (page_bytes, token_bytes)
    assert layout.page_bytes % 128 == 0
    assert layout.page_bytes - layout.payload_bytes < 128


def test_planes_of_c4r4_as_documented():
    layout = layout_of("c4r4", 512, 64)
    assert [(p.name, p.offset_bytes, p.entry_bytes, p.entries) for p in layout.planes] == [
        ("content", 0, 256, 1),
        ("rope", 16384, 32, 1),
        ("scale", 18432, 2, 9),
        ("zero", 19584, 1, 9),
    ]
    assert [p.row_bytes for p in layout.planes] == [256, 32, 18, 9]
    assert all(type(v) is int for p in layout.planes for v in (p.offset_bytes, p.entry_bytes))
    assert (layout.content_groups, layout.rope_groups, layout.groups) == (8, 1, 9)
    assert [p.name for p in layout_of("c16r16").planes] == ["content", "rope"]
    rope_only = layout_of("c16r4")
    assert (rope_only.content_groups, rope_only.groups) == (0, 1)
    with pytest.raises(CacheError, match="no scale plane"):
        layout_of("c16r16").plane("scale")


def test_the_documented_offsets_are_the_real_ones():
    text = (Path(__file__).parents[2] / "docs" / "layout.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| c\d+r\d+ \|", line)]
    assert len(rows) == 8
    for line in rows:
        scheme, zero, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        layout = layout_of(f"{scheme} {zero}", 512, 64)
        planes = [f"{p.offset_bytes} / {p.entry_bytes}" for p in layout.planes]
        sizes = [layout.payload_bytes, layout.page_bytes, layout.token_bytes]
        assert cells == planes + [str(size) for size in sizes]


@pytest.mark.parametrize("name", GOLDEN_V2)
def test_golden_pages_of_version_2(name):
    assert LAYOUT_VERSION == 2
    layout = layout_of(name, 512, 64)
    pages = stored(layout, numbers(70, 512, 1), numbers(70, 64, 2))
    assert pages.shape == (2, layout.page_bytes)
    assert hashlib.sha256(bytes(pages.flatten().tolist())).hexdigest() == GOLDEN_V2[name]


def test_bytes_of_one_token_by_hand():
    """A page read without any code of the package: one group a path, 4 and 2 bits."""
    layout = PageLayout(8, 4, KVScheme(content_bits=4, rope_bits=2, group=8))
    latent = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 15.0]])  # scale 1, zero 0
    k_rope = torch.tensor([[-4.0, -2.0, 0.0, 2.0]])  # scale 2, zero 2
    page = stored(layout, latent, k_rope, first_token=3, fill=0xEE)[0]
    assert layout.page_bytes == 768  # 64 * (4 + 1 + 2 * 2 + 2) = 704, padded
    assert bytes(page[3 * 4 : 4 * 4].tolist()).hex() == "103254f6"
    assert bytes(page[256 + 3 : 256 + 4].tolist()).hex() == "e4"
    assert bytes(page[320 + 3 * 2 : 320 + 4 * 2].tolist()).hex() == "803f"
    assert bytes(page[320 + (64 + 3) * 2 : 320 + (64 + 4) * 2].tolist()).hex() == "0040"
    assert page[576 + 2 * 3] == 0
    assert page[576 + 64 + 2 * 3] == 2
    assert int((page != 0xEE).sum()) == 4 + 1 + 4 + 2


def test_bytes_of_one_token_at_3_bits_by_hand():
    layout = PageLayout(16, 8, KVScheme(content_bits=3, rope_bits=16, group=16))
    latent = torch.tensor([[float(i % 8) for i in range(16)]])  # scale 1, zero 0
    page = stored(layout, latent, torch.zeros(1, 8), first_token=1, fill=0xEE)[0]
    assert bytes(page[6:10].tolist()).hex() == "e4e4e4e4"  # low two bits of 16 channels
    assert bytes(page[10:12].tolist()).hex() == "f0f0"  # their high bits


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["c4r4", "c3r4", "c2r4 min16", "c4r16", "c16r16"])
def test_streaming_equals_one_shot_and_reads_back(name, length):
    layout = layout_of(name)
    latent, k_rope = numbers(length, R, 3), numbers(length, P, 4)
    n_pages = pages_for_tokens(length) + 1
    whole = stored(layout, latent, k_rope, n_pages=n_pages, fill=0xA5)
    for steps in ([1] * length, [7, 60, 66, 1, 64, 200]):
        pages = layout.allocate(n_pages=n_pages).fill_(0xA5)
        done = 0
        for step in steps:
            part = slice(done, min(length, done + step))
            layout.store(pages, done, *encode(layout, latent[part], k_rope[part]))
            done = part.stop
        assert done == length
        assert torch.equal(pages, whole)
    content, rope = encode(layout, latent, k_rope)
    expected = [
        q.bfloat16()
        if torch.is_tensor(q)
        else dequantize(q, group=layout.scheme.group, zero=layout.scheme.zero)
        for q in (content, rope)
    ]
    loaded = layout.load(whole, 0, length)
    assert [x.dtype for x in loaded] == [torch.bfloat16, torch.bfloat16]
    assert torch.equal(loaded[0], expected[0])
    assert torch.equal(loaded[1], expected[1])


@pytest.mark.parametrize("first", [0, 1, 5, 63, 64, 100])
@pytest.mark.parametrize("length", LENGTHS)
def test_no_byte_of_another_token_or_of_the_padding_changes(first, length):
    layout = layout_of("c4r4", 96, 16)  # short last group, padded page
    assert layout.payload_bytes < layout.page_bytes
    latent, k_rope = numbers(length, 96, 5), numbers(length, 16, 6)
    n_pages = pages_for_tokens(first + length) + 1
    pages = [
        stored(layout, latent, k_rope, first, n_pages=n_pages, fill=fill) for fill in (0xFF, 0x00)
    ]
    written = token_bytes_mask(layout, first, first + length, n_pages)
    assert torch.equal(pages[0] == 0xFF, ~written | (pages[0] == 0xFF))
    assert (pages[0][~written] == 0xFF).all()
    assert (pages[1][~written] == 0x00).all()
    assert torch.equal(pages[0][written], pages[1][written])
    # poison (0xFFFF is a bf16 NaN scale) in every other byte does not reach what is read
    for a, b in zip(
        layout.load(pages[0], first, first + length),
        layout.load(pages[1], first, first + length),
        strict=True,
    ):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("start", [0, 3, 64, 70])
def test_any_range_reads_the_same_rows(start):
    layout = layout_of("c4r4")
    pages = stored(layout, numbers(260, R, 7), numbers(260, P, 8))
    whole = layout.load(pages, 0, 260)
    for length in (0, 1, 58, 61, 64, 128, 190):
        part = layout.load(pages, start, start + length)
        assert torch.equal(part[0], whole[0][start : start + length])
        assert torch.equal(part[1], whole[1][start : start + length])


@settings(deadline=None, max_examples=20, derandomize=True)
@given(data=st.data(), name=st.sampled_from(["c4r4", "c3r2", "c1r8", "c16r4", "c8r16 min16"]))
def test_overwriting_runs_keeps_the_last_writer(data, name):
    layout = layout_of(name, 40, 16)
    latent, k_rope = numbers(200, 40, 9), numbers(200, 16, 10)
    expected = stored(layout, latent, k_rope, n_pages=4)
    pages = stored(layout, latent + 1, k_rope - 1, n_pages=4)
    done = 0
    while done < 200:
        end = data.draw(st.integers(done + 1, 200))
        begin = data.draw(st.integers(0, done))
        part = slice(begin, end)
        layout.store(pages, begin, *encode(layout, latent[part], k_rope[part]))
        done = end
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("name", ["c4r4", "c4r16", "c2r4 min16"])
def test_leading_dimensions_and_strided_pages(name):
    layout = layout_of(name)
    latent = numbers(2 * 3 * 130, R, 11).reshape(2, 3, 130, R)
    k_rope = numbers(2 * 3 * 130, P, 12).reshape(2, 3, 130, P)
    pages = stored(layout, latent, k_rope, first_token=10)
    back = layout.load(pages, 10, 140)
    for b in range(2):
        for i in range(3):
            alone = stored(layout, latent[b, i], k_rope[b, i], first_token=10)
            assert torch.equal(pages[b, i], alone)
            assert torch.equal(layout.load(alone, 10, 140)[0], back[0][b, i])
    # pages of several layers interleaved in one pool with guard bytes between them
    pool = torch.full((2, 3, 3, 4, layout.page_bytes + 64), 0x5A, dtype=torch.uint8)
    view = pool[:, :, :, 1, 32:-32]
    view.zero_()
    layout.store(view, 10, *encode(layout, latent, k_rope))
    assert torch.equal(view, pages)
    assert torch.equal(layout.load(view, 10, 140)[1], back[1])
    view.fill_(0x5A)
    assert (pool == 0x5A).all()


@pytest.mark.parametrize(
    ("rank", "rope"), [(128, 16), (192, 32), (256, 64), (448, 128), (512, 64), (96, 24), (8, 8)]
)
@pytest.mark.parametrize("name", ["c4r4", "c3r3", "c2r2", "c1r1", "c8r8"])
def test_other_ranks_and_short_groups(name, rank, rope):
    layout = layout_of(name, rank, rope)
    latent, k_rope = numbers(66, rank, 13), numbers(66, rope, 14)
    loaded = layout.load(stored(layout, latent, k_rope), 0, 66)
    for got, x, bits in ((loaded[0], latent, name[1]), (loaded[1], k_rope, name[3])):
        assert torch.equal(got, dequantize(quantize(x, int(bits))))


def test_offsets_beyond_32_bits_are_plain_integers():
    layout = layout_of("c4r4", 512, 64)
    token = 2**31
    page, slot = divmod(token, PAGE_TOKENS)
    address = page * layout.page_bytes + layout.plane("zero").offset_bytes + slot * 9
    assert address == 2**31 // 64 * 20224 + 19584
    assert pages_for_tokens(token) == 2**25
    assert pages_for_tokens(token + 1) == 2**25 + 1


def bad_calls():
    layout = layout_of("c4r4")
    mixed = layout_of("c4r16")
    latent, k_rope = numbers(8, R, 1), numbers(8, P, 2)
    content, rope = encode(layout, latent, k_rope)
    other_zero = quantize(k_rope, 4, zero="min16")
    pages = layout.allocate(n_pages=1)
    batch = layout.allocate(2, n_pages=1)
    narrow, short = quantize(latent[:, :64], 4), quantize(k_rope[:3], 4)
    other_group = quantize(latent, 4, group=32)
    bf16_rope = mixed.allocate(n_pages=1)
    return {
        "tokens outside": lambda: layout.store(pages, 57, content, rope),
        "end before start": lambda: layout.load(pages, 5, 4),
        "negative start": lambda: layout.load(pages, -1, 4),
        "pages of another layout": lambda: mixed.load(pages, 0, 1),
        "pages not bytes": lambda: layout.load(pages.float(), 0, 1),
        "content not quantized": lambda: layout.store(pages, 0, latent, rope),
        "zero mode": lambda: layout.store(pages, 0, content, other_zero),
        "rope quantized": lambda: mixed.store(bf16_rope, 0, content, rope),
        "rope integer": lambda: mixed.store(bf16_rope, 0, content, k_rope.int()),
        "content narrow": lambda: layout.store(pages, 0, narrow, rope),
        "group size": lambda: layout.store(pages, 0, other_group, rope),
        "rope short": lambda: layout.store(pages, 0, content, short),
        "batch": lambda: layout.store(batch, 0, content, rope),
    }


MESSAGES = {
    "tokens outside": r"expected: 0 <= start <= end <= 64 \(1 pages\)\n  got: 57..65",
    "end before start": r"got: 5..4",
    "negative start": r"got: -1..4",
    "pages of another layout": r"not pages of this layout",
    "pages not bytes": r"expected: uint8",
    "content not quantized": r"content rows.*\n.*\n  expected: Quantized",
    "zero mode": r"expected: .*torch.uint8 zeros \(zp8\)",
    "rope quantized": r"rope rows.*\n.*\n  expected: floating tensor \[8, 32\]",
    "rope integer": r"got: tensor \[8, 32\] torch.int32",
    "content narrow": r"expected: Quantized \[8, 128\] with 2 ",
    "group size": r"got: Quantized \[8, 128\] with 4 ",
    "rope short": r"rope rows.*\n.*\n  expected: Quantized \[8, 32\]",
    "batch": r"expected: Quantized \[2, 8, 128\]",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_calls_are_named(case):
    with pytest.raises(CacheError, match=MESSAGES[case]):
        bad_calls()[case]()


def test_a_failed_store_leaves_the_pages_alone():
    layout = layout_of("c4r4")
    pages = layout.allocate(n_pages=1)
    with pytest.raises(CacheError):
        layout.store(pages, 0, quantize(numbers(8, R, 1), 4), quantize(numbers(8, 64, 2), 4))
    assert int(pages.max()) == 0


def test_sizes_that_do_not_pack_are_refused():
    with pytest.raises(SchemeError, match="multiple of 8 channels at 3 bits"):
        layout_of("c3r4", 500, 64)
    with pytest.raises(SchemeError, match="at least one channel"):
        layout_of("c4r4", 512, 0)
