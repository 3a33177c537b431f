"""Everything that is measured on one captured layer, window by window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quantmla.analyze.bound import RopeBound
from quantmla.analyze.decompose import content_terms
from quantmla.analyze.directions import Direction, random_signs, seeded
from quantmla.analyze.gauss_newton import jvp_energies
from quantmla.analyze.response import output_changes
from quantmla.analyze.result import PATHS, LayerDirections, WindowSums, layer_result
from quantmla.analyze.window import CachedWindow, LayerWeights, cached_content, cached_rope
from quantmla.quant.codec import Affine

if TYPE_CHECKING:
    from torch import Tensor

    from quantmla.analyze.formats import LayerFormat
    from quantmla.calibrate.record import LayerCapture


@dataclass(frozen=True)
class Settings:
    """What holds for every layer.

    Args:
        nmse: cache NMSE that both paths are disturbed to.
        probes: random sign vectors a window and path.
        seed: of sign vectors, random directions and intervals.
        device: where to compute.
    """

    nmse: float
    probes: int
    seed: int
    device: str


def analyse_layer(
    capture: LayerCapture,
    layer_format: LayerFormat,
    settings: Settings,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Measure response, decomposition, amplification and bound of one layer.

    Identities and the bound are computed in float64, random probes in float32: their rounding is
    far below their standard error.

    Args:
        capture: activations and weights of the layer.
        layer_format: of its cache.
        settings: of the analysis.
        tell: called with the number of finished windows.

    Returns:
        JSON data of the layer, with the sums of every window.

    Raises:
        CalibrationError: a path has no error, or one that is not finite.

    Source: algorithms.md section 4.
    """
    online = layer_format.rope_online
    directions = _directions(capture, layer_format, settings)
    exact_weights = LayerWeights.of(capture, settings.device, torch.float64)
    probe_weights = LayerWeights.of(capture, settings.device, torch.float32)
    windows = []
    for index in range(len(capture.latent_unit)):
        exact = CachedWindow.of(capture, index, exact_weights, online)
        probed = CachedWindow.of(capture, index, probe_weights, online)
        seed = (settings.seed, capture.layer, index)
        windows.append(_measure(exact, probed, directions, index, settings, seed))
        tell(index + 1)
    return layer_result(capture.layer, directions, windows, settings.nmse)


def _directions(
    capture: LayerCapture, layer_format: LayerFormat, settings: Settings
) -> LayerDirections:
    """Return the rounding error of both paths, and a random direction of each."""
    scheme, online, writer = layer_format.scheme, layer_format.rope_online, layer_format.writer
    indices = range(len(capture.latent_unit))
    rows = {
        "content": [cached_content(capture, index) for index in indices],
        "rope": [cached_rope(capture, index, online) for index in indices],
    }
    for path, shift in (("content", writer.content_shift), ("rope", writer.rope_shift)):
        if shift is not None:
            rows[path] = [one - shift.to(one) for one in rows[path]]
    quantisers = {
        "content": Affine(scheme.content_bits, scheme.group, scheme.zero, writer.content_clip),
        "rope": Affine(
            scheme.rope_bits, scheme.group, scheme.zero, writer.rope_clip, writer.feedback
        ),
    }
    rounding, random = {}, {}
    for path in PATHS:
        where = f"{capture.prefix}, {path}"
        errors = [quantisers[path].round_trip(one) - one for one in rows[path]]
        rounding[path] = Direction.of(rows[path], errors, where)
        generator = seeded("random", settings.seed, capture.layer, path)
        drawn = [torch.randn(one.shape, generator=generator) for one in rows[path]]
        random[path] = Direction.of(rows[path], drawn, where)
    return LayerDirections(rounding, random)


def _measure(
    exact: CachedWindow,
    probed: CachedWindow,
    directions: LayerDirections,
    index: int,
    settings: Settings,
    seed: tuple[int, ...],
) -> WindowSums:
    def scaled(direction: Direction) -> Tensor:
        return direction.factor(settings.nmse) * direction.error[index].to(exact.latent)

    d_latent, d_rope = (scaled(directions.rounding[path]) for path in PATHS)
    random_latent, random_rope = (scaled(directions.random[path]) for path in PATHS)
    output, moved = output_changes(
        exact, [(d_latent, None), (None, d_rope), (random_latent, None), (None, random_rope)]
    )
    signs, signed_error = {}, {}
    for path in PATHS:
        error = directions.rounding[path].error[index]
        generator = seeded("signs", path, *seed)
        vectors = random_signs((settings.probes, *error.shape), generator).to(settings.device)
        signs[path] = _along(probed, path, vectors)
        signed_error[path] = _along(probed, path, vectors * error.abs().to(vectors))
    return WindowSums(
        output=float(output),
        moved=dict(zip(PATHS, moved[:2].tolist(), strict=True)),
        random_moved=dict(zip(PATHS, moved[2:].tolist(), strict=True)),
        terms=content_terms(exact, d_latent),
        first_order={
            "content": float(_along(exact, "content", d_latent[None])),
            "rope": float(_along(exact, "rope", d_rope[None])),
        },
        signs=signs,
        signed_error=signed_error,
        bound=RopeBound.of(exact, d_rope),
    )


def _along(window: CachedWindow, path: str, directions: Tensor) -> Tensor:
    return jvp_energies(window, **{"latents" if path == "content" else "ropes": directions})
