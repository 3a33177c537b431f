"""Every family row against the class that transformers really runs."""

import inspect

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, DynamicCache

import tiny
from quantmla.checkpoint.families import ALIASES, FAMILIES, REFUSALS, family_of
from quantmla.dims import MLADims
from quantmla.errors import CheckpointError, UnsupportedModelError

TOKENS = 9


class RecordingCache(DynamicCache):
    """Keeps what each attention hands to the cache, by cache layer."""

    def __init__(self, config):
        super().__init__(config=config)
        self.rows = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.rows[layer_idx] = (key_states[:, 0], value_states[:, 0])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def run_recorded(model):
    """Cached rows and attention inputs of one forward pass: lists in cache-layer order."""
    prefixes = family_of(model.config).attention_prefixes(model.config)
    inputs = {}
    for prefix in prefixes:
        projection = model.get_submodule(f"{prefix}.kv_a_proj_with_mqa")
        projection.register_forward_pre_hook(
            lambda module, args, prefix=prefix: inputs.__setitem__(prefix, args[0])
        )
    cache = RecordingCache(model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.arange(3, 3 + TOKENS)[None]
    model(ids, **{name: cache})
    rows = [cache.rows[layer] for layer in range(len(prefixes))]
    return [inputs[prefix] for prefix in prefixes], rows


def pairs(channels, pairing):
    """Channel indices (a, b) of all pairs, written out independently of the package."""
    half = channels // 2
    if pairing == "half":
        return list(range(half)), list(range(half, channels))
    return list(range(0, channels, 2)), list(range(1, channels, 2))


def rotated(key, model, pairing, pairing_cache):
    """RoPE by the two pairings: read pairs in weight order, write them in cache order."""
    frequencies = model.model.rotary_emb.inv_freq
    angle = torch.arange(TOKENS)[:, None] * frequencies  # [T, P/2]
    a, b = (key[..., index] for index in pairs(key.shape[-1], pairing))
    out = torch.empty_like(key)
    into_a, into_b = pairs(key.shape[-1], pairing_cache)
    out[..., into_a] = a * angle.cos() - b * angle.sin()
    out[..., into_b] = b * angle.cos() + a * angle.sin()
    return out * model.model.rotary_emb.attention_scaling


@pytest.mark.parametrize("kwargs", tiny.TINY_KWARGS, ids=tiny.TINY_IDS)
def test_row_matches_transformers(tmp_path, kwargs):
    tiny.write_tiny(tmp_path, **kwargs)
    model = tiny.load_tiny(tmp_path, kwargs["family"])
    tensors = load_file(tmp_path / "model.safetensors")
    config = model.config
    family, dims = family_of(config), MLADims.from_config(config)
    names = family.attention_names(config)
    inputs, rows = run_recorded(model)
    assert len(names) == len(inputs) == dims.num_cache_layers

    query_rank = dims.q_lora_rank or dims.hidden_size
    for name, x, (latent, k_rope) in zip(names, inputs, rows, strict=True):
        shapes = {key: tuple(tensors[tensor].shape) for key, tensor in name.fusable().items()}
        expected_shapes = {
            "kv_a": (dims.kv_lora_rank + dims.qk_rope_head_dim, dims.hidden_size),
            "kv_a_norm": (dims.kv_lora_rank,),
            "kv_b": (
                dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim),
                dims.kv_lora_rank,
            ),
            "q": (dims.num_heads * dims.qk_head_dim, query_rank),
        }
        if kwargs.get("attention_bias"):
            expected_shapes["kv_a_bias"] = (dims.kv_lora_rank + dims.qk_rope_head_dim,)
        assert shapes == expected_shapes
        assert tensors[name.o].shape == (dims.hidden_size, dims.num_heads * dims.v_head_dim)
        present = {key for key in tensors if key.startswith(f"{name.prefix}.")}
        assert (f"{name.prefix}.o_proj.bias" in present) == bool(kwargs.get("attention_bias"))
        assert f"{name.q.removesuffix('.weight')}.bias" not in present
        assert f"{name.prefix}.kv_b_proj.bias" not in present

        projected = x @ tensors[name.kv_a].T
        if name.kv_a_bias:
            projected = projected + tensors[name.kv_a_bias]
        content, key = projected.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
        rms = content.pow(2).mean(-1, keepdim=True).add(family.norm_eps).sqrt()
        gamma = tensors[name.kv_a_norm] * family.latent_scale(config)
        torch.testing.assert_close(latent, content / rms * gamma, rtol=1e-5, atol=1e-5)

        layouts = {
            (weights, cached): torch.allclose(
                k_rope, rotated(key, model, weights, cached), rtol=1e-4, atol=1e-4
            )
            for weights in ("interleaved", "half")
            for cached in ("interleaved", "half")
        }
        ours = (family.rope_pairing(config), family.rope_pairing_cache(config))
        assert [layout for layout, fits in layouts.items() if fits] == [ours]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_norm_eps_is_the_constructors(family):
    model = tiny.model_class(family)(tiny.tiny_config(family, q_lora_rank=24))
    row = family_of(model.config)
    norm = model.get_submodule(f"{row.attention_prefixes(model.config)[0]}.kv_a_layernorm")
    small = 1e-3 * torch.randn(4, norm.weight.numel())  # mean square 1e-6: eps decides
    expected = small * small.pow(2).mean(-1, keepdim=True).add(row.norm_eps).rsqrt()
    torch.testing.assert_close(norm(small), expected * norm.weight, rtol=1e-5, atol=1e-6)


