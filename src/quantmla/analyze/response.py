"""How far the output of a layer moves when its cache is disturbed, by finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.analyze.window import CachedWindow

Change = tuple["Tensor | None", "Tensor | None"]  # of the latent [T, R] and of the key [T, P]


def output_changes(window: CachedWindow, changes: Sequence[Change]) -> tuple[Tensor, Tensor]:
    """Return ||F(x)||^2 and ||F(x + change) - F(x)||^2 of every change.

    Args:
        window: exact cache and queries.
        changes: what is added to the latent and to the RoPE key; None leaves a path exact.

    Returns:
        Scalar, and [len(changes)], in float64 on the CPU.

    Source: algorithms.md section 4.1.
    """
    exact = (*window.expand(window.latent), window.k_rope)
    disturbed = [_disturbed(window, exact, change) for change in changes]
    energies = torch.zeros(1 + len(changes), dtype=torch.float64, device=window.latent.device)
    for rows in window.tiles():
        reference = _tile_output(window, rows, *exact)
        energies[0] += reference.double().square().sum()
        for index, cache in enumerate(disturbed, 1):
            change = _tile_output(window, rows, *cache) - reference
            energies[index] += change.double().square().sum()
    return energies[0].cpu(), energies[1:].cpu()


def _disturbed(
    window: CachedWindow, exact: tuple[Tensor, Tensor, Tensor], change: Change
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (content key, value, RoPE key) after a change; unchanged parts are shared."""
    (key, value, k_rope), (d_latent, d_rope) = exact, change
    if d_latent is not None:
        key, value = window.expand(window.latent + d_latent)
    return key, value, k_rope if d_rope is None else k_rope + d_rope


def _tile_output(
    window: CachedWindow, rows: slice, key: Tensor, value: Tensor, k_rope: Tensor
) -> Tensor:
    return window.project(window.attention(rows, key, k_rope) @ value[:, : rows.stop])
