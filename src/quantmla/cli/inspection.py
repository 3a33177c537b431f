"""What a checkpoint is before anything is done to it: MLA or not, bytes, what would change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from quantmla.cache.accounting import model_bytes_per_token, scheme_table
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.header import read_json
from quantmla.config import KVScheme, QuantMLABlock
from quantmla.dims import BF16_BYTES, MLADims
from quantmla.errors import UnsupportedModelError

DEFAULT_SCHEMES = ("c8r8", "c4r4", "c3r4", "c2r4")
CONTENT_KEYS = ("kv_a", "kv_a_bias", "kv_a_norm", "kv_b")
ROPE_KEYS = ("kv_a", "kv_a_bias", "q")


def inspect_checkpoint(path: str | Path, schemes: list[str] | None = None) -> dict:
    """Describe a checkpoint from its config alone; no weight is read.

    Args:
        path: checkpoint folder, or a config.json.
        schemes: names to tabulate; a usual selection by default.
    Returns: JSON data: mla, reason, model_type, dims, bytes_per_token, schemes, changes, quantmla.
    Raises: CheckpointError if there is no readable config; SchemeError for an unknown scheme name.
    Source: own.
    """
    path = Path(path)
    config_path = path if path.is_file() else path / "config.json"
    config = read_json(config_path)
    result = {"path": str(path), "model_type": config.get("model_type"), "mla": False}
    try:
        family, dims = family_of(config), MLADims.from_config(config)
    except UnsupportedModelError as error:
        return result | {"reason": error.what}
    expanded = dims.num_heads * (dims.qk_head_dim + dims.v_head_dim) * BF16_BYTES
    names = family.attention_names(config)[0].fusable()
    parsed = [KVScheme.parse(name) for name in schemes or DEFAULT_SCHEMES]
    return result | {
        "mla": True,
        "reason": None,
        "dims": asdict(dims),
        "rope_pairing": family.rope_pairing(config),
        "rope_pairing_cache": family.rope_pairing_cache(config),
        "latent_scale": family.latent_scale(config),
        "bytes_per_token": {
            "layer": dims.bf16_bytes_per_token,
            "model": model_bytes_per_token(dims),
            "expanded_layer": expanded,
        },
        "schemes": scheme_table(dims, parsed),
        "changes": {
            "content": [_short(names[key]) for key in CONTENT_KEYS if key in names],
            "rope": [_short(names[key]) for key in ROPE_KEYS if key in names],
        },
        "quantmla": _block(config),
    }


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _block(config: dict) -> dict | None:
    return QuantMLABlock.from_config(config).to_config() if "quantmla" in config else None
