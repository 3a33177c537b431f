"""Capture: what is recorded rebuilds the attention output of every family, layer by layer."""

import gc
import json
import weakref

import pytest
import torch
from transformers import AutoConfig

from quantmla.calibrate import capture as capture_module
from quantmla.calibrate.capture import capture_layers
from quantmla.errors import CalibrationError, CheckpointError
from tiny import TINY_IDS, TINY_KWARGS, load_tiny, model_class, randomise, write_tiny

WINDOWS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def attention_outputs(folder, family):
    """Stock outputs of every attention module, [n, T, D] by cache layer."""
    model = load_tiny(folder, family, dtype=torch.float32, attn_implementation="eager")
    outputs = {}
    for module in model.modules():
        if hasattr(module, "kv_a_layernorm"):
            module.register_forward_hook(
                lambda module, _args, out: outputs.setdefault(module.layer_idx, []).append(out[0])
            )
    with torch.no_grad():
        for window in WINDOWS:
            model(input_ids=window[None])
    return {layer: torch.cat(parts) for layer, parts in outputs.items()}


def rebuilt_output(capture):
    """Absorbed attention from the captured parts alone, [n, T, D]."""
    nope_dim = capture.q_nope.shape[-1]
    latent = capture.latent_unit * capture.gamma
    q_latent = torch.einsum("nhtd,hdr->nhtr", capture.q_nope, capture.kv_b[:, :nope_dim])
    scores = q_latent @ latent[:, None].mT + capture.q_rope @ capture.k_rope[:, None].mT
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weight = (scores * capture.scaling).masked_fill(future, float("-inf")).softmax(-1)
    value = torch.einsum("nhtr,hvr->nthv", weight @ latent[:, None], capture.kv_b[:, nope_dim:])
    output = value.flatten(2) @ capture.o_proj.T
    return output if capture.o_bias is None else output + capture.o_bias


@pytest.mark.parametrize("kwargs", TINY_KWARGS, ids=TINY_IDS)
def test_captured_parts_rebuild_the_attention_output(tmp_path, kwargs):
    write_tiny(tmp_path, **kwargs, layers=3)
    expected = attention_outputs(tmp_path, kwargs["family"])
    seen = []
    for capture in capture_layers(tmp_path, WINDOWS):
        reference = expected[capture.layer]
        limit = 1e-5 * float(reference.abs().max())
        torch.testing.assert_close(rebuilt_output(capture), reference, rtol=0, atol=limit)
        seen.append(capture.layer)
    assert seen == sorted(expected) == list(range(6 if kwargs["family"] == "longcat_flash" else 3))


def test_only_one_decoder_layer_is_read_at_a_time(tmp_path, monkeypatch):
    write_tiny(tmp_path, moe=True, layers=3)
    requested = []

    class Spy(capture_module.CheckpointReader):
        def get(self, name):
            requested.append(name)
            return super().get(name)

    monkeypatch.setattr(capture_module, "CheckpointReader", Spy)
    for capture in capture_layers(tmp_path, WINDOWS):
        prefix = f"model.layers.{capture.layer}."
        assert all(name.startswith(prefix) or "embed_tokens" in name for name in requested)
        assert any(".mlp." in name for name in requested)
        requested.clear()


def test_the_layer_before_is_freed_when_the_next_one_loads(tmp_path, monkeypatch):
    write_tiny(tmp_path, layers=3)
    alive = []
    real = capture_module.load_decoder

    def watch(*arguments):
        gc.collect()
        assert [model() for model in alive if model() is not None] == []
        model = real(*arguments)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(capture_module, "load_decoder", watch)
    for capture in capture_layers(tmp_path, WINDOWS):
        del capture
    assert len(alive) == 3


