"""The formats of an ablation: packed schemes, and simulated formats of other systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from quantmla.config import KVScheme
from quantmla.errors import EvaluationError, SchemeError
from quantmla.quant.codebook import Codebook, ConstantNorm
from quantmla.quant.codec import Affine, Bf16, Codec
from quantmla.quant.floats import Fp8Flat, Fp8Tile, Mxfp4, Nvfp4
from quantmla.quant.hqq import HalfQuadratic
from quantmla.quant.kivi import PerChannel
from quantmla.quant.online import Online
from quantmla.transform.layer import LayerTransform

MakeCodec = Callable[[Tensor | None], Codec]  # clip ratios of the path -> codec


@dataclass(frozen=True)
class Form:
    """How both paths of a token are stored.

    Args:
        name: as in the name of a cell.
        content_bits, rope_bits: which calibrated transforms belong to it.
        content, rope: make the codec of a path; formats without clip ratios ignore them.
        packed: the pages of QuantMLACache hold it.
    """

    name: str
    content_bits: int
    rope_bits: int
    content: MakeCodec
    rope: MakeCodec
    packed: bool = False

    def codecs(self, transform: LayerTransform) -> tuple[Codec, Codec]:
        """Return the codecs of a layer, not fitted; the transform's matrices are not in them."""
        content, rope = self.content(transform.content_clip), self.rope(transform.rope_clip)
        if isinstance(rope, Affine) and transform.feedback is not None:
            rope = replace(rope, feedback=transform.feedback)
        return content, rope

    def logical_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> float:
        """Return the bytes of a token in one layer, metadata included, padding not."""
        content, rope = self.codecs(LayerTransform())
        return content.logical_bytes(kv_lora_rank) + rope.logical_bytes(qk_rope_head_dim)

    def scheme(self, *, policy: bool, group: int = 64) -> KVScheme:
        """Return the scheme of a packed format, with or without sinks and window."""
        bare = {} if policy else {"sink_tokens": 0, "window_tokens": 0}
        bits = {"content_bits": self.content_bits, "rope_bits": self.rope_bits}
        return KVScheme(**bits, group=group, **bare)


def behind_matrices(codecs: tuple[Codec, Codec], transform: LayerTransform) -> tuple[Codec, Codec]:
    """Put codecs behind the matrices that no weight can hold, for a cache that applies them.

    Args: codecs [content, rope]; transform [of the layer].
    Returns: (content, rope).
    Source: own.
    """
    matrices = (transform.content_matrix, transform.rope_matrix)
    pairs = zip(codecs, matrices, strict=True)
    return tuple(codec if m is None else Online(codec, m) for codec, m in pairs)


def affine(bits: int) -> MakeCodec:
    """Return what makes the affine codec of a path; 16 bits are BF16 rows.

    Source: own.
    """
    return (lambda clip: Bf16()) if bits == 16 else partial(_affine, bits)


def _affine(bits: int, clip: Tensor | None) -> Codec:
    return Affine(bits, clip=clip)


def _fixed(codec: Codec) -> MakeCodec:
    return lambda clip: codec


def packed_form(name: str) -> Form:
    """Return the format of a scheme such as c4r4.

    Raises: SchemeError for an unknown name.
    Source: own.
    """
    scheme = KVScheme.parse(name)
    bits = (scheme.content_bits, scheme.rope_bits)
    return Form(scheme.name, *bits, *map(affine, bits), packed=True)


_BF16 = _fixed(Bf16())
SIMULATED = {
    form.name: form
    for form in (
        Form("c4-kivi4", 4, 4, affine(4), _fixed(PerChannel(4))),
        Form("c2-kivi4", 2, 4, affine(2), _fixed(PerChannel(4))),
        Form("hqq4", 4, 4, _fixed(HalfQuadratic(4)), _fixed(HalfQuadratic(4))),
        Form("hqq2-hqq4", 2, 4, _fixed(HalfQuadratic(2)), _fixed(HalfQuadratic(4))),
        Form("fp8", 8, 8, _fixed(Fp8Flat()), _fixed(Fp8Flat())),
        Form("fp8-r16", 8, 16, _fixed(Fp8Flat()), _BF16),
        Form("fp8-tile", 8, 16, _fixed(Fp8Tile()), _BF16),
        Form("nvfp4", 4, 4, _fixed(Nvfp4()), _fixed(Nvfp4())),
        Form("nvfp4-r16", 4, 16, _fixed(Nvfp4()), _BF16),
        Form("mxfp4", 4, 4, _fixed(Mxfp4()), _fixed(Mxfp4())),
        Form("book4", 4, 4, _fixed(Codebook(4)), _fixed(Codebook(4))),
        Form("book2-book4", 2, 4, _fixed(Codebook(2)), _fixed(Codebook(4))),
        Form("norm4-r4", 4, 4, _fixed(ConstantNorm(bits=4)), affine(4)),
        Form("norm2-r4", 2, 4, _fixed(ConstantNorm(bits=2)), affine(4)),
    )
}


def form_of(name: str) -> Form:
    """Return a format by name.

    Raises: EvaluationError for a name that is neither a simulated format nor a scheme.
    Source: own.
    """
    if name in SIMULATED:
        return SIMULATED[name]
    try:
        return packed_form(name)
    except SchemeError as error:
        raise EvaluationError(
            "this format is not known",
            where="ablate",
            expected=f"a scheme as c4r4, or one of {', '.join(SIMULATED)}",
            got=name,
        ) from error
