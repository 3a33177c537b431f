"""Convert a loaded source model and write the native MLA checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantmla
from quantmla.checkpoint.families import AttentionNames
from quantmla.checkpoint.fusedir import refuse_out
from quantmla.checkpoint.lock import folder_lock
from quantmla.checkpoint.reader import CONFIG_NAME, INDEX_NAME
from quantmla.checkpoint.writer import staged_folder
from quantmla.convert.gqa import SINK_WEIGHT, GQAWeights, convert_layer
from quantmla.convert.source import SourceModel
from quantmla.errors import CalibrationError
from quantmla.files import atomic_write, storage_errors

KV_LORA_RANK = 256
# Windows of the calibration text; short ones give the refit more first tokens to learn from.
CALIBRATION_WINDOWS = 16
WINDOW_TOKENS = 512
DTYPE = torch.bfloat16
MAX_SHARD_BYTES = 1 << 30
REPORT_NAME = "conversion.json"

Progress = Callable[[str, int, int], None]


def convert_checkpoint(
    source: SourceModel,
    windows: Tensor,
    out: str | Path,
    *,
    kv_lora_rank: int = KV_LORA_RANK,
    sink_weight: float = SINK_WEIGHT,
    provenance: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Convert a model without training and write it as a DeepseekV3ForCausalLM folder in BF16.

    The attention tensors and all others lie in different shards, so that fusing later rewrites only
    the former. Work happens in a temporary folder that is renamed at the end.

    Args:
        source: the loaded model.
        windows: [n, T, int64] calibration tokens, one text window a row.
        out: result; must not exist, or be an empty folder.
        kv_lora_rank: latent width; the shared RoPE key is one head wide.
        sink_weight: weight of each window's first token in the refit after the norm.
        provenance: what is known about the windows, echoed into the report.
        progress: called with (layer, layers done, layers in all).

    Returns:
        The report, which is also in conversion.json: sizes, settings, statistics of each layer.

    Raises:
        CalibrationError: windows or activations that cannot be used, with the layer.
        CheckpointError: `out` cannot be written.

    Source: own (models_data.md 5.1).
    """
    out = Path(out).absolute()
    with folder_lock(out), storage_errors(out):
        refuse_out(source.path.absolute(), out)
        config = mla_config(source.model.config, kv_lora_rank)
        attention, stats = convert_attention(
            source.model, windows, kv_lora_rank, sink_weight=sink_weight, progress=progress
        )
        report = {
            "source": source.path.name,
            "kv_lora_rank": kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "cached_numbers_before": 2 * source.model.config.num_key_value_heads * head_dim(config),
            "cached_numbers_after": kv_lora_rank + config.qk_rope_head_dim,
            "sink_weight": sink_weight,
            "calibration": {"windows": list(windows.shape), **(provenance or {})},
            "quantmla": quantmla.__version__,
            "layers": stats,
        }
        _write_folder(out, source, config, attention, report)
    return report


def head_dim(config: Any) -> int:
    """Size of a source head, which all three head sizes of the result take over."""
    return config.qk_rope_head_dim


def mla_config(source: Any, kv_lora_rank: int) -> Any:
    """Return the DeepseekV3Config of the result: dense, half-split RoPE, tied as the source is."""
    from transformers import DeepseekV3Config

    theta = source.rope_parameters["rope_theta"]
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=source.head_dim,
        qk_nope_head_dim=source.head_dim,
        v_head_dim=source.head_dim,
        first_k_dense_replace=source.num_hidden_layers,
        num_nextn_predict_layers=0,
        rope_interleave=False,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        hidden_act=source.hidden_act,
        attention_bias=False,
        tie_word_embeddings=source.tie_word_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
        dtype=DTYPE,
    )


