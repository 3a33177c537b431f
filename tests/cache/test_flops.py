"""FLOP table of absorbed against expanded attention, and what absorption may not do."""

import pytest
import torch

from quantmla.cache.flops import (
    absorbed_flops,
    break_even_tokens,
    causal_pairs,
    expanded_flops,
    prefill_table,
)
from quantmla.dims import MLADims

V3 = MLADims(7168, 61, 128, 512, 64, 128, 128, 1536, 1e-6)
TINY = MLADims(24, 1, 3, 16, 8, 6, 5, None, 1e-6)


def test_published_cost_of_one_decoded_token():
    cached = 32_768
    absorbed, expanded = (f(V3, 1, cached) for f in (absorbed_flops, expanded_flops))
    assert absorbed.attention == 2 * 128 * (cached + 1) * 1088
    assert expanded.attention == 2 * 128 * (cached + 1) * 320
    assert absorbed.attention / expanded.attention == pytest.approx(3.4)
    # but expanding 32K latents for one query costs far more than it saves
    assert expanded.total > 100 * absorbed.total


def test_table_for_whole_prompts():
    rows = prefill_table(V3, [1, 4096])
    assert [row["tokens"] for row in rows] == [1, 4096]
    for row in rows:
        assert row["attention_ratio"] == pytest.approx(3.4)
    assert rows[0]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert 1.5 < rows[1]["ratio"] < 3.4
    assert rows[1]["expanded_flops"] == 2 * 128 * (320 * 4096 * 4097 // 2 + 512 * 256 * 4096)


def test_break_even_chunk():
    even = break_even_tokens(V3)
    assert even == pytest.approx(170.67, abs=0.01)
    history = 10**7
    below, above = int(even) - 1, int(even) + 2
    assert absorbed_flops(V3, below, history).total < expanded_flops(V3, below, history).total
    assert absorbed_flops(V3, above, history).total > expanded_flops(V3, above, history).total
    assert break_even_tokens(MLADims(8, 1, 1, 4, 2, 4, 4, None, 1e-6)) == float("inf")


@pytest.mark.parametrize(("new", "cached"), [(0, 5), (1, 0), (3, 2)])
def test_pairs_are_counted_one_by_one(new, cached):
    assert causal_pairs(new, cached) == sum(cached + i + 1 for i in range(new))


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def rotated(x, position, base=100.0):
    """RoPE on [.., T, P] in half-split pairs."""
    pairs = x.shape[-1] // 2
    angle = position[:, None] * base ** (-torch.arange(pairs, dtype=x.dtype) / pairs)
    first, second = x[..., :pairs], x[..., pairs:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def test_absorbing_the_content_path_is_exact():
    tokens = 7
    latent, query = draw(tokens, TINY.kv_lora_rank), draw(3, tokens, 6, seed=1)
    kv_b = draw(3, 6 + 5, TINY.kv_lora_rank, seed=2)
    key, value = (latent @ kv_b.mT).split([6, 5], dim=-1)  # [H, T, N], [H, T, V]
    scores = query @ key.mT
    absorbed = (query @ kv_b[:, :6]) @ latent.T
    torch.testing.assert_close(absorbed, scores, rtol=1e-12, atol=1e-12)
    weight = scores.softmax(-1)
    through_latent = (weight @ latent) @ kv_b[:, 6:].mT
    torch.testing.assert_close(through_latent, weight @ value, rtol=1e-12, atol=1e-12)


def test_absorbing_through_rope_is_wrong():
    tokens, rank, rope_dim = 7, TINY.kv_lora_rank, TINY.qk_rope_head_dim
    latent, up = draw(tokens, rank), draw(rope_dim, rank, seed=1)  # k_rope = RoPE_j(up c)
    query, position = draw(3, tokens, rope_dim, seed=2), torch.arange(tokens).double()
    exact = rotated(query, position) @ rotated(latent @ up.T, position).mT
    for attempt in (rotated(query, position) @ up, query @ up):  # with and without its own RoPE
        error = (attempt @ latent.T - exact).norm() / exact.norm()
        assert error > 0.3
    # the matrix that would have to be absorbed depends on the key's position:
    per_key = torch.stack(
        [
            rotated(query, position) @ rotated(up.T, p.expand(rank)).T @ latent[j]
            for j, p in enumerate(position)
        ],
        dim=-1,
    )
    torch.testing.assert_close(per_key, exact, rtol=1e-12, atol=1e-12)
