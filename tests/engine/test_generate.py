"""`model.generate` with the packed cache against the stock model."""

import pytest
import torch

from exact import exact_cache, tiny_model, tokens
from quantmla.errors import CacheError


@pytest.fixture(scope="module")
def model():
    return tiny_model()


GENERATE = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "returned beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20},
    "chunked prefill": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 6},
}


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "longcat_flash", "mistral4"])
@pytest.mark.parametrize("mode", GENERATE)
def test_generate_equals_the_stock_model(family, mode):
    settings = {"q_lora_rank": 24} if family in ("longcat_flash", "mistral4") else {}
    model = tiny_model(family, yarn=family == "mistral4", **settings)
    ids = tokens(30, batch=1 if mode == "prompt lookup" else 2)
    ids[0, 10:20] = ids[0, :10]
    mask = torch.ones_like(ids)
    if len(ids) == 2:
        mask[1, :11] = 0
    outs = []
    for cache in (None, exact_cache(model.config, slack_tokens=6)):
        torch.manual_seed(1)
        model.set_attn_implementation("eager")
        packed = {} if cache is None else cache.as_kwargs(model)
        settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        settings |= {"pad_token_id": 0} | GENERATE[mode]
        outs.append(model.generate(ids, attention_mask=mask, **settings, **packed))
    assert torch.equal(*outs)
    assert cache.packed_rows_read > 0
    assert cache.get_seq_length() == 49


def test_assisted_generation_with_a_draft_model(model):
    draft = tiny_model(layers=1)
    ids = tokens(30)
    settings = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    model.set_attn_implementation("eager")
    expected = model.generate(ids, assistant_model=draft, **settings)
    cache = exact_cache(model.config, slack_tokens=20)
    out = model.generate(ids, assistant_model=draft, **settings, **cache.as_kwargs(model))
    assert torch.equal(out, expected)


def test_speculation_without_slack_is_an_error_and_not_a_silent_change(model):
    ids = torch.tensor([[5, 6, 7, 8] * 8])
    cache = exact_cache(model.config, window=4)
    settings = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    with pytest.raises(CacheError, match="slack_tokens"):
        model.generate(ids, prompt_lookup_num_tokens=8, **settings, **cache.as_kwargs(model))


def test_two_turns_with_one_cache_equal_two_turns_of_the_stock_model(model):
    question, follow_up = tokens(30), tokens(7)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    outs = []
    for cache in (None, exact_cache(model.config)):
        model.set_attn_implementation("eager")
        packed = {} if cache is None else cache.as_kwargs(model)
        first = model.generate(question, **settings, **packed)
        whole = torch.cat([first, follow_up], 1)
        outs.append(model.generate(whole, **settings, **packed))
    assert torch.equal(*outs)
    assert cache.get_seq_length() == 30 + 12 + 7 + 12 - 1
