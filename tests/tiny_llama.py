"""Tiny random Llama models with grouped key/value heads, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from quantmla.convert.gqa import GQAWeights, from_pairs, to_pairs

THETA = 100_000.0


def tiny_llama(*, heads=6, kv_heads=3, head_dim=16, hidden=48, layers=2, **config):
    """A random float32 LlamaForCausalLM whose attention is far from uniform."""
    values = {
        "vocab_size": 96,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(values | config)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                scale = 3.0 if ".q_proj" in name or ".k_proj" in name else 1.5
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * scale / weight.shape[1] ** 0.5)
    return model.eval()


def make_convertible(model):
    """Change a tiny model so that its conversion loses nothing, and return it.

    The keys of all heads become complex multiples of one another, so that component 0 holds them
    all; the joint value projection becomes orthogonal, so that the latent norm divides by a
    constant (attention inputs have a constant norm, as the layer norm has no weight yet).
    """
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            dim, groups = attention.head_dim, model.config.num_key_value_heads
            base = to_pairs(attention.k_proj.weight, dim)[:1]  # [1, d/2, D]
            factor = torch.randn(groups, dim // 2, 1, dtype=torch.complex128)
            attention.k_proj.weight.copy_(from_pairs(base * factor).flatten(0, 1))
            assert groups * dim == model.config.hidden_size
            attention.v_proj.weight.copy_(torch.linalg.qr(attention.v_proj.weight)[0])
    return model


def layer_weights(model, layer=0):
    """GQAWeights of one layer."""
    attention = model.model.layers[layer].self_attn
    return GQAWeights(
        attention.q_proj.weight.detach(),
        attention.k_proj.weight.detach(),
        attention.v_proj.weight.detach(),
        attention.head_dim,
    )


def token_windows(count=8, tokens=32, vocab=96, seed=0):
    """Random token windows [count, tokens]."""
    return torch.randint(vocab, (count, tokens), generator=torch.Generator().manual_seed(seed))


def write_llama(folder: Path, model=None) -> Path:
    """Write a tiny model with its tokenizer as a Hugging Face folder."""
    from tiny_text import write_tokenizer

    (model or tiny_llama()).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
