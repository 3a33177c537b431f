"""What is where in each MLA family: one row per `model_type`, and a reason for each refusal.

Configs are plain dicts (config.json) or transformers configs; nothing here imports transformers.
The facts were read in transformers 5.17 and 5.24 and are checked against it by
tests/checkpoint/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantmla.errors import CheckpointError, UnsupportedModelError
from quantmla.strict import Pairing

MAX_LAYERS = 4096


@dataclass(frozen=True)
class AttentionNames:
    """Tensor names of one attention module, as they are on disk.

    Args:
        prefix: module path, for example `model.layers.0.self_attn`.
        low_rank_q: whether queries go through q_a_proj and q_b_proj.
        has_bias: whether kv_a_proj_with_mqa, q_a_proj and o_proj carry a bias.
    Source: models_data.md section 4.
    """

    prefix: str
    low_rank_q: bool
    has_bias: bool

    @property
    def kv_a(self) -> str:
        return f"{self.prefix}.kv_a_proj_with_mqa.weight"

    @property
    def kv_a_bias(self) -> str | None:
        return f"{self.prefix}.kv_a_proj_with_mqa.bias" if self.has_bias else None

    @property
    def kv_a_norm(self) -> str:
        return f"{self.prefix}.kv_a_layernorm.weight"

    @property
    def kv_b(self) -> str:
        return f"{self.prefix}.kv_b_proj.weight"

    @property
    def q(self) -> str:
        """The projection whose rows are per head [nope | rope]; it never has a bias."""
        return f"{self.prefix}.{'q_b_proj' if self.low_rank_q else 'q_proj'}.weight"

    @property
    def o(self) -> str:
        return f"{self.prefix}.o_proj.weight"

    def fusable(self) -> dict[str, str]:
        """Short key to tensor name of everything that fusing may change (keys of `fuse_layer`)."""
        names = {
            "kv_a": self.kv_a,
            "kv_a_bias": self.kv_a_bias,
            "kv_a_norm": self.kv_a_norm,
            "kv_b": self.kv_b,
            "q": self.q,
        }
        return {key: name for key, name in names.items() if name is not None}


@dataclass(frozen=True)
class Family:
    """One MLA family: how its config is read and which conventions its attention follows.

    Args:
        model_type: the `model_type` of config.json.
        defaults: config fields that a config.json may leave out, with the value that then holds.
        attentions_per_layer: attention modules, and so cache layers, in one decoder layer.
        layers_field: the field that counts decoder layers.
        interleave_field: config field that chooses the pairing in the weights, or None if fixed.
        pairing: pairing in the weights where no field chooses it.
        keeps_pairing_in_cache: False where an interleaved key is stored half-split.
        scales_latent: the latent is multiplied by sqrt(hidden/kv_lora_rank) after its norm.
        norm_eps: epsilon of kv_a_layernorm as transformers builds it.
    Source: models_data.md section 4.
    """

    model_type: str
    defaults: Mapping[str, Any]
    attentions_per_layer: int = 1
    layers_field: str = "num_hidden_layers"
    interleave_field: str | None = None
    pairing: Pairing = "interleaved"
    keeps_pairing_in_cache: bool = False
    scales_latent: bool = False
    # So far every family builds this norm with the default of its RMSNorm class and does not pass
    # config.rms_norm_eps (GLM-4.7-Flash: 1e-5 in the config, 1e-6 in this norm).
    norm_eps: float = 1e-6

    def field(self, config, name: str):
        """Value of a config field, with the family's default where config.json leaves it out.

        Args:
            config: dict or transformers config.
            name: field name.
        Returns:
            the value, None included.
        Raises:
            CheckpointError: the field is absent and has no default.
        Source: own.
        """
        config = as_dict(config)
        if name in config:
            return config[name]
        if name in self.defaults:
            return self.defaults[name]
        raise CheckpointError(
            f"config.json of a {self.model_type} model lacks a field that MLA needs",
            where=name,
            expected=f"a value for {name}",
            got="no such field",
            next_step="complete config.json from the model's own repository",
        )

    def size(self, config, name: str) -> int:
        """A config field that must be a positive integer (sizes are bounded by 2**24)."""
        value = self.field(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**24:
            raise CheckpointError(
                "a size in config.json is not usable",
                where=name,
                expected="an integer from 1 to 2**24",
                got=repr(value),
                next_step="correct config.json",
            )
        return value

    def low_rank_q(self, config) -> bool:
        """Whether queries are projected through a low rank (q_b_proj) or directly (q_proj)."""
        return self.field(config, "q_lora_rank") is not None

    def has_bias(self, config) -> bool:
        """Whether kv_a_proj_with_mqa, q_a_proj and o_proj carry a bias."""
        return bool(self.field(config, "attention_bias"))

    def num_decoder_layers(self, config) -> int:
        """Decoder layers of the main model; MTP layers behind them are not counted."""
        layers = self.size(config, self.layers_field)
        if layers > MAX_LAYERS:
            raise CheckpointError(
                "config.json declares too many layers",
                where=self.layers_field,
                expected=f"at most {MAX_LAYERS}",
                got=layers,
                next_step="correct config.json",
            )
        return layers

    def num_cache_layers(self, config) -> int:
        """Layers of the KV cache: one per attention module."""
        return self.num_decoder_layers(config) * self.attentions_per_layer

    def attention_prefixes(self, config) -> list[str]:
        """Module path of each attention, in cache-layer order."""
        layers = range(self.num_decoder_layers(config))
        if self.attentions_per_layer == 1:
            return [f"model.layers.{layer}.self_attn" for layer in layers]
        inner = range(self.attentions_per_layer)
        return [f"model.layers.{layer}.self_attn.{i}" for layer in layers for i in inner]

    def attention_names(self, config) -> list[AttentionNames]:
        """Tensor names of each attention, in cache-layer order."""
        low_rank_q, has_bias = self.low_rank_q(config), self.has_bias(config)
        return [AttentionNames(p, low_rank_q, has_bias) for p in self.attention_prefixes(config)]

    def rope_pairing(self, config) -> Pairing:
        """Which rope rows of the WEIGHTS form a pair: (2i, 2i+1) or (i, i + P/2)."""
        if self.interleave_field is None:
            return self.pairing
        return "interleaved" if self.field(config, self.interleave_field) else "half"

    def rope_pairing_cache(self, config) -> Pairing:
        """Which channels of the CACHED key form a pair; pair i is the same pair in both orders."""
        return self.rope_pairing(config) if self.keeps_pairing_in_cache else "half"

    def latent_scale(self, config) -> float:
        """Factor on the normed latent before it is cached; it stays in the cached value."""
        if not self.scales_latent:
            return 1.0
        return (self.size(config, "hidden_size") / self.size(config, "kv_lora_rank")) ** 0.5

    def v_head_dim(self, config) -> int:
        """Value size of a head; minicpm3 leaves it out and means hidden_size / heads."""
        if self.field(config, "v_head_dim") is None:
            return self.size(config, "hidden_size") // self.size(config, "num_attention_heads")
        return self.size(config, "v_head_dim")


_NO_BIAS = {"attention_bias": False}
_V3_STYLE = {**_NO_BIAS, "rope_interleave": True}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        # The complex multiplication of deepseek_v2 keeps the interleaved order in the cache.
        Family("deepseek_v2", _NO_BIAS, keeps_pairing_in_cache=True),
        # Also R1, Moonlight and, under its own model_type, Kimi-K2.
        Family("deepseek_v3", _V3_STYLE, interleave_field="rope_interleave"),
        Family("glm4_moe_lite", _V3_STYLE, interleave_field="rope_interleave"),
        Family(
            "longcat_flash",
            _NO_BIAS,
            attentions_per_layer=2,
            layers_field="num_layers",
            scales_latent=True,
        ),
        Family("minicpm3", {**_NO_BIAS, "v_head_dim": None}, pairing="half"),
        Family("mistral4", _V3_STYLE, interleave_field="rope_interleave"),
        Family("youtu", _V3_STYLE, interleave_field="rope_interleave"),
    )
}
# Same tensors and conventions under another model_type.
ALIASES = {"kimi_k2": "deepseek_v3"}

_INDEXER = "its sparse indexer selects tokens with a second key cache that quantmla does not handle"
_KDA = "most of its layers are KDA linear attention without a KV cache"
_UNVERIFIED = "it looks like deepseek_v3, but its conventions have not been verified here"
_WRAPPER = "it is a multimodal wrapper whose text model sits under another name"
REFUSALS: dict[str, str] = {
    "axk1": _UNVERIFIED,
    "axk2": "its query projection is fused with a gate, so the RoPE inverse cannot be folded",
    "bailing_hybrid": f"{_KDA}, and its MLA layers have an output gate",
    "deepseek_ocr2": _WRAPPER,
    "deepseek_v32": _INDEXER,
    "dots3_note": f"{_WRAPPER}, and {_INDEXER}",
    "glm5_next": f"{_WRAPPER}, and {_INDEXER}",
    "glm_moe_dsa": _INDEXER,
    "hy_v4": f"{_INDEXER}, and its attention has learnable sinks",
    "hy_v4_vl": f"{_WRAPPER}, and {_INDEXER}",
    "kimi_k25": _WRAPPER,
    "kimi_linear": f"{_KDA}, and its MLA layers rotate nothing on the rope part",
    "mistral3": _WRAPPER,
    "mistral_large4": f"it shares one KV cache across layers, and {_INDEXER}",
    "sarvam_mla": _UNVERIFIED,
}


def as_dict(config) -> Mapping[str, Any]:
    """A config as a mapping, whether it came from config.json or from transformers."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    raise CheckpointError(
        "a model config cannot be read",
        expected="a mapping or a transformers config",
        got=type(config).__name__,
        next_step="pass the parsed config.json or model.config",
    )


