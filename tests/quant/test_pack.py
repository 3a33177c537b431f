"""Bit order of packed codes: golden bytes, round trips and refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmla.errors import SchemeError
from quantmla.quant.pack import pack, packed_bytes, unpack

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 0], "01"),
        (1, [0, 1, 0, 0, 1, 0, 1, 1], "d2"),
        (2, [1, 0, 0, 0], "01"),
        (2, [3, 2, 1, 0], "1b"),
        (3, [1, 0, 0, 0, 0, 0, 0, 0], "010000"),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], "e4e4f0"),
        (3, [7, 0, 0, 0, 0, 0, 0, 4], "030081"),
        (4, [1, 0], "01"),
        (4, [10, 11, 12, 13], "badc"),
        (8, [0, 127, 255], "007fff"),
    ],
)
def test_golden_bytes(bits, codes, expected):
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert bytes(packed.tolist()).hex() == expected
    assert unpack(packed, bits, len(codes)).tolist() == codes


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data(), bits=st.sampled_from((1, 2, 3, 4, 8)), units=st.integers(0, 12))
def test_round_trip_is_one_little_endian_number(data, bits, units):
    channels = 8 * units
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=channels, max_size=channels))
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    if bits == 3:
        expected = little_endian([c & 3 for c in codes], 2) + little_endian(
            [c >> 2 for c in codes], 1
        )
    else:
        expected = little_endian(codes, bits)
    assert bytes(packed.tolist()) == expected
    assert unpack(packed, bits, channels).tolist() == codes


def little_endian(codes, bits):
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_leading_dimensions_and_views(bits):
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (3, 5, 32), generator=g).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, packed_bytes(32, bits))
    assert torch.equal(unpack(packed, bits, 32), codes)
    assert torch.equal(pack(codes.transpose(0, 1), bits), packed.transpose(0, 1))
    assert torch.equal(pack(codes[:, :, 8:24], bits), pack(codes[:, :, 8:24].contiguous(), bits))
    assert pack(codes[:, :0], bits).shape == (3, 0, packed_bytes(32, bits))
    before = codes.clone()
    packed.zero_()
    assert torch.equal(codes, before)  # the result never shares memory with its input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: pack(c, 5), "no packing for this width"),
        (lambda c: pack(c, 16), "no packing for this width"),
        (lambda c: pack(c[:7], 4), "multiple of 2 channels at 4 bits"),
        (lambda c: pack(c[:12], 3), "multiple of 8 channels at 3 bits"),
        (lambda c: pack(c + 4, 2), "codes do not fit their width"),
        (lambda c: pack(c.int(), 4), "codes do not fit their width"),
        (lambda c: unpack(c, 4, 16), "packed bytes do not fit the channels"),
        (lambda c: unpack(c.float(), 8, 16), "packed bytes do not fit the channels"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(SchemeError, match=message):
        call(torch.zeros(16, dtype=torch.uint8))
