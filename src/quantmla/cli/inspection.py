"""What a checkpoint is before anything is done to it: MLA or not, bytes, work, changes."""

from __future__ import annotations

from dataclasses import asdict
from math import inf
from pathlib import Path

from quantmla.cache.accounting import model_bytes_per_token, other_formats, scheme_table
from quantmla.cache.flops import break_even_tokens, prefill_table
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.reader import CONFIG_NAME
from quantmla.cli.common import table
from quantmla.config import KVScheme, QuantMLABlock
from quantmla.dims import BF16_BYTES, MLADims
from quantmla.errors import UnsupportedModelError

DEFAULT_SCHEMES = ("c8r8", "c4r4", "c3r4", "c2r4")
CONTENT_KEYS = ("kv_a", "kv_a_bias", "kv_a_norm", "kv_b")
ROPE_KEYS = ("kv_a", "kv_a_bias", "q")
PREFILL_TOKENS = (512, 4096, 32768, 131072)


def inspect_checkpoint(path: str | Path, schemes: list[str] | None = None) -> dict:
    """Describe a checkpoint from its config alone; no weight is read.

    Args:
        path: checkpoint folder, or a config.json.
        schemes: names to tabulate; a usual selection by default.
    Returns: JSON data: mla, reason, model_type, dims, bytes_per_token, schemes, other_formats,
        prefill (FLOP of one layer, absorbed and expanded), changes, quantmla.
    Raises: CheckpointError if there is no readable config; SchemeError for an unknown scheme name.
    Source: own.
    """
    path = Path(path)
    config_path = path if path.is_file() else path / CONFIG_NAME
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
        "other_formats": other_formats(dims),
        "prefill": {
            "break_even_tokens": even if (even := break_even_tokens(dims)) < inf else None,
            "lengths": prefill_table(dims, PREFILL_TOKENS),
        },
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


def print_inspection(result: dict) -> None:
    """Print what `inspect_checkpoint` found as text and tables.

    Args: result: JSON data of inspect_checkpoint.
    Source: own.
    """
    if not result["mla"]:
        print(f"{result['path']}: not usable. {result['reason']}")
        return
    dims = result["dims"]
    print(f"{result['path']}: {result['model_type']}, multi-head latent attention")
    print(
        f"latent {dims['kv_lora_rank']} + rope {dims['qk_rope_head_dim']} channels, "
        f"{dims['num_heads']} heads, {dims['num_cache_layers']} cache layers, "
        f"query rank {dims['q_lora_rank'] or 'full'}, "
        f"rope pairs {result['rope_pairing']} in the weights, "
        f"{result['rope_pairing_cache']} in the cache"
    )
    now = result["bytes_per_token"]
    print(
        f"BF16 latent: {now['layer']:,} bytes a token and layer, {now['model']:,} in the model; "
        f"expanded keys and values would take {now['expanded_layer']:,} a layer"
    )
    columns = ["scheme", "bytes/token/layer", "bytes/token", "BF16 / packed", "resident 4K", "128K"]
    rows = [
        [
            row["scheme"],
            row["bytes_per_token"],
            row["model_bytes_per_token"],
            row["ratio"],
            row["resident_ratio"]["4096"],
            row["resident_ratio"]["131072"],
        ]
        for row in result["schemes"]
    ]
    table("Packed cache by scheme", columns, rows)
    columns = ["scheme", "bytes/record", "resident 4K", "128K"]
    rows = [
        [row["scheme"], row["record_bytes"], *row["study_ratio"].values()]
        for row in result["schemes"]
    ]
    table("As the study counts: one padded record a token", columns, rows)
    rows = [list(row.values()) for row in result["other_formats"]]
    table("Other formats, padding not counted", ["format", "bytes/token/layer", "BF16 / it"], rows)
    _print_prefill(result["prefill"])
    for path, names in result["changes"].items():
        print(f"the {path} path changes, in every layer: {', '.join(names)}")
    if result["quantmla"]:
        block = result["quantmla"]
        print(f"already fused: {block['method']}, fingerprint {block['fingerprint']}")


def _print_prefill(prefill: dict) -> None:
    columns = ["prompt tokens", "absorbed GFLOP", "expanded GFLOP", "absorbed / expanded"]
    rows = [
        [row["tokens"], row["absorbed_flops"] / 1e9, row["expanded_flops"] / 1e9, row["ratio"]]
        for row in prefill["lengths"]
    ]
    table("Attention of a prefill in one layer", columns, rows)
    even = prefill["break_even_tokens"]
    if even is None:
        print("absorbed attention never costs more than expanded")
    else:
        print(
            f"behind a long history, expanding it costs less from chunks of {even:,.0f} tokens on"
        )
