"""First rung of the ladder: what each cell does to the output of every attention layer.

On the way the static numbers of the codecs are set, from training windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantmla.ablate.cells import Cell
from quantmla.calibrate.objective import LayerAttention, Protection
from quantmla.calibrate.readback import restore_content, restore_rope, store_content, store_rope
from quantmla.calibrate.record import LayerCapture
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.quant.codec import Codec
from quantmla.transform.layer import LayerTransform

FIT_WINDOWS = 4  # training windows that set static numbers
HELDOUT_WINDOWS = 4


@dataclass(frozen=True)
class LayerWindows:
    """Which captured windows fit codecs, and on which ones the error is measured."""

    fit: tuple[int, ...]
    heldout: tuple[int, ...]


@torch.no_grad()
def measure_layer(
    capture: LayerCapture,
    cells: dict[Cell, LayerTransform],
    windows: LayerWindows,
    pairing_cache: str,
    policy: tuple[int, int],
    device: str,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, dict]:
    """Measure the relative squared output error of every cell on one layer.

    Args:
        capture: the layer.
        cells: with their transforms of this layer.
        windows: which captured windows to use.
        pairing_cache: RoPE pairing of the cached key.
        policy: (sink, window) of the cells that have one.
        device: where to compute.
        tell: called with the number of cells done.
    Returns: cell name to `content`, `rope` and `both` (error with only that path coded), and
        `content_static` and `rope_static` (static numbers of the codecs, or None).
    Source: algorithms.md section 10.3.
    """
    layer = LayerWorkspace(capture, pairing_cache, 0, device)
    known: dict[tuple, tuple] = {}  # what cells of a format share: one path, coded, and its error
    rows, form = {}, None
    for done, (cell, transform) in enumerate(cells.items()):
        if cell.form != form:  # cells come format by format
            form = cell.form
            known.clear()
        sink, window = policy if cell.policy else (0, 0)
        attention = layer.attention(Protection(sink, window))
        sides = []
        for path, codec in zip(("content", "rope"), cell.format.codecs(transform), strict=True):
            method = cell.content if path == "content" else cell.rope
            key = (path, method, cell.policy)
            if key not in known:
                known[key] = _one_path(layer, attention, transform, path, codec, windows, sink)
            sides.append(known[key])
        content, rope = sides
        rows[cell.name] = {
            "content": content[1],
            "rope": rope[1],
            "both": _error(attention, windows.heldout, content[0], rope[0]),
            "content_static": content[2],
            "rope_static": rope[2],
        }
        tell(done + 1)
    return rows


def _one_path(
    layer: LayerWorkspace,
    attention: LayerAttention,
    transform: LayerTransform,
    path: str,
    codec: Codec,
    windows: LayerWindows,
    first: int,
) -> tuple[list[torch.Tensor], float, float | None]:
    """Return the path of each held-out window as it comes back, its error, the static number."""
    gamma, pairing = layer.gamma, layer.pairing_cache

    def original(window: int) -> torch.Tensor:
        latent, k_rope, _ = attention.sequence(window)
        return latent if path == "content" else k_rope

    def stored(window: int) -> torch.Tensor:
        if path == "content":
            return store_content(transform, gamma, original(window))
        return store_rope(transform, pairing, original(window))

    codec = codec.fitted(torch.cat([stored(window)[first:] for window in windows.fit]))
    back = []
    for window in windows.heldout:
        rows = _coded(codec, stored(window), first)
        if path == "content":
            back.append(restore_content(transform, gamma, rows))
        else:
            back.append(restore_rope(transform, pairing, rows))
    nothing = [None] * len(back)
    pair = (back, nothing) if path == "content" else (nothing, back)
    return back, _error(attention, windows.heldout, *pair), codec.static()


def _coded(codec: Codec, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Code rows; groups of tokens start behind the sinks, as in the cache."""
    if codec.group_tokens == 1:
        return codec.round_trip(rows)
    return torch.cat([rows[:first], codec.round_trip(rows[first:])])


def _error(attention: LayerAttention, heldout: tuple[int, ...], content: list, rope: list) -> float:
    squares = norms = 0.0
    for window, latent, k_rope in zip(heldout, content, rope, strict=True):
        square, norm = attention.error(window, latent, k_rope)
        squares += float(square)
        norms += float(norm)
    return squares / max(norms, 1e-30)
