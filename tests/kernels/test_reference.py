"""The tiled attention against a dense one written from the definition."""

from dataclasses import replace

import pytest
import torch

from quantmla.cache.latent import LatentLayer
from quantmla.cache.layout import PageLayout
from quantmla.cache.policy import packed_pairs, representation
from quantmla.config import KVScheme
from quantmla.kernels import reference
from quantmla.kernels.reference import attend

H, R, P = 3, 32, 16
SCALE = 0.2
SINK, WINDOW = 4, 8


def inputs(tokens, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    latent, k_rope = (torch.randn(batch, tokens, n, generator=generator) for n in (R, P))
    q_latent, q_rope = (torch.randn(batch, H, tokens, n, generator=generator) for n in (R, P))
    return latent, k_rope, q_latent, q_rope


def layer(name="c4r4", sink=SINK, window=WINDOW, **settings):
    scheme = KVScheme.parse(name, sink_tokens=sink, window_tokens=window)
    return LatentLayer(PageLayout(R, P, scheme), **settings)


def run(store, data, calls, chunk_tokens=None, mask=None):
    """Feed calls of the given lengths and return outputs, lse and the number of packed pairs."""
    latent, k_rope, q_latent, q_rope = data
    out, lse, pairs, first = [], [], 0, 0
    for tokens in calls:
        new = slice(first, first + tokens)
        seen = None if mask is None else mask[:, : new.stop]
        rows = store.append(latent[:, new], k_rope[:, new], seen, chunk_tokens)
        part = attend(q_latent[:, :, new], q_rope[:, :, new], rows, scale=SCALE)
        out.append(part[0])
        lse.append(part[1])
        pairs, first = pairs + part[2], new.stop
    return torch.cat(out, 2), torch.cat(lse, 2), pairs


def dense(store, data, chunk_starts=None):
    """The definition: one masked softmax over scores that mix both representations."""
    latent, k_rope, q_latent, q_rope = data
    tokens, scheme = latent.shape[1], store.layout.scheme
    exact = torch.cat([latent, k_rope], -1).to(torch.bfloat16).double()
    packed = torch.cat(store.layout.load(store.pages, 0, tokens), -1).double()
    query = torch.cat([q_latent, q_rope], -1).double()
    step = torch.arange(tokens)
    protected = representation(
        step[:, None], step, scheme.sink_tokens, scheme.window_tokens, chunk_starts
    )
    score = torch.where(protected, query @ exact.mT[:, None], query @ packed.mT[:, None]) * SCALE
    score = score.masked_fill(step > step[:, None], -torch.inf)
    weight = score.softmax(-1)
    value = (weight * protected) @ exact[:, None, :, :R]
    return value + (weight * ~protected) @ packed[:, None, :, :R], score.logsumexp(-1)


@pytest.mark.parametrize("tokens", [1, 4, 5, 11, 12, 13, 63, 64, 65, 150])
@pytest.mark.parametrize("name", ["c4r4", "c2r4", "c4r16"])
def test_strict_attention_follows_the_definition(tokens, name):
    store, data = layer(name), inputs(tokens)
    out, lse, pairs = run(store, data, [tokens])
    expected, expected_lse = dense(store, data)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    assert pairs == packed_pairs(0, tokens, SINK, WINDOW)


@pytest.mark.parametrize(("sink", "window"), [(0, 0), (0, 1), (4, 0), (4, 1), (0, 200), (200, 8)])
@pytest.mark.parametrize("calls", [[90], [1, 30, 59]])
def test_any_sink_and_window(sink, window, calls):
    store, data = layer(sink=sink, window=window), inputs(90)
    out, _, pairs = run(store, data, calls)
    torch.testing.assert_close(out.double(), dense(store, data)[0], atol=1e-5, rtol=1e-5)
    assert pairs == packed_pairs(0, 90, sink, window)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("window", [0, 1, WINDOW])
def test_fast_attention_follows_the_definition(chunk, window):
    store, data, calls = layer(window=window), inputs(100), [40, 1, 59]
    out, _, pairs = run(store, data, calls, chunk_tokens=chunk)
    starts = [*range(0, 40, chunk), 40, *range(41, 100, chunk)]
    torch.testing.assert_close(out.double(), dense(store, data, starts)[0], atol=1e-5, rtol=1e-5)
    assert pairs == packed_pairs(0, 100, SINK, window, starts)


def test_fast_differs_from_strict_and_reads_fewer_packed_rows():
    data = inputs(100)
    strict, fast = (run(layer("c2r2"), data, [100], chunk_tokens=c) for c in (None, 50))
    assert fast[2] < strict[2]
    assert (fast[0] - strict[0]).abs().max() > 1e-2


@pytest.mark.parametrize("calls", [[1] * 150, [149, 1], [50, 50, 50], [7] * 21 + [3], [64, 65, 21]])
def test_strict_does_not_depend_on_chunking(calls):
    data = inputs(150)
    whole, parts = layer(), layer()
    expected, expected_lse, pairs = run(whole, data, [150])
    out, lse, count = run(parts, data, calls)
    assert torch.equal(whole.pages[:, :3], parts.pages[:, :3])
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)
    assert count == pairs


def test_no_step_at_tile_borders_from_length_88_to_256():
    # field report FR-021: decode and prefill of different tile widths, over the same packed cache
    data = inputs(256)
    expected = run(layer(), data, [256])[0]
    out = run(layer(), data, [88] + [1] * 168)[0]
    error = (out - expected).abs().amax((0, 1, 3))
    assert float(error.max()) < 2e-6


