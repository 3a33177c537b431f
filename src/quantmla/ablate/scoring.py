"""Later rungs of the ladder: token scores of one model whose attention weights are exchanged.

The weights of a cell are those that `fuse_checkpoint` would write, in the dtype of the checkpoint;
exchanging them in memory saves a folder and a load for every cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantmla.ablate.cells import Cell
from quantmla.ablate.forms import behind_matrices
from quantmla.ablate.transforms import foldable, same
from quantmla.cache.policy import packed_pairs
from quantmla.checkpoint.plan import AttentionLayers
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import KVScheme
from quantmla.engine.clips import Writer
from quantmla.engine.hf import QuantMLACache
from quantmla.engine.simulated import simulated_cache
from quantmla.errors import EvaluationError
from quantmla.evaluate.fidelity import TokenScores, score_tokens
from quantmla.evaluate.model import Settings
from quantmla.evaluate.reference import Reference
from quantmla.quant.codec import Codec
from quantmla.transform.fuse import fuse_layer
from quantmla.transform.layer import LayerTransform

Statics = Sequence[tuple[float | None, float | None]]  # content and rope of each layer


class ExchangeModel:
    """A loaded model that takes the fused attention weights of one cell after the other.

    Args:
        model: from `evaluate.model.loaded`.
        folder: its checkpoint, not fused.
    Raises: EvaluationError if attention modules and cache layers do not match.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model = model
        self.layers = AttentionLayers.of(CheckpointReader(folder))
        modules = {m.layer_idx: m for m in model.modules() if hasattr(m, "kv_a_layernorm")}
        if sorted(modules) != list(range(len(self.layers.names))):
            raise EvaluationError(
                "the attention modules of the model are not its cache layers",
                where=type(model).__name__,
                expected=f"layers 0 to {len(self.layers.names) - 1}",
                got=sorted(modules),
            )
        self.parameters = [_parameters(modules[i]) for i in range(len(modules))]
        self.shipped = [
            {k: p.detach().clone() for k, p in part.items()} for part in self.parameters
        ]
        self.transforms: list[LayerTransform] | None = None

    @torch.no_grad()
    def take(self, transforms: list[LayerTransform]) -> None:
        """Put the fused weights of a cell into the model; matrices of the cache are left out."""
        transforms = [foldable(transform) for transform in transforms]
        if same(self.transforms, transforms):
            return
        for layer, (transform, parameters) in enumerate(
            zip(transforms, self.parameters, strict=True)
        ):
            fused = {}
            if not (transform.content_identity and transform.rope_identity):
                weights = self.layers.weights(layer)
                fused = fuse_layer(weights, self.layers.dims, self.layers.pairing, transform)
            for key, parameter in parameters.items():
                parameter.copy_(fused.get(key, self.shipped[layer][key]))
        self.transforms = transforms


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an attention module under the keys of `fuse_layer`."""
    query = getattr(module, "q_b_proj", None)
    query = module.q_proj if query is None else query
    named = {
        "kv_a": module.kv_a_proj_with_mqa.weight,
        "kv_a_bias": module.kv_a_proj_with_mqa.bias,
        "kv_a_norm": module.kv_a_layernorm.weight,
        "kv_b": module.kv_b_proj.weight,
        "q": query.weight,
    }
    return {key: parameter for key, parameter in named.items() if parameter is not None}


def is_packed(cell: Cell, transforms: list[LayerTransform]) -> bool:
    """Tell whether the pages of QuantMLACache hold a cell: its format, and no online matrix.

    Source: own.
    """
    dense = any(t.content_matrix is not None or t.rope_matrix is not None for t in transforms)
    return cell.format.packed and not dense


def cell_cache(
    cell: Cell,
    transforms: list[LayerTransform],
    statics: Statics,
    config: Any,
    policy: tuple[int, int],
) -> QuantMLACache:
    """Make an empty cache of a cell.

    Args:
        cell: format and policy.
        transforms: of each layer: what its writer needs, matrices, the transform after RoPE.
        statics: static numbers of the codecs of each layer, from the first rung.
        config: of the model.
        policy: (sink, window) of the cells that have one.
    Returns: QuantMLACache; of pages where they can hold the cell, else simulated. Attention is in
        plain torch either way, so that cells differ in their formats only.
    Raises: CacheError, SchemeError.
    Source: own.
    """
    sink, window = policy if cell.policy else (0, 0)
    online, form = transforms[0].rope_online, cell.format
    if is_packed(cell, transforms):
        scheme = KVScheme(
            content_bits=form.content_bits,
            rope_bits=form.rope_bits,
            sink_tokens=sink,
            window_tokens=window,
        )
        writers = [
            Writer(t.content_clip, t.rope_clip, t.content_shift, t.rope_shift, t.feedback)
            for t in transforms
        ]
        return QuantMLACache.from_scheme(
            scheme, config, writers=writers, rope_online=online, check_finite=True, kernels="never"
        )
    codecs = [
        behind_matrices(_with_statics(form.codecs(transform), pair), transform)
        for transform, pair in zip(transforms, statics, strict=True)
    ]
    return simulated_cache(
        codecs,
        config,
        sink_tokens=sink,
        window_tokens=window,
        rope_online=online,
        check_finite=True,
    )


def _with_statics(
    codecs: tuple[Codec, Codec], statics: tuple[float | None, float | None]
) -> tuple[Codec, Codec]:
    return tuple(
        codec if number is None else codec.with_static(number)
        for codec, number in zip(codecs, statics, strict=True)
    )


def expected_pairs(cache: QuantMLACache, tokens: int) -> int:
    """Count the (query, packed key) pairs that one window must read in all layers.

    Args: cache [of the cell]; tokens [of the window].
    Source: own.
    """
    total = 0
    for layer in cache.layers:
        store = layer.store
        if store.rows_only:
            continue
        scheme = store.layout.scheme
        group = getattr(store, "residual_tokens", 0)
        starts = range(0, tokens, group) if group else None
        total += packed_pairs(0, tokens, scheme.sink_tokens, scheme.window_tokens, starts)
    return total


def score_cell(
    model: nn.Module,
    make_cache,
    windows: torch.Tensor,
    settings: Settings,
    label: str,
    **reference: Reference,
) -> tuple[TokenScores, int, int]:
    """Score windows in batches, through a new cache for each.

    Args:
        model: with the weights of the cell.
        make_cache: gives an empty cache.
        windows [n, S, int64]: what to score.
        settings: batch and chunk.
        label: for messages.
        reference: write_to or compare_with of `score_tokens`.
    Returns: TokenScores of all windows, packed rows read, and how many should have been.
    Raises: EvaluationError as `score_tokens`.
    Source: own.
    """
    parts, read, expected = [], 0, 0
    for first in range(0, len(windows), settings.batch):
        ids, cache = windows[first : first + settings.batch], make_cache()
        parts.append(score_tokens(model, ids, cache, settings, label, first, **reference))
        read += cache.packed_rows_read
        expected += len(ids) * expected_pairs(cache, windows.shape[1])
    fields = zip(*((part.nll, part.kl, part.flips) for part in parts), strict=True)
    return TokenScores(*(torch.cat(field) for field in fields)), read, expected
