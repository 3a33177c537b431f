"""Load the model to be converted: a Hugging Face folder or a GGUF file, in float32."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.reader import CONFIG_NAME, CheckpointReader
from quantmla.errors import CheckpointError, UnsupportedModelError
from quantmla.loading import load_model, load_tokenizer, quiet_loading


@dataclass(frozen=True)
class SourceModel:
    """A model to convert.

    Args:
        model: LlamaForCausalLM in float32 on the CPU.
        tokenizer: its tokenizer.
        path: the folder or GGUF file it came from.
    """

    model: Any
    tokenizer: Any
    path: Path


def load_source(path: str | Path) -> SourceModel:
    """Load a Llama-style model and its tokenizer from disk; nothing is downloaded.

    Args:
        path: Hugging Face folder with safetensors, a GGUF file, or a folder with one GGUF file.

    Returns:
        SourceModel.

    Raises:
        CheckpointError: nothing there, a damaged file, missing tensors, or a GGUF without the
            packages to read it.
        UnsupportedModelError: not a model that `check_source` accepts.

    Source: own.
    """
    path = Path(path)
    gguf = find_gguf(path)
    if gguf is None:
        check_source(read_json(path / CONFIG_NAME))
        CheckpointReader(path)  # truncated, missing and stray shards, by name
        folder, options = path, {"use_safetensors": True}
    else:
        require_gguf_packages(gguf)
        folder, options = gguf.parent, {"gguf_file": gguf.name}
    from transformers import AutoModelForCausalLM

    with quiet_loading():
        tokenizer = load_tokenizer(folder, **({"gguf_file": gguf.name} if gguf else {}))
    model = load_model(AutoModelForCausalLM, folder, dtype=torch.float32, **options)
    check_source(model.config.to_dict())
    return SourceModel(model.eval(), tokenizer, gguf or path)


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path means, or None for a Hugging Face folder.

    Raises:
        CheckpointError: neither a GGUF file nor a folder with config.json or exactly one GGUF file.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if (path / CONFIG_NAME).is_file():
        return None
    if len(found) != 1:
        raise CheckpointError(
            "there is no model to convert here",
            where=path,
            expected=f"a .gguf file, or a folder with {CONFIG_NAME} or with one .gguf file",
            got=f"{len(found)} .gguf files" if path.is_dir() else "no such folder or GGUF file",
            next_step="check the path",
        )
    return found[0]


def require_gguf_packages(gguf: Path) -> None:
    """Raise CheckpointError unless transformers has what it needs to read GGUF files."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            "reading GGUF files needs packages that are not installed",
            where=gguf,
            expected="gguf and accelerate",
            got=f"no {' and no '.join(missing)}",
            next_step="pip install 'quantmla[demo]'",
        )


def check_source(config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError, with the reason, unless a config can be converted."""
    reason = _reason_to_refuse(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"this model cannot be converted: {reason}",
            where=config.get("model_type"),
            expected="a Llama model: no biases, default RoPE, one head size",
            got=config.get("model_type"),
            next_step="use a Llama-style checkpoint such as SmolLM2",
        )


def _reason_to_refuse(config: dict[str, Any]) -> str | None:
    if config.get("kv_lora_rank") is not None:
        return "it already is an MLA model"
    if config.get("model_type") != "llama":
        return "only model_type llama is known to have no query or key norm, window or bias"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "its projections have biases"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "its RoPE is scaled"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        return "its RoPE covers only part of a head"
    return None
