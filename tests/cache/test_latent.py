"""The store of one cache layer: bytes, ring, crop, batch changes and refusals."""

import copy
import itertools

import pytest
import torch

from quantmla.cache.accounting import resident
from quantmla.cache.latent import LatentLayer
from quantmla.cache.layout import PageLayout
from quantmla.config import KVScheme
from quantmla.errors import CacheError
from quantmla.quant import dequantize, quantize

R, P = 32, 16
SINK, WINDOW = 4, 128
LENGTHS = [1, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 131, 132, 133, 2 * WINDOW + 1, 260]


def layer(name="c4r4", sink=SINK, window=WINDOW, **settings):
    scheme = KVScheme.parse(name, sink_tokens=sink, window_tokens=window)
    return LatentLayer(PageLayout(R, P, scheme), **settings)


def inputs(tokens, batch=1):
    return torch.randn(batch, tokens, R), torch.randn(batch, tokens, P)


def feed(store, data, calls, mask=None):
    first = 0
    for tokens in calls:
        new = slice(first, first + tokens)
        seen = None if mask is None else mask[:, : new.stop]
        rows = store.append(*(x[:, new] for x in data), seen)
        first = new.stop
    return rows


def assert_same(left, right):
    assert left.columns == right.columns
    assert left.lengths == right.lengths
    pages = -(-max(left.lengths) // 64)
    if left.pages is not None:
        assert torch.equal(left.pages[:, :pages], right.pages[:, :pages])
    assert torch.equal(left.recent.sink, right.recent.sink)
    assert torch.equal(left.recent.ring, right.recent.ring)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", ["c4r4", "c2r4", "c3r8", "c4r16"])
def test_streaming_and_one_shot_give_the_same_bytes(tokens, name):
    # field report FR-042
    data = inputs(tokens, batch=2)
    whole, steps, chunks = layer(name), layer(name), layer(name)
    feed(whole, data, [tokens])
    feed(steps, data, [1] * tokens)
    feed(chunks, data, [min(50, tokens - first) for first in range(0, tokens, 50)])
    assert_same(whole, steps)
    assert_same(whole, chunks)


def test_pages_hold_the_codes_of_the_rounded_rows_of_every_token():
    data = inputs(150)
    store = layer("c2r4", content_clip=torch.tensor([0.7]), rope_clip=0.9)
    feed(store, data, [150])
    latent, k_rope = store.layout.load(store.pages, 0, 150)
    rounded = [x.to(torch.bfloat16) for x in data]
    assert torch.equal(latent, dequantize(quantize(rounded[0], 2, clip=0.7)))
    assert torch.equal(k_rope, dequantize(quantize(rounded[1], 4, clip=0.9)))


def test_rows_keep_the_value_before_quantisation():
    data = inputs(200)
    rows = torch.cat(data, -1)
    rounded, exact = layer(), layer(row_dtype=torch.float32)
    for store, expected in ((rounded, rows.to(torch.bfloat16)), (exact, rows)):
        feed(store, data, [200])
        assert torch.equal(store.recent.sink, expected[:, :SINK])
        positions = torch.arange(200 - WINDOW, 200)
        assert torch.equal(
            store.recent.ring[:, (positions - SINK) % WINDOW], expected[:, positions]
        )


@pytest.mark.parametrize("slack", [0, 3])
def test_visible_rows_are_consistent(slack):
    data = inputs(300)
    store = layer(slack_tokens=slack)
    feed(store, data, [100])
    rows = store.append(*(x[:, 100:] for x in data))
    assert (rows.start, rows.count, rows.band_start) == ([100], [200], [100 - WINDOW + 1])
    expected = torch.cat(data, -1).to(torch.bfloat16)
    offset = WINDOW - 1 - 100
    assert torch.equal(rows.band[:, offset + SINK :], expected[:, SINK:])
    assert (rows.band[:, : offset + SINK] == 0).all()
    assert rows.packed.shape[1] == 299 - WINDOW + 1 - SINK


@pytest.mark.parametrize("name", ["c4r4", "c16r16"])
@pytest.mark.parametrize("padded", [False, True])
def test_resident_bytes_are_the_allocated_bytes(name, padded):
    store = layer(name)
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1, :20] = not padded
    feed(store, inputs(200, batch=3), [150, 50], mask)
    tensors = [store.pages, store.recent.rows, store.valid]
    held = sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
    assert store.resident_bytes() == held > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["c4r4", "c2r4", "c3r8", "c4r16", "c16r4", "c16r16"])
def test_one_shot_memory_is_what_accounting_says(name, batch):
    # field report FR-045: real packing, not de-quantised rows behind a label
    for tokens in (SINK + WINDOW + 6, 1000):
        store = layer(name, slack_tokens=6)
        feed(store, inputs(tokens, batch=batch), [tokens])
        expected = resident(store.layout, tokens, slack_tokens=6)
        held = batch * (expected.packed_bytes + expected.bf16_rows_bytes)
        assert store.resident_bytes() == held


