"""What users write and what is written to disk: bit scheme, recipe and the `quantmla` block.

All models are strict (no coercion), frozen, refuse unknown fields and raise SchemeError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from quantmla.errors import SchemeError
from quantmla.strict import (
    BITS,
    Bits,
    Clip,
    Digest,
    Group,
    LearningRate,
    Method,
    Pairing,
    StrictModel,
    Tokens,
    Zero,
    read_yaml,
)

FORMAT_VERSION = 2
PLAIN_FORMAT_VERSION = 1  # of a block without shift and feedback, which older readers know
LAYOUT_VERSION = 2
MAX_RECIPE_BYTES = 1 << 20
LEARNED = ("quantmla", "quantmla_plus")
EXTENSIONS = ("dither", "content_shift", "rope_shift", "rope_feedback")

_SCHEME_NAME = re.compile(r"c(\d+)r(\d+)")


class KVScheme(StrictModel):
    """How one cached token is stored: bits of both paths, group, zero mode and BF16 protection.

    Args:
        content_bits: bits of a latent channel.
        rope_bits: bits of a channel of the rotated key.
        group: channels that share one scale and zero; the last group may be short.
        zero: `zp8` (bf16 scale, u8 zero) or `min16` (bf16 scale, bf16 minimum).
        sink_tokens: first tokens of a sequence that are read in BF16.
        window_tokens: most recent tokens, the query's own included, that are read in BF16.
    Source: algorithms.md sections 3.1 and 6.1.
    """

    content_bits: Bits
    rope_bits: Bits
    group: Group = 64
    zero: Zero = "zp8"
    sink_tokens: Tokens = 4
    window_tokens: Tokens = 128

    @classmethod
    def parse(cls, name: str, **settings) -> KVScheme:
        """Read a scheme from its short name.

        Args:
            name: such as `c4r4`, `C2R4` or `c4-r4`.
            settings: any other field of KVScheme.
        Returns:
            KVScheme.
        Raises:
            SchemeError: the name is not known; the valid spellings are listed.
        Source: own.
        """
        plain = name.lower().replace("-", "").replace("_", "") if isinstance(name, str) else ""
        match = _SCHEME_NAME.fullmatch(plain)
        bits = tuple(int(number) for number in match.groups()) if match else ()
        if not bits or any(b not in BITS for b in bits):
            raise SchemeError(
                "this scheme name is not known",
                where="scheme",
                expected=f"c<bits>r<bits> with bits from {', '.join(map(str, BITS))}, as in c4r4",
                got=repr(name),
                next_step="use c4r4 or c2r4, or any other pair of these bits",
            )
        return cls(content_bits=bits[0], rope_bits=bits[1], **settings)

    @property
    def name(self) -> str:
        """Short name, such as `c4r4`."""
        return f"c{self.content_bits}r{self.rope_bits}"


class TrainConfig(StrictModel):
    """Optimiser settings of the learned transforms (Adam, cosine, linear warmup).

    Args:
        lr_rotation, lr_scale: peak rates of R_C and log S_C.
        lr_angle, lr_rope_scale: peak rates of the R_P angles and log S_P.
        lr_clip: peak rate of the clip logits, where clipping is learned.
        lr_shift: peak rate of shifts, in root mean squares of what is shifted.
        warmup_steps: linear warmup of each phase.
        curvature_steps: steps on the first-order output error, before the exact content objective
            and after the position-score objective; 0 leaves the objectives of the study alone.
        curvature_probes: random output vectors a window that sample that error.
        curvature_batch_tokens: tokens of a content step.
        curvature_windows: how many training windows are sampled, and how many held-out ones.
    Source: algorithms.md section 2.6; rates measured, curvature phases own.
    """

    lr_rotation: LearningRate = 3e-3
    lr_scale: LearningRate = 5e-3
    lr_angle: LearningRate = 3e-2
    lr_rope_scale: LearningRate = 1.5e-2
    lr_clip: LearningRate = 5e-2
    lr_shift: LearningRate = 2e-2
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 16
    curvature_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 200
    curvature_probes: Annotated[int, Field(ge=1, le=1024)] = 2
    curvature_batch_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 2048
    curvature_windows: Annotated[int, Field(ge=1, le=1_000_000)] = 32


def method_defaults(method: str) -> dict[str, Any]:
    """Return the recipe fields whose defaults depend on the method.

    Args:
        method: of the recipe.
    Returns: extensions and clip ratios.
    Source: own.
    """
    plus = method == "quantmla_plus"
    clip = "learned" if plus else None
    return dict.fromkeys(EXTENSIONS, plus) | {"clip_content": clip, "clip_rope": clip}


class Recipe(StrictModel):
    """Everything that decides a calibration, apart from the model and the text.

    Args:
        method: which transforms are used.
        scheme: KVScheme, or its short name.
        clip_content: clip ratio of the latent: a number, `learned`, or None for no clipping.
        clip_rope: the same for the rotated key.
        sequences: calibration windows.
        heldout_sequences: windows that pick the step and are never trained on.
        sequence_tokens: tokens of a window.
        steps: optimiser steps of a layer and path.
        eval_every: steps between two looks at the held-out windows.
        seed: seeds every random choice.
        protect: which keys stay BF16 in the training objective; `policy` follows the cache.
        dither: the curvature phase descends on the expected error of independent rounding.
        content_shift: subtract a constant latent before it is cached.
        rope_shift: subtract a constant key after RoPE.
        rope_feedback: round the rotated key with error feedback.
        train: optimiser settings.

    The extensions of the study (`dither` to `rope_feedback`) and learned clips are on by default
    for the method `quantmla_plus`, and off for all others; baselines have none of them.
    Source: algorithms.md section 2.5; extensions own.
    """

    method: Method = "quantmla"
    scheme: KVScheme
    clip_content: Clip = None
    clip_rope: Clip = None
    sequences: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    heldout_sequences: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    sequence_tokens: Annotated[int, Field(ge=2, le=1 << 20)] = 2048
    steps: Annotated[int, Field(ge=0, le=1_000_000)] = 300
    eval_every: Annotated[int, Field(ge=1, le=1_000_000)] = 25
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    protect: Literal["none", "sink", "policy"] = "policy"
    dither: bool = False
    content_shift: bool = False
    rope_shift: bool = False
    rope_feedback: bool = False
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_method(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("method") == "quantmla_plus":
            return method_defaults("quantmla_plus") | dict(data)
        return data

    @model_validator(mode="after")
    def _extensions_are_learned(self) -> Recipe:
        used = [name for name in EXTENSIONS if getattr(self, name)]
        if used and self.method not in LEARNED:
            raise SchemeError(
                "this method has no such extension",
                where=f"Recipe.{used[0]}",
                expected=f"one of the methods {', '.join(LEARNED)}",
                got=f"method {self.method}",
                next_step=f"leave out {', '.join(used)}",
            )
        return self

    @field_validator("scheme", mode="before")
    @classmethod
    def _scheme_by_name(cls, value: Any) -> Any:
        return KVScheme.parse(value) if isinstance(value, str) else value

    @classmethod
    def from_yaml(cls, path: str | Path) -> Recipe:
        """Read a recipe file.

        Args:
            path: YAML file, at most 1 MiB.
        Returns:
            Recipe.
        Raises:
            SchemeError: the file cannot be read, is not YAML, or a field is wrong.
        Source: own.
        """
        data = read_yaml(Path(path), MAX_RECIPE_BYTES)
        if not isinstance(data, dict):
            raise SchemeError(
                "a recipe file must hold a mapping",
                where=path,
                expected="lines such as `method: quantmla`",
                got=type(data).__name__,
                next_step=f"write one field a line; fields: {', '.join(cls.model_fields)}",
            )
        return cls.model_validate(data)

    def to_yaml(self) -> str:
        """The recipe as YAML text that `from_yaml` reads back to an equal recipe."""
        import yaml

        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def sha256(self) -> str:
        """Hex digest of the canonical JSON of all fields, defaults included."""
        return canonical_sha256(self.model_dump(mode="json"))


def canonical_sha256(data: Any) -> str:
    """Hex digest of plain JSON data in its one canonical spelling."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class LayerBits(StrictModel):
    """Bits of one cache layer where they differ from the rest; None keeps the common value."""

    content_bits: Bits | None = None
    rope_bits: Bits | None = None


