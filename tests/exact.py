"""Tiny models run through packed caches, and a cache whose quantiser is the identity.

With the exact cache every path reads float32 rows back unchanged, so that only the attention and
the life of the cache are under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantmla.cache.latent import LatentLayer
from quantmla.config import KVScheme
from quantmla.dims import MLADims
from quantmla.engine.hf import PackedLayer, QuantMLACache
from tiny import model_class, randomise, tiny_config


@dataclass(frozen=True)
class ExactLayout:
    """Pages of 64 float32 rows in place of codes, with the interface of PageLayout."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    scheme: KVScheme

    @property
    def row_bytes(self):
        return 4 * (self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def page_bytes(self):
        return 64 * self.row_bytes

    def allocate(self, *batch, n_pages, device=None):
        return torch.zeros(*batch, n_pages, self.page_bytes, dtype=torch.uint8, device=device)

    def store(self, pages, first_token, content, rope):
        rows = torch.cat([content, rope], -1).contiguous().view(torch.uint8)
        end = first_token + rows.shape[1]
        pages.view(*pages.shape[:-2], -1, self.row_bytes)[:, first_token:end] = rows

    def load(self, pages, start_token, end_token):
        rows = pages.view(*pages.shape[:-2], -1, self.row_bytes)[:, start_token:end_token]
        rows = rows.contiguous().view(torch.float32)
        return rows.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)


class ExactLayer(LatentLayer):
    """LatentLayer that stores what it is given."""

    def __init__(self, layout, **settings):
        super().__init__(layout, row_dtype=torch.float32, **settings)

    def _encode(self, rows, raw):
        rank = self.layout.kv_lora_rank
        return [rows[..., :rank], rows[..., rank:]]


def exact_cache(config, *, sink=4, window=8, chunk_tokens=None, rope_online=None, slack_tokens=0):
    """A QuantMLACache of exact layers; `chunk_tokens` selects fast mode."""
    dims = MLADims.from_config(config)
    scheme = KVScheme.parse("c4r4", sink_tokens=sink, window_tokens=window)
    layout = ExactLayout(dims.kv_lora_rank, dims.qk_rope_head_dim, scheme)
    layers = [
        PackedLayer(
            ExactLayer(layout, layer_idx=i, slack_tokens=slack_tokens), chunk_tokens, rope_online
        )
        for i in range(dims.num_cache_layers)
    ]
    return QuantMLACache(layers, config)


def tiny_model(family="deepseek_v3", dtype=torch.float32, **settings):
    model = model_class(family)(tiny_config(family, **settings))
    randomise(model, 0)
    return model.to(dtype).eval()


def tokens(length, batch=1):
    return torch.randint(3, 96, (batch, length))


@torch.no_grad()
def forward(model, cache, ids, calls=None, mask=None):
    """Logits of `ids`, fed in calls of the given lengths; positions follow the mask."""
    kwargs, first, logits = cache.as_kwargs(model), 0, []
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for count in calls or [ids.shape[1]]:
        new = slice(first, first + count)
        padding = {}
        if mask is not None:
            padding = {"attention_mask": mask[:, : new.stop], "position_ids": positions[:, new]}
        logits.append(model(ids[:, new], **padding, **kwargs).logits)
        first = new.stop
    return torch.cat(logits, 1)


@torch.no_grad()
def stock(model, ids, **kwargs):
    model.set_attn_implementation("eager")
    return model(ids, use_cache=False, **kwargs).logits