@pytest.mark.parametrize(
    "clip",
    [
        *(0, 1.5, -0.5, True, "0.5", torch.nan),
        *map(torch.tensor, ([0.0], [1.5], [torch.nan], [1])),
        *map(torch.ones, (0, 2, (1, 1))),
    ],
    ids=str,
)
def test_unusable_clip_ratios_are_refused_once(clip):
    for path in ("content", "rope"):
        with pytest.raises(CacheError, match=f"the {path} clip ratio cannot be used") as error:
            layer("c2r4", layer_idx=3, **{f"{path}_clip": clip})
        assert "cache layer 3" in str(error.value)


def test_growth_keeps_the_bytes_and_stays_close_to_the_need():
    store = layer()
    data = inputs(64 * 40)
    feed(store, data, [64] * 40)
    whole = layer()
    feed(whole, data, [64 * 40])
    assert_same(store, whole)
    assert store.pages.shape[1] <= 1.25 * 40


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("length", [3, 5, 100, 133, 140, 300])
@pytest.mark.parametrize("drop", [1, 4, 6])
def test_crop_then_append_equals_never_having_seen_the_tokens(slack, length, drop):
    drop = min(drop, length)
    data, other = inputs(length), inputs(150)
    store, fresh = layer(slack_tokens=slack), layer(slack_tokens=slack)
    feed(store, data, [length])
    overwritten = length > SINK + WINDOW + slack and drop > slack + 1
    if overwritten:
        before = copy.deepcopy(store)
        with pytest.raises(CacheError, match="slack_tokens"):
            store.crop(drop)
        assert_same(store, before)
        return
    store.crop(drop)
    if drop < length:
        feed(fresh, [x[:, : length - drop] for x in data], [length - drop])
    for new in (slice(0, 2), slice(2, 150)):
        rows, expected = (s.append(*(x[:, new] for x in other)) for s in (store, fresh))
        for name in ("sink", "packed", "band"):
            assert torch.equal(getattr(rows, name), getattr(expected, name)), name
    assert store.lengths == fresh.lengths


def test_crops_in_a_row_do_not_add_up_beyond_the_slack():
    store = layer(slack_tokens=3)
    feed(store, inputs(300), [300])
    store.crop(2)
    store.crop(2)
    with pytest.raises(CacheError, match="slack_tokens"):
        store.crop(1)
    feed(store, inputs(4), [4])
    with pytest.raises(CacheError, match="slack_tokens"):
        store.crop(5)
    store.crop(4)


@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize("keep", [0, 3])
def test_crop_to_less_than_the_sinks(length, keep):
    store, fresh, data = layer(window=8), layer(window=8), inputs(40)
    first = [x[:, :length] for x in data]
    feed(store, first, [length])
    store.crop(length - keep if keep else 100)
    assert (store.columns, store.lengths) == (keep, [keep])
    if keep:
        feed(fresh, [x[:, :keep] for x in data], [keep])
    for calls in ([5], [1], [9]):
        assert_same_rows(feed(store, data, calls), feed(fresh, data, calls))


def assert_same_rows(left, right):
    for name in ("sink", "packed", "band"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


def test_crop_counts_columns_and_not_tokens_where_there_was_padding():
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 8:] = False
    store = layer()
    feed(store, inputs(12, batch=2), [12], mask)
    assert store.lengths == [8, 12]
    store.crop(3)
    assert (store.lengths, store.columns) == ([8, 9], 9)


def test_select_repeats_and_reorders_every_part():
    mask = torch.ones(3, 150, dtype=torch.bool)
    mask[2, :17] = False
    data, more = inputs(150, batch=3), inputs(20, batch=3)
    store = layer()
    feed(store, data, [150], mask)
    index = torch.tensor([2, 2, 0])
    store.select(index)
    chosen = layer()
    feed(chosen, [x[index] for x in data], [150], mask[index])
    assert_same(store, chosen)
    assert torch.equal(store.valid, chosen.valid)
    rows, expected = (s.append(*(x[index] for x in more)) for s in (store, chosen))
    assert_same_rows(rows, expected)


def test_permutations_of_a_batch_are_exact():
    # field report FR-041: the packed part must follow the beams as well
    data, more = inputs(140, batch=4), inputs(30, batch=4)
    solo = [layer() for _ in range(4)]
    for b, store in enumerate(solo):
        feed(store, [x[b : b + 1] for x in data], [140])
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 7):
        store = layer()
        feed(store, data, [140])
        store.select(torch.tensor(order))
        rows = store.append(*more)
        for b, source in enumerate(order):
            alone = copy.deepcopy(solo[source]).append(*(x[b : b + 1] for x in more))
            for name in ("sink", "packed", "band"):
                assert torch.equal(getattr(rows, name)[b : b + 1], getattr(alone, name))


def test_a_sequence_has_the_same_bytes_with_and_without_neighbours():
    data = inputs(200, batch=3)
    store, alone = layer(), layer()
    feed(store, data, [120, 80])
    feed(alone, [x[1:2] for x in data], [200])
    assert torch.equal(store.pages[1], alone.pages[0][: store.pages.shape[1]])
    assert torch.equal(store.recent.ring[1], alone.recent.ring[0])


