"""Bits of each layer under a byte budget."""

import itertools

import pytest
import torch

from calibrate.runs import learned, run
from calibrate.texts import write_text
from exact import forward, tokens
from fusing import read_config
from quantmla.cache.accounting import TokenFormat
from quantmla.calibrate.budget import choose, fuse_within
from quantmla.calibrate.weights import layer_weights
from quantmla.checkpoint.verify import verify
from quantmla.config import QuantMLABlock
from quantmla.dims import MLADims
from quantmla.engine.hf import QuantMLACache
from quantmla.errors import CalibrationError
from tiny import load_tiny, write_tiny


def test_the_choice_is_the_best_there_is_where_errors_are_convex():
    generator = torch.Generator().manual_seed(0)
    sizes = [10.0, 20.0, 30.0]
    for budget in (10, 15, 20, 27.5, 30):
        scale = torch.rand(4, generator=generator).tolist()
        errors = [[16 * s, 4 * s, s] for s in scale]  # as a bit more has it
        picked = choose(errors, sizes, budget)
        assert sum(sizes[c] for c in picked) <= 4 * budget
        total = sum(own[c] for own, c in zip(errors, picked, strict=True))
        best = min(
            sum(own[c] for own, c in zip(errors, combination, strict=True))
            for combination in itertools.product(range(3), repeat=4)
            if sum(sizes[c] for c in combination) <= 4 * budget
        )
        assert total == pytest.approx(best)


def test_a_layer_that_gains_nothing_stays_small_and_too_small_a_budget_is_refused():
    assert choose([[1.0, 1.0], [5.0, 1.0]], [8, 16], 16) == [0, 1]
    with pytest.raises(CalibrationError, match="no candidate fits"):
        choose([[1.0]], [8], 7)


def test_a_checkpoint_within_a_budget_is_read_layer_by_layer(tmp_path):
    model = write_tiny(tmp_path / "model", layers=3)
    text = write_text(tmp_path / "text.txt")
    recipes = [learned(scheme=name) for name in ("c2r4", "c8r4")]
    result = run(model, text, recipes, tmp_path / "run")
    dims = MLADims.from_config(read_config(model))
    small, large = (
        TokenFormat.from_scheme(r.scheme).logical_bytes(dims.kv_lora_rank, dims.qk_rope_head_dim)
        for r in recipes
    )
    weights = [1.0, 1.0, 100.0]
    out = fuse_within(result, recipes, (2 * small + large) / 3, weights, tmp_path / "mixed")
    block = QuantMLABlock.from_config(read_config(out))
    bits = [block.scheme(layer).content_bits for layer in range(3)]
    assert sorted(bits) == [2, 2, 8]
    gains = [a.stats["output_error_both"] - b.stats["output_error_both"]
             for a, b in zip(*(result.transforms(r) for r in recipes), strict=True)]  # fmt: skip
    gains = [gain * weight for gain, weight in zip(gains, weights, strict=True)]
    assert bits.index(8) == gains.index(max(gains))
    assert verify(out, model).ok
    fused = load_tiny(out, "deepseek_v3")
    assert forward(fused, QuantMLACache.from_config(out), tokens(150)).isfinite().all()
    with pytest.raises(CalibrationError, match="differ in bits only"):
        fuse_within(
            result, [*recipes, learned(scheme="c4r4", method="rtn", steps=0)], 99, weights, out
        )


def test_weights_predict_the_kl_of_small_errors(tmp_path):
    """Noise of a relative square of 1e-4 on one attention output costs what its weight says."""
    model = load_tiny(write_tiny(tmp_path / "model", layers=3), "deepseek_v3")
    windows = torch.randint(3, 96, (8, 48), generator=torch.Generator().manual_seed(1))
    weights = layer_weights(model, windows, first_token=0, seed=0)
    assert len(weights) == 3
    generator = torch.Generator().manual_seed(0)
    attentions = [m for m in model.modules() if hasattr(m, "kv_a_layernorm")]

    @torch.no_grad()
    def logprobs():
        return model(input_ids=windows, use_cache=False).logits.log_softmax(-1)

    exact = logprobs()
    for module, weight in zip(attentions, weights, strict=True):

        def disturb(_module, _args, result):
            noise = torch.randn(result[0].shape, generator=generator)
            scale = 1e-2 * result[0].square().sum(-1).mean().sqrt() / noise.shape[-1] ** 0.5
            return (result[0] + scale * noise, *result[1:])

        hook = module.register_forward_hook(disturb)
        moved = logprobs()
        hook.remove()
        kl = float((exact.exp() * (exact - moved)).sum(-1).mean())
        assert kl == pytest.approx(1e-4 * weight, rel=0.4)
    with pytest.raises(CalibrationError, match="too short"):
        layer_weights(model, windows, first_token=48, seed=0)
