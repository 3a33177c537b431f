"""Byte tables of the study and of our pages, all computed from a scheme and dimensions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmla.cache.accounting import (
    OTHER_FORMATS,
    TokenFormat,
    model_bytes_per_token,
    other_formats,
    resident,
    scheme_table,
    study_resident,
)
from quantmla.cache.layout import PageLayout, pages_for_tokens
from quantmla.config import BITS, KVScheme
from quantmla.dims import MLADims
from quantmla.errors import SchemeError

SIZES = (512, 64)


def dims_of(num_cache_layers, num_heads=16):
    return MLADims(2048, num_cache_layers, num_heads, *SIZES, 128, 128, None, 1e-6)


def layout_of(name, **fields):
    return PageLayout(*SIZES, KVScheme.parse(name, **fields))


@pytest.mark.parametrize(
    ("name", "zero", "codes", "meta", "logical", "record", "ratio"),
    [
        ("c4r4", "min16", 288, 36, 324, 384, 3.556),
        ("c4r4", "zp8", 288, 27, 315, 320, 3.657),
        ("c2r4", "zp8", 160, 27, 187, 192, 6.160),
        ("c3r4", "zp8", 224, 27, 251, 256, 4.590),
        ("c4r8", "zp8", 320, 27, 347, 384, 3.320),
        ("c4r16", "zp8", 384, 24, 408, 448, 2.824),
        ("c16r16", "zp8", 1152, 0, 1152, 1152, 1.0),
    ],
)
def test_bytes_of_a_scheme(name, zero, codes, meta, logical, record, ratio):
    form = TokenFormat.from_scheme(KVScheme.parse(name, zero=zero))
    assert form.code_bytes(*SIZES) == codes
    assert form.metadata_bytes(*SIZES) == meta
    assert form.logical_bytes(*SIZES) == logical
    assert form.record_bytes(*SIZES) == record
    assert 1152 / logical == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "codes", "meta", "logical", "ratio"),
    [
        ("bf16", 1152, 0, 1152, 1.0),
        ("fp8 flat", 576, 0, 576, 2.0),
        ("fp8 tile128, rope bf16", 640, 16, 656, 1.756),
        ("nvfp4", 288, 36, 324, 3.556),
        ("mxfp4", 288, 18, 306, 3.765),
        ("nvfp4, rope bf16", 384, 32, 416, 2.769),
    ],
)
def test_bytes_of_other_formats(name, codes, meta, logical, ratio):
    form = OTHER_FORMATS[name]
    assert form.code_bytes(*SIZES) == codes
    assert form.metadata_bytes(*SIZES) == meta
    assert form.logical_bytes(*SIZES) == logical
    assert 1152 / logical == pytest.approx(ratio, abs=5e-4)


def test_record_padding():
    c4r16 = TokenFormat.from_scheme(KVScheme.parse("c4r16"))
    assert c4r16.record_bytes(*SIZES, align_bytes=32) == 416
    assert OTHER_FORMATS["mxfp4"].record_bytes(*SIZES) == 320


@pytest.mark.parametrize(
    ("name", "tokens", "ratio"),
    [
        ("c4r4", 4096, 3.2240),
        ("c4r4", 131072, 3.5863),
        ("c2r4", 4096, 5.02),
        ("c2r4", 32768, 5.86),
        ("c2r4", 131072, 5.96),
    ],
)
def test_resident_memory_as_the_study_counts_it(name, tokens, ratio):
    got = study_resident(dims_of(27), KVScheme.parse(name), tokens)
    assert got.ratio == pytest.approx(ratio, abs=5e-3 if name == "c2r4" else 5e-5)
    assert got.bf16_rows_bytes == 132 * 1152
    assert got.map_bytes == tokens // 64 * 4 + 132 * 4


def test_published_ratios():
    c4r4 = KVScheme.parse("c4r4")
    assert round(study_resident(dims_of(27), c4r4, 4096).ratio, 2) == 3.22
    assert round(study_resident(dims_of(27), c4r4, 131072).ratio, 2) == 3.59
    assert study_resident(dims_of(27), c4r4, 4096).total_bytes == 1_463_568
    assert study_resident(dims_of(27), c4r4, 131072).total_bytes == 42_103_824


@pytest.mark.parametrize(
    ("name", "tokens", "total"),
    [
        ("c4r4", 4096, 64 * 20224 + 132 * 1152 + 4 * (64 + 132)),
        ("c4r4", 131072, 2048 * 20224 + 132 * 1152 + 4 * (2048 + 132)),
        ("c2r4", 100, 2 * 12032 + 100 * 1152 + 4 * (2 + 132)),
        ("c4r4", 0, 4 * 132),
    ],
)
def test_resident_memory_of_our_pages(name, tokens, total):
    assert resident(layout_of(name), tokens).total_bytes == total


def test_our_pages_keep_less_than_the_study():
    for name in ("c4r4", "c2r4"):
        for tokens in (4096, 32768, 131072):
            study = study_resident(dims_of(27), KVScheme.parse(name), tokens)
            assert resident(layout_of(name), tokens).ratio > study.ratio


def test_slack_adds_bf16_rows():
    layout = layout_of("c4r4")
    more = resident(layout, 4096, slack_tokens=6).total_bytes - resident(layout, 4096).total_bytes
    assert more == 6 * (1152 + 4)
    assert resident(layout, 0).ratio == 1.0


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    content=st.sampled_from(BITS),
    rope=st.sampled_from(BITS),
    zero=st.sampled_from(["zp8", "min16"]),
    rank=st.integers(1, 80).map(lambda n: 8 * n),
    rope_dim=st.integers(1, 16).map(lambda n: 8 * n),
    group=st.integers(1, 16).map(lambda n: 8 * n),
    tokens=st.integers(0, 1000),
)
def test_pages_hold_the_logical_bytes_and_little_else(
    content, rope, zero, rank, rope_dim, group, tokens
):
    scheme = KVScheme(content_bits=content, rope_bits=rope, zero=zero, group=group)
    layout = PageLayout(rank, rope_dim, scheme)
    logical = TokenFormat.from_scheme(scheme).logical_bytes(rank, rope_dim)
    assert layout.payload_bytes == 64 * logical
    assert 0 <= layout.token_bytes - logical <= 2
    kept, all_bf16 = resident(layout, tokens), content == rope == 16
    assert kept.packed_bytes == (0 if all_bf16 else pages_for_tokens(tokens) * layout.page_bytes)
    rows = tokens if all_bf16 else min(tokens, 132)
    assert kept.bf16_rows_bytes == rows * 2 * (rank + rope_dim)
    assert layout.allocate(n_pages=1).numel() == layout.page_bytes


@pytest.mark.parametrize(
    ("dims", "elements"),
    [
        (dims_of(27), 15_552),  # DeepSeek-V2-Lite, Moonlight
        (dims_of(47, 20), 27_072),  # GLM-4.7-Flash
        (dims_of(60, 128), 34_560),  # DeepSeek-V2
        (dims_of(61, 128), 35_136),  # DeepSeek-V3, Kimi-K2
    ],
)
def test_elements_of_mla_models(dims, elements):
    assert model_bytes_per_token(dims) == 2 * elements
    c16r16 = KVScheme.parse("c16r16")
    assert model_bytes_per_token(dims, c16r16) == 2 * elements
    assert model_bytes_per_token(dims, KVScheme.parse("c4r4")) == dims.num_cache_layers * 316


def test_scheme_table_is_plain_json_with_whole_bytes():
    schemes = [KVScheme.parse("c4r4"), KVScheme.parse("c2r4", zero="min16")]
    first, second = scheme_table(dims_of(27), schemes, contexts_tokens=(4096,))
    assert first["scheme"] == "c4r4"
    assert first["logical_bytes"] == 315
    assert first["bytes_per_token"] == 316
    assert first["model_bytes_per_token"] == 27 * 316
    assert first["ratio"] == pytest.approx(1152 / 316)
    assert first["resident_ratio"]["4096"] == pytest.approx(3.2605, abs=5e-5)
    assert second["bytes_per_token"] == 196
    assert first["record_bytes"] == 320
    assert round(first["study_ratio"]["4096"], 2) == 3.22
    counts = ("logical_bytes", "bytes_per_token", "page_bytes", "model_bytes_per_token")
    assert all(type(row[key]) is int for row in (first, second) for key in counts)


def test_other_formats_are_plain_json():
    rows = {row["format"]: row for row in other_formats(dims_of(27))}
    assert rows["nvfp4"] == {"format": "nvfp4", "bytes_per_token": 324, "ratio": 1152 / 324}
    assert rows["bf16"]["ratio"] == 1


@pytest.mark.parametrize("tokens", [0, 1, 100, 5000])
def test_a_bf16_cache_costs_what_a_bf16_cache_costs(tokens):
    kept = resident(layout_of("c16r16"), tokens, slack_tokens=6)
    assert kept.total_bytes == kept.bf16_cache_bytes == tokens * 1152
    assert kept.ratio == 1.0


def test_a_scheme_that_does_not_pack_is_refused():
    with pytest.raises(SchemeError):
        resident(PageLayout(500, 64, KVScheme.parse("c3r4")), 64)
