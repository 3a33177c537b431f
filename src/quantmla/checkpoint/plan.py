"""What fusing a checkpoint will change, checked against the headers before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

from quantmla.checkpoint.families import AttentionNames, family_of
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.config import QuantMLABlock
from quantmla.dims import MLADims
from quantmla.errors import CalibrationError, CheckpointError
from quantmla.transform.fuse import Weights, changed_keys, fuse_layer
from quantmla.transform.layer import LayerTransform


@dataclass(frozen=True)
class AttentionLayers:
    """The attention tensors of a checkpoint, one entry a cache layer.

    Args:
        reader: the checkpoint.
        dims: its dimensions.
        pairing: RoPE pairing in its weights.
        names: tensor names of each cache layer.
    """

    reader: CheckpointReader
    dims: MLADims
    pairing: str
    names: tuple[AttentionNames, ...]

    @classmethod
    def of(cls, reader: CheckpointReader) -> AttentionLayers:
        """Find and check the attention tensors of a checkpoint, by headers only.

        Raises:
            UnsupportedModelError: the family is refused.
            CheckpointError: a tensor is missing, has another shape or no plain float dtype.
        """
        family = family_of(reader.config)
        layers = cls(
            reader,
            MLADims.from_config(reader.config),
            family.rope_pairing(reader.config),
            tuple(family.attention_names(reader.config)),
        )
        for names in layers.names:
            for key, name in names.fusable().items():
                reader.check_float(name, layers.shape(key))
        return layers

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape that the config promises for one of the keys of `fuse_layer`."""
        d = self.dims
        down = d.kv_lora_rank + d.qk_rope_head_dim
        return {
            "kv_a": (down, d.hidden_size),
            "kv_a_bias": (down,),
            "kv_a_norm": (d.kv_lora_rank,),
            "kv_b": (d.num_heads * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank),
            "q": (d.num_heads * d.qk_head_dim, d.q_lora_rank or d.hidden_size),
        }[key]

    def weights(self, layer: int) -> Weights:
        """Read the tensors of one cache layer, under the keys of `fuse_layer`.

        Raises:
            CheckpointError: a tensor holds NaN or Inf.
        """
        names = self.names[layer].fusable()
        return {key: self.reader.get_float(name, self.shape(key)) for key, name in names.items()}

    def tensor_names(self) -> list[str]:
        """Return the names of all attention tensors that fusing could change."""
        return [name for names in self.names for name in names.fusable().values()]


@dataclass(frozen=True)
class FusePlan:
    """Which tensor of which shard changes, and through which layer's transform.

    Args:
        layers: the attention layers of the source.
        transforms: one a cache layer.
        changed: per shard, the cache layers that change something in it.
    """

    layers: AttentionLayers
    transforms: list[LayerTransform]
    changed: dict[str, list[int]]

    @classmethod
    def of(
        cls, reader: CheckpointReader, transforms: list[LayerTransform], block: QuantMLABlock
    ) -> FusePlan:
        """Check that source, transforms and block belong together.

        Raises:
            CheckpointError: the source is already fused, or lacks a tensor.
            CalibrationError: transforms do not fit the model or the block.
        """
        reader.refuse_fused()
        layers = AttentionLayers.of(reader)
        _check_transforms(transforms, layers, block)
        changed: dict[str, list[int]] = {}
        for layer, transform in enumerate(transforms):
            names = layers.names[layer].fusable()
            for shard in sorted(
                {reader.shard_of(names[k]) for k in changed_keys(names, transform)}
            ):
                changed.setdefault(shard, []).append(layer)
        return cls(layers, list(transforms), changed)

    def fused_names(self) -> set[str]:
        """Return the names of all tensors that change."""
        return {
            names[key]
            for layer, transform in enumerate(self.transforms)
            for names in (self.layers.names[layer].fusable(),)
            for key in changed_keys(names, transform)
        }

    def fused_tensors(self, shard: str):
        """Yield (place, new tensor) for everything that changes in one shard, a layer at a time.

        Raises:
            CheckpointError: NaN or Inf in a source tensor, or a result overflows its dtype.
        """
        reader = self.layers.reader
        for layer in self.changed.get(shard, []):
            names = self.layers.names[layer].fusable()
            fused = fuse_layer(
                self.layers.weights(layer),
                self.layers.dims,
                self.layers.pairing,
                self.transforms[layer],
            )
            for key, tensor in fused.items():
                if not tensor.isfinite().all() or (key == "kv_a_norm" and not tensor.all()):
                    raise CheckpointError(
                        "a fused weight does not fit its dtype",
                        where=names[key],
                        expected=f"values that {tensor.dtype} can hold",
                        got="overflow, or a norm weight that became zero",
                        next_step="store the source checkpoint in BF16, or calibrate again",
                    )
                if reader.shard_of(names[key]) == shard:
                    yield reader.info(names[key]), tensor


def _check_transforms(
    transforms: list[LayerTransform], layers: AttentionLayers, block: QuantMLABlock
) -> None:
    dims = layers.dims
    if len(transforms) != dims.num_cache_layers:
        raise CalibrationError(
            "there must be one transform a cache layer",
            expected=dims.num_cache_layers,
            got=len(transforms),
            next_step="finish the calibration with --resume",
        )
    family = family_of(layers.reader.config)
    for field in ("rope_pairing", "rope_pairing_cache"):
        want = getattr(family, field)(layers.reader.config)
        if getattr(block, field) != want:
            raise CalibrationError(
                "the quantmla block names another RoPE pairing than the model has",
                where=field,
                expected=want,
                got=getattr(block, field),
                next_step="take the pairing from checkpoint.families",
            )
    for layer, transform in enumerate(transforms):
        try:
            transform.check(dims, block.content.group)
            transform.check_foldable()
        except CalibrationError as error:
            raise CalibrationError(
                error.what,
                where=f"cache layer {layer}: {error.where or 'content_rotation'}",
                expected=error.expected,
                got=error.got,
                next_step=error.next_step,
            ) from error
        if transform.rope_online != block.rope_online:
            raise CalibrationError(
                "all layers and the quantmla block must agree on the online RoPE transform",
                where=f"cache layer {layer}",
                expected=block.rope_online,
                got=transform.rope_online,
            )
