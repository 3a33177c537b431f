"""The model card of a fused checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantmla.config import QuantMLABlock
    from quantmla.dims import MLADims

CARD = """\
---
base_model: {base}
library_name: transformers
tags:
- quantmla
- kv-cache
---

# {name}

{base} with its attention weights expressed in other coordinates, in which the latent KV cache
survives {scheme} quantisation. The weights compute the same function as before (up to rounding of
the stored dtype), and any engine loads this folder as an ordinary `{model_type}` checkpoint.

| | BF16 cache | {scheme} cache |
|---|---|---|
| bytes per token, all {layers} cache layers | {before:,} | {after:,} |
| bytes per token and layer | {before_layer:,} | {after_layer} |

Method `{method}`, groups of {group} channels, zero mode `{zero}`. The first {sink} and the last
{window} tokens of a sequence stay BF16 and are not in the table.

## Use

```python
from transformers import AutoModelForCausalLM
from quantmla import QuantMLACache

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="bfloat16")
cache = QuantMLACache.from_config(model.config)
model.generate(**inputs, **cache.as_kwargs(model))
```

Without quantmla the model runs with its ordinary BF16 cache.

## Before you rely on it

A packed cache changes outputs. Safety and refusal behaviour of the base model was not measured
here: evaluate again, through the packed cache, on the tasks and languages that matter to you. The
licence and the limits of the base model still hold{base_card}.

`quantmla verify` checks this folder against `quantmla_manifest.json`.
Fingerprint `{fingerprint}`, recipe `{recipe}`.
"""


def model_card(
    name: str, base: str, model_type: str, dims: MLADims, block: QuantMLABlock, has_base_card: bool
) -> str:
    """Return the README.md of a fused checkpoint.

    Args:
        name: folder name of the result.
        base: name of the source model.
        model_type: of the source config.
        dims: its dimensions.
        block: the `quantmla` block, with fingerprint.
        has_base_card: whether the source card lies beside as README.base.md.

    Raises:
        SchemeError: a path does not fill whole bytes at this scheme.

    Source: own.
    """
    layer_bytes = bytes_per_token(dims, block)
    after, after_layer = sum(layer_bytes), min(layer_bytes)
    if len(set(layer_bytes)) > 1:
        after_layer = f"{min(layer_bytes):g} to {max(layer_bytes):g}"
    return CARD.format(
        name=name,
        base=base,
        model_type=model_type,
        scheme=block.scheme(0).name if len(set(layer_bytes)) == 1 else "mixed-bit",
        layers=dims.num_cache_layers,
        before=dims.bf16_bytes_per_token * dims.num_cache_layers,
        after=int(after) if float(after).is_integer() else float(after),
        before_layer=dims.bf16_bytes_per_token,
        after_layer=after_layer if isinstance(after_layer, str) else f"{after_layer:g}",
        method=block.method,
        group=block.content.group,
        zero=block.zero,
        sink=block.sink_tokens,
        window=block.window_tokens,
        base_card=" (`README.base.md`)" if has_base_card else "",
        fingerprint=block.fingerprint,
        recipe=block.recipe_sha256 or "none",
    )


def bytes_per_token(dims: MLADims, block: QuantMLABlock) -> list[float]:
    """Return the stored bytes of one packed token in each cache layer, page padding included."""
    from quantmla.cache.layout import PageLayout

    return [
        float(PageLayout(dims.kv_lora_rank, dims.qk_rope_head_dim, block.scheme(layer)).token_bytes)
        for layer in range(dims.num_cache_layers)
    ]
