"""Why page bytes stand in this order: what version 2 changed, and what a tensor core reads."""

import hashlib

import pytest
import torch

from page_rows import layout_of, numbers, stored
from quantmla.quant import quantize

# Pages of 70 tokens at 512+64 as layout version 1 wrote them (tests/cache/test_layout.py has 2).
GOLDEN_V1 = {
    "c4r4": "5ae013a2adfb804137b0cd83c4d95770526c599c735d2837718a7091805faf90",
    "c2r4": "335b984dbb4f7fde0f8366c421099da86e144f0d7b1f54c029fe5ef33f3b738a",
    "c3r4": "348642aa885dfbb99f0b0203e9843c1063d077176c0b8998fd6a4daa43d1d1a2",
    "c4r8": "37bf9409ef4414902d6db88c66f876de5c97c81bb704d142b197e57297182cc5",
    "c8r8": "e54e53e5b88ea1f10f247ca2ce7542fe1a47238b2b8177f074287fdbefb4528c",
    "c4r16": "0d59e7af4159129a68f04515c114a3343417287ec9e9d3dbf2da62856c57340b",
    "c16r16": "ba76261d641a5e868d3a75b8617327b059f3e608632ab97e9bd4c6b4a4748a0e",
    "c4r4 min16": "c31294d38fb7d484fc014843ff8e4b7a9b4d180edafe82d8c5f93d1fda9340be",
}


def as_version_1(layout, page):
    """Rearrange one page in plain Python: token-major scales, 3-bit units of 3 bytes."""
    old = bytearray(page)
    for plane in layout.planes:
        for slot in range(64):
            row = b"".join(
                page[at : at + plane.entry_bytes]
                for entry in range(plane.entries)
                for place in (entry * 64 + plane.place(slot),)
                for at in (plane.offset_bytes + place * plane.entry_bytes,)
            )
            bits = {"content": layout.scheme.content_bits, "rope": layout.scheme.rope_bits}
            if bits.get(plane.name) == 3:
                row = units_of_3_bytes(row)
            at = plane.offset_bytes + slot * plane.row_bytes
            old[at : at + plane.row_bytes] = row
    return bytes(old)


def units_of_3_bytes(row):
    cut = len(row) // 3 * 2
    low, high = int.from_bytes(row[:cut], "little"), int.from_bytes(row[cut:], "little")
    codes = [low >> 2 * i & 3 | (high >> i & 1) << 2 for i in range(8 * (len(row) - cut))]
    return sum(code << 3 * i for i, code in enumerate(codes)).to_bytes(len(row), "little")


@pytest.mark.parametrize("name", GOLDEN_V1)
def test_version_2_is_version_1_in_another_order(name):
    layout = layout_of(name, 512, 64)
    pages = stored(layout, numbers(70, 512, 1), numbers(70, 64, 2))
    old = b"".join(as_version_1(layout, bytes(page.tolist())) for page in pages)
    assert hashlib.sha256(old).hexdigest() == GOLDEN_V1[name]


def ldmatrix(words, transposed):
    """Registers of 32 lanes after ldmatrix of one 8 x 8 matrix of 16-bit words (PTX ISA)."""
    at = (lambda row, column: words[column][row]) if transposed else lambda r, c: words[r][c]
    return [at(i // 4, i % 4 * 2) | at(i // 4, i % 4 * 2 + 1) << 16 for i in range(32)]


def halves(register):
    return register & 0xFFFF, register >> 16


@pytest.mark.parametrize("bits", [2, 4])
def test_words_of_16_bits_are_the_fragment_order(bits):
    """One mask on a register gives both halves of a B operand of mma.m16n8k16, in either product.

    Lane i of the first 8 of 16 k holds B[k][n] for k = 2 (i % 4) and the next one, n = i / 4.
    """
    per_word, mask = 16 // bits, 2**bits - 1
    layout = layout_of(f"c{bits}r{bits}", 512, 64)
    latent = numbers(64, 512, 3)
    codes = quantize(latent, bits).codes.tolist()  # [64 tokens][512 channels]
    page = bytes(stored(layout, latent, numbers(64, 64, 4))[0].tolist())
    content = layout.plane("content")
    rows = [page[t * content.row_bytes : (t + 1) * content.row_bytes] for t in range(64)]
    words = torch.tensor(
        [[int.from_bytes(r[i : i + 2], "little") for i in range(0, len(r), 2)] for r in rows]
    )
    for token, word in ((0, 0), (8, 8), (56, content.row_bytes // 2 - 8)):
        matrix = words[token : token + 8, word : word + 8].tolist()
        for field in range(per_word):
            for lane, register in enumerate(ldmatrix(matrix, transposed=False)):
                # q.k: n is the token, k the word, so that k-th channel is per_word * k + field
                both = register >> bits * field & (mask | mask << 16)
                k, n = lane % 4 * 2, lane // 4
                channels = [per_word * (word + k + j) + field for j in (0, 1)]
                assert halves(both) == tuple(codes[token + n][c] for c in channels)
            for lane, register in enumerate(ldmatrix(matrix, transposed=True)):
                # p.v: k is the token, n the word
                both = register >> bits * field & (mask | mask << 16)
                k, n = lane % 4 * 2, lane // 4
                channel = per_word * (word + n) + field
                assert halves(both) == tuple(codes[token + k + j][channel] for j in (0, 1))


def test_high_bits_of_3_bit_codes_line_up_with_two_words_of_low_bits():
    layout = layout_of("c3r4", 512, 64)
    latent = numbers(1, 512, 5)
    codes = quantize(latent, 3).codes[0].tolist()
    row = bytes(stored(layout, latent, numbers(1, 64, 6))[0, : layout.planes[0].row_bytes].tolist())
    words = [int.from_bytes(row[i : i + 2], "little") for i in range(0, len(row), 2)]
    low, high = words[:64], words[64:]
    for channel, code in enumerate(codes):
        two = low[channel // 8] >> 2 * (channel % 8) & 3
        one = high[channel // 16] >> channel % 16 & 1
        assert code == two | one << 2
