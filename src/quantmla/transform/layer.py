"""What calibration learned about one cache layer: both transforms, clip ratios, and their file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantmla.errors import CalibrationError
from quantmla.files import atomic_write
from quantmla.quant import group_count
from quantmla.quant.feedback import Feedback, usable_feedback
from quantmla.transform.content import check_orthogonal

if TYPE_CHECKING:
    from quantmla.dims import MLADims

FORMAT_VERSION = 1
TRANSFORM_TENSORS = ("content_rotation", "content_scale", "rope_angle", "rope_scale")
CLIP_TENSORS = ("content_clip", "rope_clip")
SHIFT_TENSORS = ("content_shift", "rope_shift")
FEEDBACK_TENSORS = ("rope_order", "rope_feedback")
WRITER_TENSORS = CLIP_TENSORS + SHIFT_TENSORS + FEEDBACK_TENSORS
ONLINE_TENSORS = ("content_matrix", "rope_matrix")
TENSORS = (*TRANSFORM_TENSORS, *WRITER_TENSORS, *ONLINE_TENSORS)
CONDITION_MAX = 1e8  # of a matrix that has to be undone


@dataclass
class LayerTransform:
    """Transforms of one cache layer; a path whose tensors are None leaves its weights untouched.

    Args:
        content_rotation [R, R, float64]: R_C; None with a scale means no rotation.
        content_scale [R, float64]: S_C > 0, the new norm weight; None with a rotation means ones.
        rope_angle [P/2, float64, rad]: one rotation a pair, shared by all heads.
        rope_scale [P/2, float64]: one positive scale a pair, shared by all heads.
        content_clip [G, float32]: clip ratio of each content group, None for no clipping.
        rope_clip [G, float32]: clip ratio of each RoPE group, None for no clipping.
        content_shift [R, float32]: subtracted from the transformed latent before it is cached.
        rope_shift [P, float32]: subtracted from the transformed key after RoPE, in cache order.
        rope_order [P, int64], rope_feedback [P, P, float32]: order and matrix of the Feedback that
            rounds the transformed key; both or neither.
        rope_online: "hadamard" when post-RoPE keys and queries are multiplied by H_P, else None.
        content_matrix [R, R, float64]: invertible, applied to the latent behind all of the above
            when it is cached and undone when it is read; no weight can hold it.
        rope_matrix [P, P, float64]: the same for the RoPE key.
        stats: plain JSON numbers about how the layer was learned.
    """

    content_rotation: torch.Tensor | None = None
    content_scale: torch.Tensor | None = None
    rope_angle: torch.Tensor | None = None
    rope_scale: torch.Tensor | None = None
    content_clip: torch.Tensor | None = None
    rope_clip: torch.Tensor | None = None
    content_shift: torch.Tensor | None = None
    rope_shift: torch.Tensor | None = None
    rope_order: torch.Tensor | None = None
    rope_feedback: torch.Tensor | None = None
    rope_online: str | None = None
    content_matrix: torch.Tensor | None = None
    rope_matrix: torch.Tensor | None = None
    stats: dict = field(default_factory=dict)

    @property
    def content_identity(self) -> bool:
        """True when the content path is untouched."""
        return self.content_rotation is None and self.content_scale is None

    @property
    def rope_identity(self) -> bool:
        """True when the RoPE path is untouched."""
        return self.rope_angle is None and self.rope_scale is None

    @property
    def feedback(self) -> Feedback | None:
        """How the RoPE key is rounded; None for plain rounding."""
        if self.rope_feedback is None:
            return None
        return Feedback(self.rope_order, self.rope_feedback)

    def check(self, dims: MLADims, group: int) -> None:
        """Check shapes, positivity and orthogonality against a model.

        Args:
            dims: the model's dimensions.
            group: channels a quantisation group.

        Raises:
            CalibrationError: a tensor has the wrong shape or an unusable value.
        """
        rank, pairs = dims.kv_lora_rank, dims.qk_rope_head_dim // 2
        shapes = {
            "content_rotation": (rank, rank),
            "content_scale": (rank,),
            "rope_angle": (pairs,),
            "rope_scale": (pairs,),
            "content_clip": (group_count(rank, group),),
            "rope_clip": (group_count(2 * pairs, group),),
            "content_shift": (rank,),
            "rope_shift": (2 * pairs,),
            "content_matrix": (rank, rank),
            "rope_matrix": (2 * pairs, 2 * pairs),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise CalibrationError(
                    "a learned tensor does not fit the model",
                    where=name,
                    expected=list(shape),
                    got=list(tensor.shape),
                    next_step="calibrate this checkpoint itself",
                )
            if not torch.isfinite(tensor).all():
                raise CalibrationError(
                    "a learned tensor is not finite", where=name, got="NaN or Inf"
                )
        for name in ("content_scale", "rope_scale", *CLIP_TENSORS):
            tensor = getattr(self, name)
            limit = 1.0 if name in CLIP_TENSORS else math.inf
            if tensor is not None and not ((tensor > 0) & (tensor <= limit)).all():
                raise CalibrationError(
                    "a scale must be positive, and a clip ratio at most 1 as well",
                    where=name,
                    expected=f"above 0 and at most {limit:g}",
                    got=f"{float(tensor.min()):g} to {float(tensor.max()):g}",
                )
        if self.content_rotation is not None:
            check_orthogonal(self.content_rotation)
        for name in ONLINE_TENSORS:
            matrix = getattr(self, name)
            condition = 1.0 if matrix is None else float(torch.linalg.cond(matrix.double()))
            if not condition <= CONDITION_MAX:
                raise CalibrationError(
                    "a matrix of the cache cannot be undone",
                    where=name,
                    expected=f"a condition number of at most {CONDITION_MAX:g}",
                    got=f"{condition:.3g}",
                )
        if self.rope_order is None and self.rope_feedback is None:
            return
        feedback = (self.rope_order, self.rope_feedback)
        alone = any(part is None for part in feedback)
        if alone or not usable_feedback(*feedback, 2 * pairs):
            raise CalibrationError(
                "the error feedback cannot be used",
                where="rope_order, rope_feedback",
                expected=f"an order of {2 * pairs} channels and a strictly upper triangular matrix",
                got="one of both" if alone else "other tensors",
                next_step="calibrate this checkpoint itself",
            )

    def check_foldable(self) -> None:
        """Check that weights and the cache's own Hadamard matrix can hold all of it.

        Raises:
            CalibrationError: there is a dense matrix that only a simulated cache applies.
        """
        for name in ONLINE_TENSORS:
            if getattr(self, name) is not None:
                raise CalibrationError(
                    "this transform cannot be folded into the weights",
                    where=name,
                    expected="rotation and scales of the content, rotation and scale of RoPE pairs",
                    got="a dense matrix, as method flatquant learns: behind the norm only a "
                    "diagonal, and before RoPE only pair rotations leave the model unchanged",
                    next_step="measure it with `quantmla ablate`, which applies it in the cache",
                )

    def to_bytes(self) -> bytes:
        """Return the safetensors file as bytes; equal transforms give equal bytes."""
        from safetensors.torch import save

        tensors = {name: getattr(self, name) for name in TENSORS}
        stored = {
            name: tensor.detach().cpu().to(_storage_dtype(name)).contiguous()
            for name, tensor in tensors.items()
            if tensor is not None
        }
        rest = {"format": FORMAT_VERSION, "rope_online": self.rope_online, "stats": self.stats}
        # One metadata key only: safetensors writes several keys in no fixed order.
        return save(stored, metadata={"quantmla": json.dumps(rest, sort_keys=True)})

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        atomic_write(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> LayerTransform:
        """Read what `save` wrote.

        Raises:
            CalibrationError: the file is missing, damaged or of another version.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                rest = json.loads((file.metadata() or {})["quantmla"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CalibrationError(
                "cannot read a saved layer transform",
                where=path,
                got=f"{type(error).__name__}: {error}",
                next_step="delete the file and run the calibration again with --resume",
            ) from error
        unknown = sorted(set(tensors) - {f.name for f in fields(cls)})
        if rest.get("format") != FORMAT_VERSION or unknown:
            raise CalibrationError(
                "a saved layer transform has an unknown format",
                where=path,
                expected=f"format {FORMAT_VERSION}",
                got=f"format {rest.get('format')}, unknown tensors {unknown}",
                next_step="calibrate again with this version",
            )
        return cls(**tensors, rope_online=rest["rope_online"], stats=rest["stats"])


def _storage_dtype(name: str) -> torch.dtype:
    if name == "rope_order":
        return torch.int64
    return torch.float32 if name in WRITER_TENSORS else torch.float64