def family_of(config) -> Family:
    """The row of the family that a config belongs to.

    Args:
        config: dict (config.json) or transformers config.
    Returns:
        Family.
    Raises:
        UnsupportedModelError: the family is refused, with its name and the reason.
        CheckpointError: the config has no model_type.
    Source: own.
    """
    config = as_dict(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            "config.json does not say which model this is",
            where="model_type",
            expected="a string such as deepseek_v3",
            got=repr(model_type),
            next_step="check that this folder is a Hugging Face checkpoint",
        )
    reason = _reason_to_refuse(model_type, config)
    if reason is not None:
        raise UnsupportedModelError(
            f"{model_type} is not supported: {reason}",
            where="model_type",
            expected=", ".join(sorted([*FAMILIES, *ALIASES])),
            got=model_type,
            next_step="use a checkpoint of a listed family, or convert one with `quantmla convert`",
        )
    return FAMILIES[ALIASES.get(model_type, model_type)]


def _reason_to_refuse(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Why a config cannot be handled, or None."""
    if model_type in REFUSALS:
        return REFUSALS[model_type]
    if any(config.get(name) is not None for name in ("index_topk", "index_n_heads")):
        return _INDEXER
    if isinstance(config.get("text_config"), Mapping):
        return _WRAPPER
    if config.get("kv_lora_rank") is None:
        return "its config has no kv_lora_rank, so it does not cache an MLA latent"
    if ALIASES.get(model_type, model_type) not in FAMILIES:
        return "it has an MLA latent, but its tensor names and RoPE pairing are not known here"
    return None