def test_longest_sequence_ends_first_and_others_go_on():
    # field report FR-046: no append position may come from the longest row
    lengths = [150, 20, 70]
    mask = torch.ones(3, 200, dtype=torch.bool)
    for b, length in enumerate(lengths):
        mask[b, : 150 - length] = False
    data = inputs(200, batch=3)
    store = layer()
    feed(store, data, [150], mask)
    store.select(torch.tensor([1, 2]))
    feed(store, [x[1:, 150:] for x in data], [1] * 50)
    for b in (1, 2):
        alone = layer()
        feed(alone, [x[b : b + 1][:, mask[b]] for x in data], [lengths[b] + 50])
        assert torch.equal(store.pages[b - 1, : alone.pages.shape[1]], alone.pages[0])
        assert torch.equal(store.recent.ring[b - 1], alone.recent.ring[0])


def test_reset_forgets_everything():
    store, fresh = layer(), layer()
    feed(store, inputs(300, batch=2), [300])
    store.reset()
    assert store.resident_bytes() == 0
    data = inputs(70, batch=3)
    feed(store, data, [70])
    feed(fresh, data, [70])
    assert_same(store, fresh)


def test_deepcopy_is_independent():
    store, data = layer(), inputs(140)
    feed(store, data, [140])
    twin = copy.deepcopy(store)
    feed(store, inputs(5), [5])
    again = layer()
    feed(again, data, [140])
    assert_same(twin, again)


def test_offload_and_back_keeps_every_part():
    # field report FR-055
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[0, :9] = False
    store, twin = layer(), layer()
    data = inputs(140, batch=2)
    for s in (store, twin):
        feed(s, data, [140], mask)
    store.to("meta")
    parts = [store.pages, store.recent.sink, store.recent.ring]
    assert all(part.device.type == "meta" for part in parts)
    assert store.valid.device.type == "cpu"  # read by every check, so it never leaves the host
    twin.to("cpu")
    again = layer()
    feed(again, data, [140], mask)
    assert_same(twin, again)


def test_filled_under_inference_mode_and_used_outside():
    data, more = inputs(140, batch=2), inputs(3, batch=2)
    store, plain = layer(), layer()
    mask = torch.ones(2, 140, dtype=torch.bool)
    mask[0, :5] = False
    with torch.inference_mode():
        feed(store, data, [140], mask)
        store.select(torch.tensor([1, 0]))
        store.select(torch.tensor([1, 0]))
    feed(plain, data, [140], mask)
    for s in (store, plain):
        feed(s, more, [3])
        s.crop(1)
    assert_same(store, plain)
    copy.deepcopy(store)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_latents_are_refused_with_the_layer_and_nothing_is_stored(bad):
    store = layer(layer_idx=7)
    feed(store, inputs(10), [10])
    before = copy.deepcopy(store)
    latent, k_rope = inputs(3)
    latent[0, 1, 2] = bad
    with pytest.raises(CacheError, match="cache layer 7"):
        store.append(latent, k_rope)
    assert_same(store, before)


def test_rows_that_overflow_bf16_are_non_finite():
    latent, k_rope = inputs(3)
    latent[0, 0, 0] = 3.4e38
    with pytest.raises(CacheError, match="not finite"):
        layer().append(latent, k_rope)


def test_non_finite_latents_can_be_replaced_and_counted():
    store = layer(check_finite=False)
    latent, k_rope = inputs(150)
    latent[0, 3, 1], latent[0, 20, 0], k_rope[0, 149, 5] = torch.nan, torch.inf, -torch.inf
    rows = store.append(latent, k_rope)
    assert int(store.nonfinite) == 3
    for part in (rows.sink, rows.packed, rows.band):
        assert part.isfinite().all()
    assert rows.sink[0, 3, 1] == 0
    kept = torch.cat([latent[0, 149], k_rope[0, 149]]).to(torch.bfloat16)
    bound = kept[kept.isfinite()].abs().max()
    assert rows.band[0, -1, R + 5] == -bound
    codes = quantize(latent.to(torch.bfloat16), 4)
    assert torch.equal(store.layout.load(store.pages, 0, 150)[0], dequantize(codes))


def refusals():
    latent, k_rope = inputs(5, batch=2)
    ones = torch.ones(2, 15, dtype=torch.bool)
    other = ones.clone()
    other[0, 3] = False
    return [
        ("batch size", (latent[:1], k_rope[:1])),
        ("do not fit", (latent[..., :8], k_rope)),
        ("do not fit", (latent, k_rope[:, :4])),
        ("do not fit", (latent[:, :0], k_rope[:, :0])),
        ("does not cover", (latent, k_rope, ones[:, 10:])),
        ("does not cover", (latent, k_rope, ones[:1])),
        ("changed for tokens", (latent, k_rope, other)),
    ]


@pytest.mark.parametrize("case", range(7))
def test_misuse_is_refused_and_nothing_is_stored(case):
    message, arguments = refusals()[case]
    store = layer()
    feed(store, inputs(10, batch=2), [10])
    before = copy.deepcopy(store)
    with pytest.raises(CacheError, match=message):
        store.append(*arguments)
    assert_same(store, before)