def test_tile_size_does_not_change_the_result():
    data = inputs(300)
    latent, k_rope, q_latent, q_rope = data
    rows = layer().append(latent, k_rope)
    outs = [
        attend(q_latent, q_rope, rows, scale=SCALE, tile_scores=n)[0] for n in (1, 10**5, 10**9)
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", ["c4r4", "c16r16"])
def test_padded_batch_equals_solo_runs(side, name):
    lengths, tokens = [70, 1, 0, 33, 69], 70
    data = inputs(tokens + 5, batch=len(lengths))
    mask = torch.ones(len(lengths), tokens + 5, dtype=torch.bool)
    for b, length in enumerate(lengths):
        before = {"left": tokens - length, "right": 0, "both": (tokens - length) // 2}[side]
        mask[b, :tokens] = False
        mask[b, before : before + length] = True
    store = layer(name)
    out, lse, pairs = run(store, data, [tokens, 1, 4], mask=mask)
    assert out.isfinite().all()
    assert (out.transpose(1, 2)[~mask] == 0).all()
    assert (lse.transpose(1, 2)[~mask] == -torch.inf).all()
    total = 0
    for b, length in enumerate(lengths):
        keys = [x[b : b + 1][:, mask[b]] for x in data[:2]]
        queries = [x[b : b + 1][:, :, mask[b]] for x in data[2:]]
        solo = layer(name)
        expected, expected_lse, count = run(solo, [*keys, *queries], [length + 5])
        total += count
        torch.testing.assert_close(out[b : b + 1][:, :, mask[b]], expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(
            lse[b : b + 1][:, :, mask[b]], expected_lse, atol=2e-6, rtol=1e-5
        )
        if name == "c4r4":
            pages = solo.pages.shape[1]
            assert torch.equal(store.pages[b, :pages], solo.pages[0])
    assert pairs == total


def test_bf16_reference_reads_no_packed_row():
    store, data = layer("c16r16"), inputs(150)
    out, _, pairs = run(store, data, [100, 50])
    assert pairs == 0
    assert store.pages is None
    keys = torch.cat(data[:2], -1).to(torch.bfloat16).double()
    score = torch.cat(data[2:], -1).double() @ keys.mT[:, None] * SCALE
    score = score.masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf)
    expected = score.softmax(-1) @ keys[:, None, :, :R]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("poison", [0xFF, 0x7F])
@pytest.mark.parametrize("tokens", [3, 6, 65, 100])
def test_unused_bytes_and_rows_are_never_read(poison, tokens, poison_empty):
    # field reports FR-018 and FR-019
    mask = torch.ones(2, tokens + 1, dtype=torch.bool)
    mask[1, : tokens // 2] = False
    data = inputs(tokens + 1, batch=2)
    outs = []
    for fill in (None, poison):
        store = layer()
        run(store, [x[..., :tokens, :] for x in data], [tokens], mask=mask)
        if fill is not None:
            for b, length in enumerate(store.lengths):
                store.pages[b].view(-1)[_unused_bytes(store, length)] = fill
                store.recent.ring[b, ~_live_slots(store, length)] = float("nan")
                store.recent.sink[b, length:] = float("nan")
        latent, k_rope, q_latent, q_rope = (x[..., tokens:, :] for x in data)
        rows = store.append(latent, k_rope, mask)
        outs.append(attend(q_latent, q_rope, rows, scale=SCALE)[0])
    assert torch.equal(*outs)


def _unused_bytes(store, length):
    """Bytes of the pages of one sequence that hold none of its tokens."""
    layout, unused = store.layout, torch.ones(store.pages.shape[1:], dtype=torch.bool)
    for page in range(len(unused)):
        used = min(max(length - 64 * page, 0), 64)
        for plane in layout.planes:
            begin, end = plane.offset_bytes, plane.end_bytes
            entries = unused[page, begin:end].view(plane.entries, 64, -1)
            entries[:, plane.place(torch.arange(used))] = False
    return unused.view(-1)


def _live_slots(store, length):
    """Ring slots of the last window-1 tokens of one sequence."""
    live = torch.zeros(store.recent.ring.shape[1], dtype=torch.bool)
    positions = torch.arange(max(SINK, length - WINDOW + 1), max(SINK, length))
    live[(positions - SINK) % len(live)] = True
    return live


def test_empty_row_gives_zero_and_minus_infinity():
    data = latent, k_rope, q_latent, q_rope = inputs(2)
    rows = layer().append(latent, k_rope)
    only_second = replace(rows, sink=rows.sink[:, :0], band=torch.cat(data[:2], -1), band_start=[1])
    out, lse, _ = attend(q_latent, q_rope, only_second, scale=SCALE)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all()
    torch.testing.assert_close(out[:, :, 1], latent[:, :1].expand(1, H, R))


def test_score_tiles_stay_small(monkeypatch):
    biggest, real = [], torch.bmm
    monkeypatch.setattr(
        reference.torch, "bmm", lambda a, b: biggest.append(a.shape[1] * b.shape[2]) or real(a, b)
    )
    latent, k_rope, q_latent, q_rope = inputs(600)
    rows = layer().append(latent, k_rope)
    attend(q_latent, q_rope, rows, scale=SCALE, tile_scores=1 << 17)
    assert max(biggest) < 1.2 * (1 << 17)
    half = 600 * 600 * H * 0.7
    assert sum(biggest[::2]) < half  # a causal prefill does about half of the square
