"""Convert a model from its files and a calibration text: all that `quantmla convert` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quantmla.checkpoint.fusedir import refuse_out
from quantmla.convert.checkpoint import (
    CALIBRATION_WINDOWS,
    DTYPE,
    KV_LORA_RANK,
    WINDOW_TOKENS,
    convert_checkpoint,
    head_dim,
    mla_config,
)
from quantmla.convert.source import load_source
from quantmla.text import cut_windows, open_text

# Tokenised text with <unk>; the raw splits stay for calibration and test.
CONVERSION_TEXT = "wikitext2-valid"


def plan_conversion(source: Path, out: Path, kv_lora_rank: int = KV_LORA_RANK) -> dict:
    """Say what a conversion would write, from the loaded source; nothing is computed or written.

    Args: source, out, kv_lora_rank: as for convert_model.
    Returns: sizes of the result, in numbers a token and layer, parameters and bytes.
    Raises: CheckpointError or UnsupportedModelError, as the conversion itself would.
    Source: own.
    """
    refuse_out(source.absolute(), out.absolute())
    model = load_source(source).model
    config = mla_config(model.config, kv_lora_rank)
    width, heads, hidden = head_dim(config), config.num_attention_heads, config.hidden_size
    cached = kv_lora_rank + config.qk_rope_head_dim
    attention = hidden * (3 * heads * width + cached) + kv_lora_rank * (2 * heads * width + 1)
    others = sum(p.numel() for name, p in model.named_parameters() if ".self_attn." not in name)
    parameters = others + attention * config.num_hidden_layers
    return {
        "source": source.name,
        "layers": config.num_hidden_layers,
        "cached_numbers_before": 2 * model.config.num_key_value_heads * width,
        "cached_numbers_after": cached,
        "parameters_before": sum(p.numel() for p in model.parameters()),
        "parameters_after": parameters,
        "disk_bytes": parameters * DTYPE.itemsize,
        "calibration_tokens": CALIBRATION_WINDOWS * WINDOW_TOKENS,
    }


def convert_model(
    source: Path,
    out: Path,
    *,
    text: str = CONVERSION_TEXT,
    kv_lora_rank: int = KV_LORA_RANK,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict:
    """Convert a Llama-style model to a native MLA checkpoint, without training.

    Args:
        source: Hugging Face folder or GGUF file.
        out: folder to write.
        text: slice name or file for calibration.
        kv_lora_rank: latent channels of the result.
        progress: called with (what, layers done, layers in all).
    Returns: the report of the conversion.
    Raises: CheckpointError, UnsupportedModelError, CalibrationError or TextError.
    Source: models_data.md 5.1.
    """
    refuse_out(source.absolute(), out.absolute())
    corpus = open_text(text)
    loaded = load_source(source)
    windows = cut_windows(
        loaded.tokenizer,
        corpus,
        window_tokens=WINDOW_TOKENS,
        tokens=CALIBRATION_WINDOWS * WINDOW_TOKENS,
        next_step="give a longer --text",
    )
    return convert_checkpoint(
        loaded,
        windows.ids,
        out,
        kv_lora_rank=kv_lora_rank,
        provenance=windows.provenance(),
        progress=progress,
    )
