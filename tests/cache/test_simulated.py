"""Simulated formats against the packed cache, and KIVI's groups of tokens under both policies."""

import pytest
import torch

from quantmla.cache.simulated import SimulatedLayer
from quantmla.config import KVScheme
from quantmla.engine.hf import QuantMLACache
from quantmla.engine.simulated import simulated_cache
from quantmla.errors import CacheError
from quantmla.kernels.reference import attend
from quantmla.quant.codec import Affine, Bf16
from quantmla.quant.kivi import PerChannel
from tiny import load_tiny, tiny_config, write_tiny

RANK, ROPE = 32, 16


def random_rows(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, tokens, RANK + ROPE, generator=generator)
    return rows[..., :RANK], rows[..., RANK:]


def attended(layer, rows, queries, pieces):
    """Output of all queries, [H, T, R], the rows given in pieces."""
    latent, k_rope = rows
    out, first = [], 0
    for tokens in pieces:
        part = slice(first, first + tokens)
        visible = layer.append(latent[:, part], k_rope[:, part])
        q_latent, q_rope = (q[:, :, part] for q in queries)
        out.append(attend(q_latent, q_rope, visible, scale=0.2)[0][0])
        first += tokens
    return torch.cat(out, 1)


def some_queries(tokens):
    generator = torch.Generator().manual_seed(9)
    return tuple(torch.randn(1, 2, tokens, n, generator=generator) for n in (RANK, ROPE))


@pytest.mark.parametrize(
    ("scheme", "online"), [("c4r4", None), ("c2r4", "hadamard"), ("c4r16", None)]
)
@pytest.mark.parametrize("policy", [(4, 128), (0, 0)])
def test_affine_codecs_give_what_the_packed_cache_gives(tmp_path, scheme, online, policy):
    model = load_tiny(write_tiny(tmp_path, "deepseek_v3"), "deepseek_v3").eval()
    sink, window = policy
    scheme = KVScheme.parse(scheme, sink_tokens=sink, window_tokens=window)
    clip = torch.tensor([0.8])
    codecs = [
        Bf16() if bits == 16 else Affine(bits, clip=ratio)
        for bits, ratio in ((scheme.content_bits, clip), (scheme.rope_bits, None))
    ]
    packed = QuantMLACache.from_scheme(scheme, model.config, clips=(clip, None), rope_online=online)
    simulated = simulated_cache(
        [tuple(codecs)] * 2,
        model.config,
        sink_tokens=sink,
        window_tokens=window,
        rope_online=online,
    )
    ids = torch.randint(0, 96, (2, 170), generator=torch.Generator().manual_seed(4))
    logits = []
    for cache in (packed, simulated):
        kwargs = cache.as_kwargs(model)
        with torch.no_grad():
            parts = [
                model(input_ids=ids[:, part], **kwargs).logits
                for part in (slice(0, 130), slice(130, 169), slice(169, 170))
            ]
        logits.append(torch.cat(parts, 1))
    assert torch.equal(*logits)
    assert packed.packed_rows_read == simulated.packed_rows_read > 0


def test_logical_bytes_are_those_of_the_codecs():
    layer = SimulatedLayer(512, 64, Affine(4), PerChannel(4), sink_tokens=4, window_tokens=128)
    assert layer.logical_bytes == 256 + 24 + 36


@pytest.mark.parametrize("pieces", [(260,), (131, 1, 1, 127), (64, 64, 64, 68)])
def test_under_the_policy_kivi_reads_closed_groups_only(pieces):
    tokens, sink, window = 260, 4, 128
    latent, k_rope = random_rows(tokens)
    layer = SimulatedLayer(
        RANK, ROPE, Affine(4), PerChannel(4), sink_tokens=sink, window_tokens=window
    )
    queries = some_queries(tokens)
    out = attended(layer, (latent, k_rope), queries, pieces)
    expected = expected_output(
        latent,
        k_rope,
        queries,
        lambda i, j: j < sink or i - j < window,
        lambda i, j: j < sink or i - j < window,
        first=sink,
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pieces", [(200,), (64, 128, 8)])
def test_without_a_policy_kivi_keeps_the_open_group_in_bf16(pieces):
    tokens = 200
    latent, k_rope = random_rows(tokens)
    layer = SimulatedLayer(RANK, ROPE, Affine(4), PerChannel(4), sink_tokens=0, window_tokens=0)
    queries = some_queries(tokens)
    out = attended(layer, (latent, k_rope), queries, pieces)
    expected = expected_output(
        latent, k_rope, queries, lambda i, j: False, lambda i, j: j // 64 == i // 64, first=0
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def expected_output(latent, k_rope, queries, content_exact, rope_exact, first):
    """Every query on its own, in one loop: [H, T, R]."""
    bf16 = [part[0].bfloat16() for part in (latent, k_rope)]
    coded_content = Affine(4).round_trip(bf16[0]).bfloat16()
    coded_rope = bf16[1].clone()
    coded_rope[first:] = PerChannel(4).round_trip(bf16[1][first:]).bfloat16()
    tokens = latent.shape[1]
    out = []
    for i in range(tokens):
        exact = torch.tensor([content_exact(i, j) for j in range(i + 1)])[:, None]
        content = torch.where(exact, bf16[0][: i + 1], coded_content[: i + 1]).float()
        exact = torch.tensor([rope_exact(i, j) for j in range(i + 1)])[:, None]
        rope = torch.where(exact, bf16[1][: i + 1], coded_rope[: i + 1]).float()
        score = queries[0][0, :, i] @ content.T + queries[1][0, :, i] @ rope.T
        out.append((score * 0.2).softmax(-1) @ content)
    return torch.stack(out, 1)


def test_what_does_not_fit_is_refused():
    with pytest.raises(CacheError, match="window is too short"):
        SimulatedLayer(RANK, ROPE, Affine(4), PerChannel(4), sink_tokens=4, window_tokens=63)
    with pytest.raises(CacheError, match="groups of tokens"):
        SimulatedLayer(RANK, ROPE, PerChannel(4), Affine(4), sink_tokens=4, window_tokens=128)
    layer = SimulatedLayer(RANK, ROPE, Affine(4), PerChannel(4), sink_tokens=0, window_tokens=0)
    layer.append(*random_rows(70))
    with pytest.raises(CacheError, match="open group"):
        layer.append(*random_rows(10))
    config = tiny_config("deepseek_v3")
    with pytest.raises(CacheError, match="one pair of codecs"):
        simulated_cache([], config, sink_tokens=4, window_tokens=128)