def test_norm_eps_ignores_rms_norm_eps():
    config = tiny.tiny_config("glm4_moe_lite")
    assert config.rms_norm_eps == 1e-5
    assert family_of(config).norm_eps == 1e-6


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(family):
    config = CONFIG_MAPPING[family]()
    row = FAMILIES[family]
    for name, value in row.defaults.items():
        if (family, name) != ("minicpm3", "v_head_dim"):  # transformers fills it in, as we do
            assert getattr(config, name) == value, name


def test_bare_config_json_uses_the_defaults():
    bare = {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    family = family_of(bare)
    assert family is FAMILIES["deepseek_v3"]
    assert family.rope_pairing(bare) == "interleaved"
    assert family.rope_pairing_cache(bare) == "half"
    assert not family.has_bias(bare)
    prefixes = family.attention_prefixes(bare)
    assert len(prefixes) == 61  # the MTP layer behind them is not a cache layer
    assert prefixes[-1] == "model.layers.60.self_attn"


def test_longcat_has_two_cache_layers_a_decoder_layer():
    config = tiny.tiny_config("longcat_flash", q_lora_rank=24, layers=2)
    family = family_of(config)
    assert family.attention_prefixes(config) == [
        "model.layers.0.self_attn.0",
        "model.layers.0.self_attn.1",
        "model.layers.1.self_attn.0",
        "model.layers.1.self_attn.1",
    ]
    assert family.num_decoder_layers(config) == 2
    assert family.latent_scale(config) == pytest.approx((48 / 32) ** 0.5)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v32", "indexer"),
        ("glm_moe_dsa", "indexer"),
        ("kimi_linear", "rotate nothing"),
        ("axk1", "not been verified"),
        ("axk2", "fused with a gate"),
        ("mistral_large4", "across layers"),
        ("llama", "no kv_lora_rank"),
        ("mistral3", "wrapper"),
    ],
)
def test_refused_by_name_with_the_reason(model_type, reason):
    known = model_type in CONFIG_MAPPING  # older releases of transformers lack some of them
    config = CONFIG_MAPPING[model_type]() if known else {"model_type": model_type}
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        family_of(config)
    assert model_type in str(caught.value)


def test_no_row_is_also_refused():
    assert not set(REFUSALS) & ({*FAMILIES} | {*ALIASES})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "new_mla", "kv_lora_rank": 512}, "not known here"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "index_topk": 2048}, "indexer"),
        ({"model_type": "new_vl", "text_config": {"model_type": "deepseek_v3"}}, "wrapper"),
    ],
)
def test_unknown_configs_are_refused(config, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        family_of(config)


@pytest.mark.parametrize("config", [{}, {"model_type": 3}, {"model_type": ""}, "deepseek_v3"])
def test_not_a_config(config):
    with pytest.raises(CheckpointError, match="config"):
        family_of(config)
