"""Rows that are the same on every machine, and pages that hold them."""

import torch

from quantmla.cache.layout import PageLayout, pages_for_tokens
from quantmla.config import KVScheme
from quantmla.quant import quantize

R, P = 128, 32


def layout_of(name, kv_lora_rank=R, qk_rope_head_dim=P):
    scheme, _, zero = name.partition(" ")
    return PageLayout(kv_lora_rank, qk_rope_head_dim, KVScheme.parse(scheme, zero=zero or "zp8"))


def numbers(tokens, channels, seed):
    """Values that are the same on every machine and torch version: a multiplicative hash."""
    i = torch.arange(tokens * channels, dtype=torch.int64) + seed * 1_000_003
    i = (i * 2654435761) & 0xFFFFFFFF
    i = ((i ^ (i >> 15)) * 2246822519) & 0xFFFFFFFF
    return ((i ^ (i >> 13)).double() / 2**31 - 1).reshape(tokens, channels).float()


def encode(layout, latent, k_rope):
    """Both paths in the form that store takes."""
    scheme = layout.scheme
    return [
        x if bits == 16 else quantize(x, bits, group=scheme.group, zero=scheme.zero)
        for x, bits in ((latent, scheme.content_bits), (k_rope, scheme.rope_bits))
    ]


def stored(layout, latent, k_rope, first_token=0, n_pages=None, fill=0):
    """Pages that hold the tokens, every other byte being `fill`."""
    n_pages = n_pages or pages_for_tokens(first_token + latent.shape[-2]) or 1
    pages = layout.allocate(*latent.shape[:-2], n_pages=n_pages).fill_(fill)
    layout.store(pages, first_token, *encode(layout, latent, k_rope))
    return pages