@pytest.mark.parametrize("dense_layers", [0, 1, 3])
def test_dense_and_expert_layers_in_any_order(tmp_path, dense_layers):
    write_tiny(tmp_path, layers=4, moe=True)
    config = AutoConfig.from_pretrained(tmp_path)
    config.first_k_dense_replace = dense_layers
    model = model_class("deepseek_v3")(config)
    randomise(model, seed=3)
    model.save_pretrained(tmp_path)
    expected = attention_outputs(tmp_path, "deepseek_v3")
    for capture in capture_layers(tmp_path, WINDOWS):
        reference = expected[capture.layer]
        limit = 1e-5 * float(reference.abs().max())
        torch.testing.assert_close(rebuilt_output(capture), reference, rtol=0, atol=limit)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path):
    write_tiny(tmp_path, layers=1)
    (plain,) = capture_layers(tmp_path, WINDOWS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    (kimi,) = capture_layers(tmp_path, WINDOWS)
    assert torch.equal(kimi.q_rope, plain.q_rope)


def test_skip_and_start_give_the_same_captures(tmp_path):
    write_tiny(tmp_path, family="minicpm3", q_lora_rank=24, layers=3)
    hidden = {}

    def keep(decoder, x):
        hidden[decoder] = x.clone()

    whole = list(capture_layers(tmp_path, WINDOWS, on_hidden=keep))
    assert sorted(hidden) == [1, 2]
    skipped = list(capture_layers(tmp_path, WINDOWS, skip={0, 1}))
    started = list(capture_layers(tmp_path, WINDOWS, start=(2, hidden[2])))
    for again in (skipped, started):
        assert [capture.layer for capture in again] == [2]
        assert torch.equal(again[0].q_rope, whole[2].q_rope)
        assert torch.equal(again[0].latent_unit, whole[2].latent_unit)


def test_storage_dtype_halves_the_queries_and_keeps_the_cache_exact(tmp_path):
    write_tiny(tmp_path, layers=1)
    (full,) = capture_layers(tmp_path, WINDOWS)
    (small,) = capture_layers(tmp_path, WINDOWS, storage_dtype=torch.bfloat16)
    assert small.q_nope.dtype == small.q_rope.dtype == torch.bfloat16
    assert torch.equal(small.k_rope, full.k_rope)
    torch.testing.assert_close(small.q_nope.float(), full.q_nope, rtol=2**-8, atol=0)


def edit_tensors(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_float16_overflow_names_the_layer(tmp_path):
    write_tiny(tmp_path, layers=3, dtype=torch.bfloat16)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name] * 1e6}))
    list(capture_layers(tmp_path, WINDOWS))  # fits float32
    with pytest.raises(CalibrationError, match=r"does not fit(.|\n)*model\.layers\.1\.self_attn"):
        list(capture_layers(tmp_path, WINDOWS, compute_dtype=torch.float16))


def test_overflow_in_float32_names_the_layer(tmp_path):
    write_tiny(tmp_path, layers=2)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors[name].fill_(3e38))
    with pytest.raises(CalibrationError, match=r"layer output(.|\n)*where: model\.layers\.1\n"):
        list(capture_layers(tmp_path, WINDOWS))


@pytest.mark.parametrize("name", ["self_attn.kv_b_proj", "mlp.down_proj"])
def test_nan_weights_name_the_tensor(tmp_path, name):
    write_tiny(tmp_path, layers=2)
    name = f"model.layers.1.{name}.weight"
    edit_tensors(tmp_path, lambda tensors: tensors[name].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=name):
        list(capture_layers(tmp_path, WINDOWS))


def test_missing_tensor_is_an_error_with_its_name(tmp_path):
    write_tiny(tmp_path, layers=2)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(CheckpointError, match=r"no model\.layers\.1\.self_attn\.q_proj\.weight"):
        list(capture_layers(tmp_path, WINDOWS))


def test_wrong_shape_is_an_error_with_its_layer(tmp_path):
    write_tiny(tmp_path, layers=2)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name][1:].clone()}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1"):
        list(capture_layers(tmp_path, WINDOWS))
