"""Content error, split exactly: through the attention weights, through the values, and both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.analyze.window import CachedWindow

TERMS = ("matching", "aggregation", "interaction")


def content_terms(window: CachedWindow, d_latent: Tensor) -> Tensor:
    """Return the Gram matrix of the three terms of a content error's effect on the output.

    With A the attention weights, C the latent and B_h a head's way from latent to output,

        F(C + dC) - F(C) = sum_h (dA_h C + A_h dC + dA_h dC) B_h

    where dA is the difference of two whole softmaxes: matching, aggregation and interaction add up
    to the change, and the entries of the Gram matrix to its squared norm.

    Args:
        window: exact cache and queries.
        d_latent [T, R]: what is added to the latent.

    Returns:
        [3, 3, float64] on the CPU, in the order of TERMS.

    Source: algorithms.md section 4.2.
    """
    key, value = window.expand(window.latent)
    d_key, d_value = window.expand(d_latent)
    gram = torch.zeros(3, 3, dtype=torch.float64)
    for rows in window.tiles():
        exact = window.attention(rows, key, window.k_rope)
        change = window.attention(rows, key + d_key, window.k_rope) - exact
        near, d_near = value[:, : rows.stop], d_value[:, : rows.stop]
        mixed = torch.stack((change @ near, exact @ d_near, change @ d_near))
        terms = window.project(mixed).flatten(1).double()  # [3, rows * D]
        gram += (terms @ terms.T).cpu()
    return gram


def shares(gram: Tensor, total: float) -> dict[str, float]:
    """Return each term's part of the squared change of the output; they add up to 1.

    Args:
        gram [3, 3]: of `content_terms`, summed over windows.
        total: squared change of the output, measured apart from the terms.

    Returns:
        One number a term, and one a pair of terms: twice their inner product, signed.

    Source: algorithms.md section 4.2.
    """
    parts = {name: float(gram[i, i]) / total for i, name in enumerate(TERMS)}
    for i, first in enumerate(TERMS):
        for j, second in enumerate(TERMS[i + 1 :], i + 1):
            parts[f"{first}_{second}"] = 2 * float(gram[i, j]) / total
    return parts
