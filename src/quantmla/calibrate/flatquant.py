"""Method flatquant: any invertible matrix on either path, as a ceiling for what a transform gains.

Neither matrix can be folded: the content matrix stands behind the norm, where weights hold only a
diagonal, and the RoPE matrix mixes pairs, which does not commute with RoPE. A cache would have to
apply both at run time. Training starts at what QuantMLA learned, a special case of the family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from quantmla.calibrate.paths import ClipRatio
from quantmla.calibrate.proxies import ContentProxy
from quantmla.calibrate.train import fit_content, fit_rope, shared_training
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.quant.affine import fake_quantize, group_count
from quantmla.transform.content import hadamard, random_hadamard
from quantmla.transform.layer import LayerTransform
from quantmla.transform.rope import apply_pairs

if TYPE_CHECKING:
    from quantmla.config import KVScheme, Recipe

CONTENT_RATE = 1e-3  # peak learning rates of the matrices, relative to their start
ROPE_RATE = 1e-2


class DensePath(nn.Module):
    """Rows through an invertible matrix, the quantiser, and back; what training may change.

    Args:
        start [C, C]: matrix that training starts from; it learns a factor behind it.
        bits, scheme: quantiser of the path.
        clip: None, a fixed ratio, or "learned".
        ratios [G]: where learned ratios start; None for the usual start.
    """

    def __init__(
        self,
        start: torch.Tensor,
        bits: int,
        scheme: KVScheme,
        clip: float | str | None,
        ratios: torch.Tensor | None,
    ) -> None:
        super().__init__()
        channels = start.shape[0]
        self.scheme, self.bits = scheme, bits
        self.register_buffer("start", start.float())
        self.change = nn.Parameter(torch.zeros(channels, channels))
        self.clip = ClipRatio(clip, bits, group_count(channels, scheme.group))
        if self.clip.logit is not None and ratios is not None:
            self.clip.logit.data = ratios.float().clamp(1e-3, 1 - 1e-3).logit()

    def matrix(self) -> torch.Tensor:
        """Return the matrix [C, C]."""
        eye = torch.eye(len(self.start), dtype=self.start.dtype, device=self.start.device)
        return self.start @ (eye + self.change)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [.., C] as the cache gives them back."""
        matrix, scheme = self.matrix(), self.scheme
        back = fake_quantize(
            rows @ matrix, self.bits, group=scheme.group, zero=scheme.zero, clip=self.clip()
        )
        return back @ torch.linalg.inv(matrix)


def flatquant(layer: LayerWorkspace, recipe: Recipe) -> LayerTransform:
    """Learn a dense matrix for either path, from QuantMLA's transform on.

    Args:
        layer: the captured layer.
        recipe: as for QuantMLA.

    Returns:
        A transform with `content_matrix` and `rope_matrix`, which only a simulated cache applies; a
        path on which plain rounding was best stays identity.

    Source: FlatQuant's unconstrained transforms, trained with the objectives of QuantMLA.
    """
    start = shared_training(layer, recipe)
    learned = LayerTransform(
        content_clip=start.content_clip, rope_clip=start.rope_clip, stats=dict(start.stats)
    )
    if recipe.scheme.content_bits < 16:
        _content(layer, recipe, start, learned)
    if recipe.scheme.rope_bits < 16:
        _rope(layer, recipe, start, learned)
    return learned


def _content(
    layer: LayerWorkspace, recipe: Recipe, start: LayerTransform, learned: LayerTransform
) -> None:
    scheme = recipe.scheme
    rank = layer.gamma.shape[0]
    if start.content_rotation is None:  # rounding was better than what QuantMLA found
        matrix = random_hadamard(rank, layer.seed)
    else:
        matrix = start.content_rotation * start.content_scale
    settings = (scheme.content_bits, scheme, recipe.clip_content, start.content_clip)
    path = DensePath(matrix, *settings).to(layer.device)
    rates = {"change": CONTENT_RATE, "clip.logit": recipe.train.lr_clip / 10}
    _, best, _ = fit_content(layer, recipe, path, rates, ContentProxy(layer, recipe))
    if best < learned.stats["content_error"] or start.content_rotation is not None:
        learned.content_scale = torch.ones(
            rank, dtype=torch.float64
        )  # the matrix sees unit latents
        learned.content_matrix = path.matrix().detach().double().cpu()
        learned.content_clip = path.clip.values()
        learned.stats["content_error"] = min(best, learned.stats["content_error"])


def _rope(
    layer: LayerWorkspace, recipe: Recipe, start: LayerTransform, learned: LayerTransform
) -> None:
    """Train from QuantMLA's pairs, and from the same behind a Hadamard matrix; keep the better."""
    scheme, size = recipe.scheme, layer.capture.k_rope.shape[-1]
    pairs = torch.eye(size, dtype=torch.float64)
    if not start.rope_identity:
        pairs = apply_pairs(pairs, start.rope_angle, start.rope_scale, layer.pairing_cache)
    starts = [pairs] if size & (size - 1) else [pairs, pairs @ hadamard(size)]
    rates = {"change": ROPE_RATE, "clip.logit": recipe.train.lr_clip / 10}
    for matrix in starts:
        settings = (scheme.rope_bits, scheme, recipe.clip_rope, start.rope_clip)
        path = DensePath(matrix, *settings).to(layer.device)
        _, best, _ = fit_rope(layer, recipe, path, rates)
        first = learned.rope_matrix is None and not start.rope_identity
        if best < learned.stats["rope_error"] or first:
            learned.rope_matrix = path.matrix().detach().double().cpu()
            learned.rope_clip = path.clip.values()
            learned.stats["rope_error"] = min(best, learned.stats["rope_error"])
