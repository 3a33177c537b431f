"""Whole tiny models: exactness of the conversion, and the folder that it writes."""

import json

import pytest
import torch
import transformers

from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import KVScheme
from quantmla.convert.checkpoint import (
    REPORT_NAME,
    convert_attention,
    convert_checkpoint,
    mla_config,
)
from quantmla.convert.source import load_source
from quantmla.engine.hf import QuantMLACache, use_packed_attention
from quantmla.errors import CalibrationError, CheckpointError
from tiny_llama import (
    THETA,
    make_convertible,
    tiny_llama,
    token_windows,
    write_llama,
)

RANK = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return load_source(write_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "mla"
    report = convert_checkpoint(source, token_windows(), out, kv_lora_rank=RANK)
    return out, report


def rebuild(model, attention, kv_lora_rank, **changes):
    """The stock class with converted attention and the source's other weights, in float32."""
    config = mla_config(model.config, kv_lora_rank)
    for name, value in changes.items():
        setattr(config, name, value)
    rest = {k: v for k, v in model.state_dict().items() if ".self_attn." not in k}
    result = transformers.DeepseekV3ForCausalLM(config).float()
    result.load_state_dict(rest | attention)
    return result.eval()


def logits(model, tokens, **kwargs):
    with torch.no_grad():
        return model(tokens, **kwargs).logits.float()


def difference(got, want):
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_model_that_loses_nothing_keeps_its_logits(kv_heads):
    model = make_convertible(
        tiny_llama(heads=2 * kv_heads, kv_heads=kv_heads, hidden=16 * kv_heads)
    )
    tokens = token_windows(2, 40, seed=1)
    attention, stats = convert_attention(
        model, token_windows(16, 64), 16 * kv_heads, dtype=torch.float32
    )
    want = logits(model, tokens)
    assert difference(logits(rebuild(model, attention, 16 * kv_heads), tokens), want) < 1e-4
    assert all(layer["refit_error"] < 1e-6 for layer in stats)
    wrong = rebuild(model, attention, 16 * kv_heads, rope_interleave=True)
    assert difference(logits(wrong, tokens), want) > 0.05


def test_higher_rank_is_closer_to_the_source():
    model, tokens = tiny_llama(), token_windows(4, 40, seed=1)
    want = logits(model, tokens)
    errors = []
    for rank in (4, 16, 48):
        attention, _ = convert_attention(model, token_windows(16, 64), rank, dtype=torch.float32)
        got = logits(rebuild(model, attention, rank), tokens)
        errors.append(float((got - want).square().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_stock_class_loads_the_folder_and_agrees_with_the_absorbed_path(converted):
    out, _ = converted
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert type(model) is transformers.DeepseekV3ForCausalLM
    assert not any(info.values()), info
    tokens = token_windows(2, 40, seed=1)
    want = logits(model.eval(), tokens)
    use_packed_attention(model)
    cache = QuantMLACache.from_scheme(
        KVScheme.parse("c16r16"), model.config, row_dtype=torch.float32
    )
    assert difference(logits(model, tokens, **cache.as_kwargs(model)), want) < 2e-5


def test_attention_and_the_rest_lie_in_different_shards(converted):
    reader = CheckpointReader(converted[0])
    shards = {True: set(), False: set()}
    for name in reader.tensor_names:
        shards[".self_attn." in name].add(reader.shard_of(name))
    assert len(shards[True]) == len(shards[False]) == 1
    assert not shards[True] & shards[False]
    assert {info.dtype for info in reader.tensors.values()} == {"BF16"}
    assert "lm_head.weight" not in reader.tensor_names


def test_large_models_get_more_shards(source, tmp_path, monkeypatch):
    monkeypatch.setattr("quantmla.convert.checkpoint.MAX_SHARD_BYTES", 20_000)
    convert_checkpoint(source, token_windows(2), tmp_path / "mla", kv_lora_rank=RANK)
    reader = CheckpointReader(tmp_path / "mla")
    assert len(reader.shards) > 3
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mla")


def test_config_says_what_other_loaders_need(converted):
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == THETA
    assert config["rope_interleave"] is False
    assert config["q_lora_rank"] is None
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2
    assert "quantmla" not in config
    loaded = transformers.AutoConfig.from_pretrained(converted[0])
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": THETA}


def test_tokenizer_is_that_of_the_source(converted, source):
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted[0])
    text = "The latent is read in pages.\n"
    assert tokenizer(text)["input_ids"] == source.tokenizer(text)["input_ids"]


def test_report_is_written_and_returned(converted):
    out, report = converted
    assert json.loads((out / REPORT_NAME).read_text()) == report
    assert report["cached_numbers_before"] == 2 * 3 * 16
    assert report["cached_numbers_after"] == RANK + 16
    assert [sorted(layer) for layer in report["layers"]] == [
        ["refit_error", "rope_energy_kept", "variance_kept"]
    ] * 2


def test_progress_names_each_layer(source, tmp_path):
    seen = []
    convert_checkpoint(
        source,
        token_windows(2),
        tmp_path / "mla",
        kv_lora_rank=8,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [
        ("model.layers.0.self_attn", 0, 2),
        ("model.layers.1.self_attn", 1, 2),
        ("", 2, 2),
    ]


def test_same_input_gives_the_same_bytes(source, converted, tmp_path):
    convert_checkpoint(source, token_windows(), tmp_path / "mla", kv_lora_rank=RANK)
    for path in converted[0].iterdir():
        assert (tmp_path / "mla" / path.name).read_bytes() == path.read_bytes()


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_with_content_is_refused_and_left_alone(source, tmp_path):
    (tmp_path / "mla").mkdir()
    (tmp_path / "mla" / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="already holds something"):
        convert_checkpoint(source, token_windows(), tmp_path / "mla", kv_lora_rank=RANK)
    assert entries(tmp_path) == ["mla"]
    assert entries(tmp_path / "mla") == ["note"]


def test_locked_folder_is_refused(source, tmp_path):
    with (
        folder_lock(tmp_path / "mla"),
        pytest.raises(CheckpointError, match="another run"),
    ):
        convert_checkpoint(source, token_windows(), tmp_path / "mla", kv_lora_rank=RANK)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_while_writing_leaves_nothing(source, tmp_path, monkeypatch, error):
    def fail(path, data):
        if path.name == REPORT_NAME:
            raise error
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    monkeypatch.setattr("quantmla.convert.checkpoint.atomic_write", fail)
    want = (CheckpointError, "disk is full") if isinstance(error, OSError) else (type(error), "^$")
    with pytest.raises(want[0], match=want[1]):
        convert_checkpoint(source, token_windows(2), tmp_path / "mla", kv_lora_rank=RANK)
    assert entries(tmp_path) == []


def test_weights_that_are_not_finite_name_the_layer(tmp_path):
    model = tiny_llama()
    model.model.layers[1].self_attn.v_proj.weight.data[3, 4] = torch.inf
    source = load_source(write_llama(tmp_path / "llama", model))
    with pytest.raises(CalibrationError, match=r"layers\.1\.self_attn, v_proj"):
        convert_checkpoint(source, token_windows(2), tmp_path / "mla", kv_lora_rank=RANK)
    assert entries(tmp_path) == ["llama"]


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (torch.empty(0, 8, dtype=torch.int64), "no calibration windows"),
        (torch.tensor([[1, 96]]), "outside the vocabulary"),
    ],
)
def test_unusable_windows_are_refused(source, tmp_path, windows, message):
    with pytest.raises(CalibrationError, match=message):
        convert_checkpoint(source, windows, tmp_path / "mla", kv_lora_rank=RANK)
