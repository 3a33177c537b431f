"""The packed cache as a transformers Cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from quantmla.cache.latent import UNBOUNDED_TOKENS, LatentLayer
from quantmla.cache.layout import PageLayout
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.reader import CONFIG_NAME
from quantmla.config import KVScheme, QuantMLABlock
from quantmla.dims import MLADims
from quantmla.engine.attention import (
    ATTENTION_NAME,
    HandOff,
    Shifts,
    offer,
    require_empty_slot,
    use_packed_attention,
)
from quantmla.engine.clips import Clips, Writer, check_block, load_writers
from quantmla.engine.kernel_path import Kernels
from quantmla.errors import CacheError, CheckpointError

__all__ = ["PackedLayer", "QuantMLACache", "use_packed_attention"]


class PackedLayer(CacheLayerMixin):
    """One layer of QuantMLACache: hands new rows to the packed attention, which stores them.

    Args:
        store: LatentLayer with the data.
        chunk_tokens: None for strict mode; in fast mode the length of a chunk.
        rope_online: transform of keys and queries after RoPE, or None.
        kernels: which kernels may run, as in `kernel_path.choose`.
        writer: its shifts are applied here, the rest by the store.
    Source: own.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        store: LatentLayer,
        chunk_tokens: int | None = None,
        rope_online: str | None = None,
        kernels: Kernels = "auto",
        writer: Writer | None = None,
    ):
        super().__init__()
        self.store, self.chunk_tokens, self.rope_online = store, chunk_tokens, rope_online
        self.kernels, writer = kernels, writer or Writer()
        self.shifts = Shifts(writer.content_shift, writer.rope_shift)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is taken with the first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Offer new rows [B, 1, S, R] and [B, 1, S, P] to the packed attention and return them."""
        settings = self.chunk_tokens, self.rope_online, self.kernels, self.shifts
        offer(HandOff(self.store, key_states[:, 0], value_states[:, 0], *settings))
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns given so far, padding included."""
        return self.store.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask of a call with `query_length` new tokens, and their offset."""
        return self.store.columns + query_length, 0

    def get_max_length(self) -> int:
        """-1: the pages grow."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns; a positive number is refused."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding of transformers 5.17: a tensor
        if tokens_to_remove > 0:
            raise CacheError(
                "crop takes a negative number of tokens to forget",
                where="crop",
                expected="0 or less",
                got=tokens_to_remove,
                next_step="pass minus the number of tokens to remove, as transformers does",
            )
        self.store.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens and memory."""
        self.store.reset()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row b be what row beam_idx[b] was."""
        self.store.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self.store.select(torch.arange(len(self.store.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (numbers or a boolean mask)."""
        self.store.select(torch.arange(len(self.store.lengths))[indices.cpu()])

    def offload(self) -> None:
        """Move all parts of the layer to the CPU: pages, BF16 rows and padding."""
        self.store.to("cpu")

    def prefetch(self) -> None:
        """Move the layer back to the device of its last tokens."""
        if self.store.device is not None:
            self.store.to(self.store.device)


class QuantMLACache(Cache):
    """KV cache of an MLA model in packed pages, for `model(...)` and `model.generate(...)`.

    Make one with `from_config` or `from_scheme` and pass it with `**cache.as_kwargs(model)`.

    Args:
        layers: one PackedLayer per attention module, in cache-layer order.
        config: transformers config of the model, only to notice a wrong attention function early.
    Source: algorithms.md section 6.
    """

    def __init__(self, layers: list[PackedLayer], config=None):
        super().__init__(layers=layers)
        is_object = config is not None and not isinstance(config, dict)
        self._config = weakref.ref(config) if is_object else None

    @classmethod
    def from_config(cls, config, *, folder: str | Path | None = None, **settings) -> QuantMLACache:
        """Make the cache that a fused checkpoint asks for.

        Args:
            config: `model.config`, or the folder of the checkpoint.
            folder: the checkpoint, with quantmla.safetensors and quantmla_manifest.json; by default
                the folder that config came from.
            settings: prefill, chunk_tokens, slack_tokens, row_dtype, check_finite, kernels of
                from_scheme.
        Returns: QuantMLACache.
        Raises: SchemeError without a `quantmla` block; CheckpointError if the block is not that of
            the model and its folder, or clip ratios are missing or not those of the block.
        Source: own.
        """
        if isinstance(config, str | Path):
            folder = config if folder is None else folder
            config = read_json(_folder(config) / CONFIG_NAME)
        loaded_from = getattr(config, "_name_or_path", "")  # a dict does not say
        if folder is None and loaded_from and Path(loaded_from).is_dir():
            folder = loaded_from
        folder = None if folder is None else _folder(folder)
        block = QuantMLABlock.from_config(config)
        dims = MLADims.from_config(config)
        schemes = [block.scheme(layer) for layer in range(dims.num_cache_layers)]
        check_block(block, config, folder)
        writers = None
        if block.has_writer:
            files = folder or _folder(loaded_from)
            writers = load_writers(files, _layouts(dims, schemes), block)
        settings |= {"writers": writers, "rope_online": block.rope_online}
        return cls.from_scheme(schemes, config, **settings)

    @classmethod
    def from_scheme(
        cls,
        scheme: KVScheme | str | Sequence[KVScheme],
        model,
        *,
        clips: Clips | Sequence[Clips] | None = None,
        writers: Sequence[Writer] | None = None,
        rope_online: Literal["hadamard"] | None = None,
        prefill: Literal["strict", "fast"] = "strict",
        chunk_tokens: int | None = None,
        slack_tokens: int = 0,
        row_dtype: torch.dtype = torch.bfloat16,
        check_finite: bool | None = None,
        kernels: Kernels = "auto",
    ) -> QuantMLACache:
        """Make a cache of a given scheme for any MLA model, for experiments.

        Args:
            scheme: one KVScheme or its name, or one for each cache layer; c16r16 is the BF16
                reference.
            model: MLADims, or a model config.
            clips: (content, rope) clip ratios, each a float, a tensor [G] or None; one pair for all
                layers, or a sequence with a pair for each.
            writers: a Writer for each layer, in place of `clips`.
            rope_online: "hadamard" multiplies keys and queries by a Hadamard matrix after RoPE.
            prefill: "strict" (quality, independent of chunking) or "fast" (speed).
            chunk_tokens [tokens]: length of a chunk in fast mode; None makes each call one chunk.
                Strict mode does not depend on it.
            slack_tokens [tokens]: how many tokens `crop` can take back, as speculative decoding
                needs.
            row_dtype: type of the BF16 rows; float32 for exactness tests only.
            check_finite: refuse NaN and Inf, or replace and count them; None refuses on the CPU
                only.
            kernels: "auto" runs the attention in kernels where they can, "never" in plain torch;
                "require" makes anything but kernels an error with every reason.
        Returns: QuantMLACache.
        Raises: UnsupportedModelError for a refused family; CacheError for settings that do not fit.
        Source: own.
        """
        is_dims = isinstance(model, MLADims)
        dims = model if is_dims else MLADims.from_config(model)
        count = dims.num_cache_layers
        scheme = KVScheme.parse(scheme) if isinstance(scheme, str) else scheme
        schemes = [scheme] * count if isinstance(scheme, KVScheme) else list(scheme)
        known = rope_online in (None, "hadamard") and kernels in get_args(Kernels)
        if not known or not isinstance(row_dtype, torch.dtype):
            raise CacheError(
                "unknown setting",
                where="from_scheme: rope_online, row_dtype, kernels",
                expected=f"None or 'hadamard', a torch dtype, one of {get_args(Kernels)}",
                got=f"{rope_online!r}, {row_dtype!r}, {kernels!r}",
            )
        if writers is None:
            writers, clips = [Writer(*pair) for pair in _pairs(clips, count)], None
        if not len(schemes) == len(writers) == count or slack_tokens < 0 or clips is not None:
            raise CacheError(
                "the settings do not fit the model",
                where="from_scheme",
                expected=f"{count} schemes, {count} pairs of clips or writers, slack_tokens >= 0",
                got=f"{len(schemes)}, {len(writers)}, slack_tokens={slack_tokens}",
            )
        layers, chunk = [], _chunk(prefill, chunk_tokens)
        for index, layout in enumerate(_layouts(dims, schemes)):
            writer = writers[index]
            store = LatentLayer(
                layout,
                layer_idx=index,
                slack_tokens=slack_tokens,
                row_dtype=row_dtype,
                content_clip=writer.content_clip,
                rope_clip=writer.rope_clip,
                rope_feedback=writer.feedback,
                check_finite=check_finite,
            )
            layers.append(PackedLayer(store, chunk, rope_online, kernels, writer))
        return cls(layers, None if is_dims else model)

    def as_kwargs(self, model) -> dict[str, QuantMLACache]:
        """Switch a model to the packed attention and return the keyword that passes this cache.

        Args: model: the model that the cache is for.
        Returns: {"cache": self} or, before transformers 5.20, {"past_key_values": self}.
        Raises: UnsupportedModelError or CacheError if the model cannot be switched.
        Source: own.
        """
        self._check_model(model)
        use_packed_attention(model)
        self._config = weakref.ref(model.config)
        names = inspect.signature(model.forward).parameters
        return {"cache" if "cache" in names else "past_key_values": self}

    def _check_model(self, model) -> None:
        """Refuse a model of other dimensions, and another model once there are tokens."""
        dims = MLADims.from_config(model.config)
        layout = self.layers[0].store.layout
        expected = (len(self.layers), layout.kv_lora_rank, layout.qk_rope_head_dim)
        got = (dims.num_cache_layers, dims.kv_lora_rank, dims.qk_rope_head_dim)
        bound = self._config() if self._config is not None else None
        foreign = bound is not None and bound is not model.config and self.get_seq_length() > 0
        if got != expected or foreign:
            raise CacheError(
                "this cache belongs to another model",
                where=type(model).__name__,
                expected="layers, kv_lora_rank and qk_rope_head_dim of "
                f"{expected[0]}, {expected[1]} and {expected[2]}",
                got="tokens of another model" if foreign else f"{got[0]}, {got[1]} and {got[2]}",
                next_step="create a cache for this model",
            )

    @property
    def attention_kernel(self) -> str | None:
        """What ran the attention of the last call: "triton", "interpreter" or "torch".

        Both names with a + between them where layers differ; None before the first call.
        """
        ran = {layer.store.attention_kernel for layer in self.layers} - {None}
        return "+".join(sorted(ran)) or None

    @property
    def packed_rows_read(self) -> int:
        """Packed keys attended so far, summed over layers, sequences and queries."""
        return sum(layer.store.packed_rows_read for layer in self.layers)

    @property
    def nonfinite_values(self) -> int:
        """NaN and Inf values that were replaced while writing."""
        return sum(int(layer.store.nonfinite) for layer in self.layers)

    def resident_bytes(self) -> int:
        """Bytes of all tensors that the cache holds."""
        return sum(layer.store.resident_bytes() for layer in self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Offer new rows of a layer to the packed attention; return them, never the history.

        Args:
            key_states [B, 1, S, R]: latents after the norm.
            value_states [B, 1, S, P]: keys after RoPE.
            layer_idx: cache layer.
        Returns: key_states, value_states.
        Raises: CacheError if the model does not use the packed attention, or a call before this one
            stopped half-way.
        Source: own.
        """
        require_empty_slot()
        config = self._config() if self._config is not None else None
        active = getattr(config, "_attn_implementation", None)
        if active not in (None, ATTENTION_NAME):
            raise CacheError(
                "this model would not read the packed cache",
                where=f"cache layer {layer_idx}",
                expected=f"attention implementation {ATTENTION_NAME!r}",
                got=repr(active),
                next_step="pass **cache.as_kwargs(model), or call use_packed_attention(model)",
            )
        columns = self.layers[layer_idx].store.columns + (key_states.shape[2] if layer_idx else 0)
        if columns != self.layers[0].store.columns:
            raise CacheError(
                "the layers of the cache hold different numbers of tokens",
                where=f"cache layer {layer_idx}",
                expected=self.layers[0].store.columns,
                got=columns,
                next_step="an earlier call stopped half-way: start with a new cache",
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move one layer to the CPU; its next call brings it back."""
        self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move one layer back to the device of its last tokens."""
        self.layers[layer_idx].prefetch()


def _folder(name: str | Path) -> Path:
    """The folder of a checkpoint; never the current one because nothing was named."""
    if not str(name) or not Path(name).is_dir():
        raise CheckpointError(
            "the folder of this checkpoint is not known",
            where="QuantMLACache.from_config",
            expected="the folder that holds config.json and quantmla.safetensors",
            got=repr(str(name)),
            next_step="pass it as folder=; hub names are not looked up",
        )
    return Path(name)


def _pairs(clips: Clips | Sequence[Clips] | None, count: int) -> list[Clips]:
    """One pair of clip ratios for each of `count` layers; what is no pair is refused."""
    if clips is None:
        return [(None, None)] * count
    kinds, pairs = (tuple, list), clips
    if isinstance(clips, kinds) and not any(isinstance(part, kinds) for part in clips):
        pairs = [clips] * count
    if not isinstance(pairs, kinds) or not all(isinstance(p, kinds) and len(p) == 2 for p in pairs):
        raise CacheError(
            "these clip ratios cannot be given to the layers",
            where="from_scheme: clips",
            expected="a pair (content, rope), or a list of such pairs",
            got=repr(clips)[:200],
        )
    return list(pairs)


def _layouts(dims: MLADims, schemes: Sequence[KVScheme]) -> list[PageLayout]:
    return [PageLayout(dims.kv_lora_rank, dims.qk_rope_head_dim, scheme) for scheme in schemes]


def _chunk(prefill: str, chunk_tokens: int | None) -> int | None:
    if prefill not in ("strict", "fast") or (chunk_tokens is not None and chunk_tokens < 1):
        raise CacheError(
            "unknown prefill mode",
            where="prefill, chunk_tokens",
            expected="'strict' or 'fast', and chunk_tokens of at least 1",
            got=f"{prefill!r}, {chunk_tokens}",
        )
    return (chunk_tokens or UNBOUNDED_TOKENS) if prefill == "fast" else None