def convert_attention(
    model: Any,
    windows: Tensor,
    kv_lora_rank: int,
    *,
    sink_weight: float = SINK_WEIGHT,
    dtype: torch.dtype = DTYPE,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Convert every layer from the inputs it sees while the source model reads the windows.

    Each layer is converted as soon as its inputs are there, so those of one layer are held at once.

    Args:
        model: the source LlamaForCausalLM.
        windows: [n, T, int64].
        kv_lora_rank: latent width.
        sink_weight: weight of each window's first token.
        dtype: of the result.
        progress: called with (layer, layers done, layers in all).

    Returns:
        Tensors by their names in the result, and the statistics of each layer.

    Raises:
        CalibrationError: empty windows, tokens outside the vocabulary, or an unusable layer.
    """
    _check_windows(windows, model.config.vocab_size)
    layers = model.model.layers
    tensors: dict[str, Tensor] = {}
    stats: list[dict[str, float]] = []

    def convert_one(norm: Any, args: Any, inputs: Tensor) -> None:
        index = len(stats)
        prefix = f"model.layers.{index}.self_attn"
        if progress:
            progress(prefix, index, len(layers))
        attention = layers[index].self_attn
        weights = GQAWeights(
            query=attention.q_proj.weight,
            key=attention.k_proj.weight,
            value=attention.v_proj.weight,
            head_dim=attention.head_dim,
        )
        result = convert_layer(
            weights, inputs, kv_lora_rank, where=prefix, sink_weight=sink_weight, dtype=dtype
        )
        names = AttentionNames(prefix, low_rank_q=False, has_bias=False)
        tensors[names.q] = result.query
        tensors[names.kv_a] = result.kv_a
        tensors[names.kv_a_norm] = result.kv_a_norm
        tensors[names.kv_b] = result.kv_b
        tensors[names.o] = attention.o_proj.weight.to(dtype)
        stats.append(result.stats)

    hooks = [layer.input_layernorm.register_forward_hook(convert_one) for layer in layers]
    try:
        with torch.no_grad():
            model.model(windows, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if progress:
        progress("", len(layers), len(layers))
    return tensors, stats


def _check_windows(windows: Tensor, vocab_size: int) -> None:
    if windows.ndim != 2 or not windows.numel():
        raise CalibrationError(
            "there are no calibration windows",
            expected="[n, T] token ids with n and T positive",
            got=str(list(windows.shape)),
            next_step="give a longer --text",
        )
    if not 0 <= int(windows.min()) <= int(windows.max()) < vocab_size:
        raise CalibrationError(
            "calibration tokens lie outside the vocabulary",
            expected=f"0 to {vocab_size - 1}",
            got=f"{int(windows.min())} to {int(windows.max())}",
            next_step="use the tokenizer of the source model",
        )


def _write_folder(
    out: Path, source: SourceModel, config: Any, attention: dict[str, Tensor], report: dict
) -> None:
    """Write the whole folder beside `out` and rename it; any failure or Ctrl-C removes it."""
    others = {
        name: tensor.to(DTYPE)
        for name, tensor in source.model.state_dict().items()
        if ".self_attn." not in name and not _is_tied(name, config)
    }
    # transformers 4 reads the base only from here, and would silently take 10,000.
    values = config.to_diff_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    with staged_folder(out) as temporary:
        _write_shards(temporary, [*_split(attention), *_split(others)])
        source.tokenizer.save_pretrained(temporary)
        _write_json(temporary / CONFIG_NAME, values)
        _write_json(temporary / "generation_config.json", generation)
        _write_json(temporary / REPORT_NAME, report)


def _is_tied(name: str, config: Any) -> bool:
    return name == "lm_head.weight" and config.tie_word_embeddings


def _split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Cut tensors into shards of at most MAX_SHARD_BYTES, in order."""
    shards: list[dict[str, Tensor]] = []
    room_bytes = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room_bytes:
            shards.append({})
            room_bytes = MAX_SHARD_BYTES
        shards[-1][name] = tensor.contiguous()
        room_bytes -= tensor.nbytes
    return shards


def _write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    from safetensors.torch import save

    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        atomic_write(folder / file, save(tensors, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, file)
    total_bytes = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / INDEX_NAME, index)


def _write_json(path: Path, value: dict) -> None:
    atomic_write(path, json.dumps(value, indent=2) + "\n")