class PathFormat(StrictModel):
    """Bits and group of one path in the `quantmla` block."""

    bits: Bits
    group: Group = 64


class QuantMLABlock(StrictModel):
    """The `quantmla` block of config.json: how the cache of a fused checkpoint is written and read.

    Args:
        format: version of this block.
        method: method that made the checkpoint.
        content: bits and group of the latent.
        rope: bits and group of the rotated key.
        zero: zero mode of both paths.
        layout: version of the page layout.
        rope_pairing: pairing in the weights.
        rope_pairing_cache: pairing in the cached key.
        rope_online: transform that the cache applies to keys and queries after RoPE, or None.
        clip: whether quantmla.safetensors holds clip ratios.
        shift: whether it holds constants that are subtracted from what is cached.
        rope_feedback: whether it holds the error feedback that rounds the rotated key.
        writer_sha256: digest of these tensors, so that no other file can stand in for theirs.
        norm_eps: epsilon of kv_a_layernorm that the transforms were made for.
        per_layer: overrides by cache layer index, written as a string.
        sink_tokens: first tokens of a sequence that are read in BF16.
        window_tokens: most recent tokens, the query's own included, that are read in BF16.
        recipe_sha256: digest of the recipe.
        fingerprint: digest that every reader of the cache compares.
    Source: architecture.md section 3.
    """

    format: Annotated[int, Field(ge=1)] = PLAIN_FORMAT_VERSION
    method: Method
    content: PathFormat
    rope: PathFormat
    zero: Zero = "zp8"
    layout: Annotated[int, Field(ge=1)] = LAYOUT_VERSION
    rope_pairing: Pairing
    rope_pairing_cache: Pairing
    rope_online: Literal["hadamard"] | None = None
    clip: bool = False
    shift: bool = False
    rope_feedback: bool = False
    writer_sha256: Digest | None = None
    norm_eps: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    per_layer: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,4})$")], LayerBits] = Field(
        default_factory=dict
    )
    sink_tokens: Tokens = 4
    window_tokens: Tokens = 128
    recipe_sha256: Digest | None = None
    fingerprint: Digest | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_versions(cls, data: Any) -> Any:
        # Before the fields: a newer version may have fields that this one does not know.
        if isinstance(data, Mapping):
            known = {"format": (PLAIN_FORMAT_VERSION, FORMAT_VERSION), "layout": (LAYOUT_VERSION,)}
            for name, versions in known.items():
                if data.get(name, versions[0]) not in versions:
                    raise SchemeError(
                        f"the quantmla {name} version is not known",
                        where=f"config.json: quantmla.{name}",
                        expected=" or ".join(map(str, versions)),
                        got=repr(data[name]),
                        next_step="install the version of quantmla that wrote this checkpoint",
                    )
        return data

    @model_validator(mode="after")
    def _consistent(self) -> QuantMLABlock:
        if self.format == PLAIN_FORMAT_VERSION and (self.shift or self.rope_feedback):
            raise SchemeError(
                "a quantmla block of this format has neither shift nor feedback",
                where="config.json: quantmla.format",
                expected=FORMAT_VERSION,
                got=self.format,
                next_step="fuse the checkpoint again",
            )
        if self.content.group != self.rope.group:
            raise SchemeError(
                "both paths of a quantmla block must use one group size",
                where="config.json: quantmla.rope.group",
                expected=self.content.group,
                got=self.rope.group,
                next_step="write the checkpoint again with one group size",
            )
        return self

    @classmethod
    def from_config(cls, config) -> QuantMLABlock:
        """Read the block of a fused checkpoint.

        Args:
            config: dict (config.json) or transformers config.
        Returns:
            QuantMLABlock.
        Raises:
            SchemeError: there is no block, its version is unknown or a field is wrong.
        Source: own.
        """
        in_dict = isinstance(config, Mapping)
        block = config.get("quantmla") if in_dict else getattr(config, "quantmla", None)
        if not isinstance(block, dict):
            raise SchemeError(
                "this checkpoint carries no quantmla block",
                where="config.json: quantmla",
                expected="the block that `quantmla calibrate` writes",
                got="nothing" if block is None else type(block).__name__,
                next_step="calibrate the model first, or name a scheme explicitly",
            )
        return cls.model_validate(block)

    def to_config(self) -> dict[str, Any]:
        """The block as plain JSON data for config.json, with the fields of its format."""
        newer = {"shift", "rope_feedback"} if self.format == PLAIN_FORMAT_VERSION else None
        return self.model_dump(mode="json", exclude=newer)

    @property
    def has_writer(self) -> bool:
        """Whether there is a quantmla.safetensors."""
        return self.clip or self.shift or self.rope_feedback

    def scheme(self, layer: int) -> KVScheme:
        """The scheme of one cache layer, overrides applied.

        Args:
            layer: cache layer index.
        Returns:
            KVScheme.
        Source: own.
        """
        override = self.per_layer.get(str(layer), LayerBits())
        return KVScheme(
            content_bits=override.content_bits or self.content.bits,
            rope_bits=override.rope_bits or self.rope.bits,
            group=self.content.group,
            zero=self.zero,
            sink_tokens=self.sink_tokens,
            window_tokens=self.window_tokens,
        )
