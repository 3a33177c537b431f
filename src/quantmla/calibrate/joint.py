"""The joint check: two paths that were calibrated apart must not disturb each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quantmla.calibrate.readback import read_content, read_rope

if TYPE_CHECKING:
    from quantmla.calibrate.objective import LayerAttention
    from quantmla.config import KVScheme
    from quantmla.transform.layer import LayerTransform

JOINT_FACTOR = 1.1
JOINT_SEQUENCES = 2  # held-out windows that are checked


@torch.no_grad()
def joint_check(
    attention: LayerAttention,
    transform: LayerTransform,
    scheme: KVScheme,
    pairing_cache: str,
    sequences: Sequence[int],
) -> dict[str, float | bool]:
    """Measure the relative squared output error with each path quantised, and with both.

    Args:
        attention: the layer, nothing protected.
        transform: what was calibrated.
        scheme: bits of both paths.
        pairing_cache: pairing of the cached key.
        sequences: captured windows to measure on.

    Returns:
        `output_error_content`, `output_error_rope`, `output_error_both`, and `joint_ok`: whether
        the last is at most 1.1 times the sum of the others.

    Source: QuantMLA study, joint check.
    """
    gamma = attention.capture.gamma.to(attention.device)
    squares = dict.fromkeys(("content", "rope", "both"), 0.0)
    norm = 0.0
    for index in sequences:
        latent_unit, k_rope, _ = attention.sequence(index)
        content = rope = None  # a 16-bit path gives back what went in
        if scheme.content_bits < 16:
            content = read_content(transform, scheme, gamma, latent_unit)
        if scheme.rope_bits < 16:
            rope = read_rope(transform, scheme, pairing_cache, k_rope)
        for name, latent, key in (
            ("content", content, None),
            ("rope", None, rope),
            ("both", content, rope),
        ):
            error, teacher_norm = attention.error(index, latent, key)
            squares[name] += float(error)
        norm += float(teacher_norm)
    errors = {f"output_error_{name}": square / max(norm, 1e-30) for name, square in squares.items()}
    apart = errors["output_error_content"] + errors["output_error_rope"]
    return {**errors, "joint_ok": errors["output_error_both"] <= JOINT_FACTOR * apart}
