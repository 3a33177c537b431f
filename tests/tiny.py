"""Tiny random MLA checkpoints of every family, in the layout that real ones have on disk.

`write_tiny(folder, "deepseek_v3", ...)` writes an ordinary Hugging Face folder below 1 MB with
weights large enough that a wrong RoPE pairing, scale or norm shows in the logits.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "longcat_flash": "LongcatFlash",
    "minicpm3": "MiniCPM3",
    "mistral4": "Mistral4",
    "youtu": "Youtu",
}
# The shared matrix: (id, arguments of write_tiny).
TINY_CASES = [
    ("deepseek_v2", {"family": "deepseek_v2"}),
    ("deepseek_v2-qlora", {"family": "deepseek_v2", "q_lora_rank": 24}),
    ("deepseek_v3", {"family": "deepseek_v3"}),
    ("deepseek_v3-half", {"family": "deepseek_v3", "rope_interleave": False}),
    (
        "deepseek_v3-qlora-bias",
        {"family": "deepseek_v3", "q_lora_rank": 24, "attention_bias": True},
    ),
    ("deepseek_v3-yarn", {"family": "deepseek_v3", "yarn": True}),
    ("deepseek_v3-moe", {"family": "deepseek_v3", "q_lora_rank": 24, "moe": True}),
    ("glm4_moe_lite", {"family": "glm4_moe_lite", "q_lora_rank": 24, "moe": True}),
    ("longcat_flash", {"family": "longcat_flash", "q_lora_rank": 24, "moe": True}),
    ("minicpm3", {"family": "minicpm3", "q_lora_rank": 24}),
    ("mistral4", {"family": "mistral4", "q_lora_rank": 24, "yarn": True}),
    ("youtu", {"family": "youtu"}),
    ("youtu-half", {"family": "youtu", "q_lora_rank": 24, "rope_interleave": False}),
]
TINY_IDS = [case_id for case_id, _ in TINY_CASES]
TINY_KWARGS = [kwargs for _, kwargs in TINY_CASES]


def write_tiny(
    folder,
    family: str = "deepseek_v3",
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    seed: int = 0,
    **settings,
) -> Path:
    """Write one tiny checkpoint and return its folder; `settings` are those of `tiny_config`."""
    model = model_class(family)(tiny_config(family, **settings))
    randomise(model, seed)
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(dtype).save_pretrained(folder, **shards)
    return Path(folder)


def tiny_config(
    family: str,
    *,
    kv_lora_rank: int = 32,
    qk_rope_head_dim: int = 16,
    qk_nope_head_dim: int = 12,
    v_head_dim: int = 20,
    heads: int = 3,
    hidden_size: int = 48,
    layers: int = 2,
    q_lora_rank: int | None = None,
    rope_interleave: bool | None = None,
    attention_bias: bool = False,
    yarn: bool = False,
    moe: bool = False,
    vocab_size: int = 96,
):
    """The config of a tiny model; its sizes all differ on purpose, so that no two can be swapped.

    Dense unless `moe`; longcat_flash always has experts and a low-rank query.
    """
    rope = dict(YARN) if yarn else {"rope_type": "default", "rope_theta": 10000.0}
    settings = {
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "qk_nope_head_dim": qk_nope_head_dim,
        "v_head_dim": v_head_dim,
        "hidden_size": hidden_size,
        "q_lora_rank": q_lora_rank,
        "attention_bias": attention_bias,
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    experts = {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    if family == "longcat_flash":
        del settings["intermediate_size"]
        settings |= {
            "num_layers": layers,
            "head_dim": qk_rope_head_dim,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "routed_scaling_factor": 1.0,
        }
    else:
        settings["num_hidden_layers"] = layers
    if family in ("deepseek_v2", "deepseek_v3", "mistral4"):
        settings |= experts | {"first_k_dense_replace": 1 if moe else layers}
    if family == "glm4_moe_lite":
        kinds = ["dense"] + ["sparse" if moe else "dense"] * (layers - 1)
        settings |= experts | {"mlp_layer_types": kinds}
    if family == "deepseek_v3":
        settings["num_nextn_predict_layers"] = 0
    if family == "mistral4":
        rope["llama_4_scaling_beta"] = 0.1
        rope.setdefault("original_max_position_embeddings", 128)
    if family == "minicpm3":
        settings |= {"scale_emb": 3, "dim_model_base": hidden_size}
    if rope_interleave is not None:
        settings["rope_interleave"] = rope_interleave
    return getattr(transformers, f"{CLASSES[family]}Config")(**settings)


def model_class(family: str):
    """The stock class; mistral4 is not in AutoModelForCausalLM."""
    if family == "mistral4":
        return transformers.Mistral4ForCausalLM
    return getattr(transformers, f"{CLASSES[family]}ForCausalLM")


def load_tiny(folder, family: str, **kwargs):
    """Load a checkpoint as a stock user would."""
    auto = model_class(family) if family == "mistral4" else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, **kwargs)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every tensor values that matter: gammas away from one, biases away from zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * torch.rand(tensor.shape, generator=generator))
        elif name.endswith("bias"):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        elif tensor.dim() == 1:
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        else:
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values * tensor.shape[-1] ** -0.5)
