"""Load a checkpoint for scoring and build the cache that its rows are measured through."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from quantmla.checkpoint.block import new_block
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.header import read_json
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.checkpoint.writer import WRITER_KINDS
from quantmla.config import PLAIN_FORMAT_VERSION, KVScheme, PathFormat, QuantMLABlock
from quantmla.engine.hf import QuantMLACache
from quantmla.errors import EvaluationError, UnsupportedModelError
from quantmla.loading import check_device, load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PATH_NAMES = {
    "expanded": "expanded BF16",
    "absorbed": "absorbed BF16",
    "quantised": "absorbed quantised",
}


@dataclass(frozen=True)
class Settings:
    """How to run the model; every field is written into each result row.

    Args:
        dtype: weights and activations, "float32" or "bfloat16".
        device: torch device name.
        prefill: "strict" (each query sees its own last window) or "fast" (explicit chunk borders).
        chunk_tokens: tokens fed to the model in one forward call; in fast mode these are the chunk
            borders.
        batch: sequences in one forward call.
    """

    dtype: str = "float32"
    device: str = "cpu"
    prefill: str = "strict"
    chunk_tokens: int = 512
    batch: int = 1

    def __post_init__(self) -> None:
        for name, known in (("dtype", tuple(DTYPES)), ("prefill", ("strict", "fast"))):
            value = getattr(self, name)
            if value not in known:
                raise EvaluationError(
                    f"unknown {name}",
                    where=f"--{name}",
                    expected=" or ".join(known),
                    got=value,
                    next_step="use one of these",
                )
        if min(self.chunk_tokens, self.batch) < 1:
            raise EvaluationError(
                "chunk_tokens and batch must be positive",
                where="--chunk-tokens, --batch",
                expected="at least 1",
                got=f"{self.chunk_tokens}, {self.batch}",
                next_step="use larger numbers",
            )


def default_settings(
    device: str | None, dtype: str | None, prefill: str, chunk_tokens: int, batch: int
) -> Settings:
    """Fill in what the machine decides: the GPU in bfloat16 where there is one, else float32.

    Args: device, dtype [None for the default]; prefill; chunk_tokens; batch.
    Returns: Settings.
    Raises: EvaluationError for values that do not exist; QuantMLAError for a device that this
        machine does not have.
    Source: own.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    return Settings(dtype, device, prefill, chunk_tokens, batch)


@dataclass(frozen=True)
class Subject:
    """One thing to score.

    Args:
        method: label of the row.
        folder: checkpoint folder.
        path: "expanded" (stock attention, expanded K/V), "absorbed" (BF16 rows through the absorbed
            path) or "quantised" (the packed cache).
        scheme: bits, group and zero mode instead of the folder's own; needed if it has no block.
        sink_tokens, window_tokens [tokens]: protection instead of the folder's own.
    """

    method: str
    folder: Path
    path: str = "quantised"
    scheme: KVScheme | None = None
    sink_tokens: int | None = None
    window_tokens: int | None = None


@contextmanager
def loaded(folder: Path, settings: Settings) -> Iterator[torch.nn.Module]:
    """Load a checkpoint for the length of a `with` block.

    Args: folder [checkpoint folder]; settings.
    Returns: the causal language model in eval mode on settings.device.
    Raises: CheckpointError if files or tensors are missing or damaged; UnsupportedModelError for an
        unknown architecture.
    Source: own.
    """
    reader = CheckpointReader(folder)  # truncated, missing and stray shards, by name
    for name in reader.tensor_names:
        if name.endswith(".weight"):  # codes without their scales would load as numbers
            reader.check_float(name, reader.shape_of(name))
    dtype = DTYPES[settings.dtype]
    model = load_model(_model_class(folder), folder, dtype=dtype, use_safetensors=True)
    try:
        yield model.eval().to(settings.device)
    finally:
        del model
        gc.collect()


def _model_class(folder: Path):
    """The class that config.json names: not every MLA class is known to AutoModelForCausalLM."""
    import transformers

    names = read_json(Path(folder) / "config.json").get("architectures") or [None]
    found = getattr(transformers, str(names[0]), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModelError(
            "the architecture is not in the installed transformers",
            where=f"{folder}/config.json: architectures",
            expected="a model class of transformers",
            got=names[0],
            next_step="correct config.json, or install a transformers that has this class",
        )
    return found


def tokenizer_sha256(tokenizer) -> str:
    """Hash what the tokenizer does, not where it lies.

    Args: tokenizer [transformers tokenizer].
    Returns: sha256 of the fast tokenizer's own JSON, or of the vocabulary of a slow one.
    Source: own.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = (
        backend.to_str()
        if backend is not None
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    return hashlib.sha256(body.encode()).hexdigest()


def effective_block(subject: Subject) -> QuantMLABlock:
    """Return the `quantmla` block that a subject's cache is made from, overrides applied.

    What the writer does was chosen for the bits of the folder, so another scheme drops it.

    Args: subject.
    Returns: QuantMLABlock of the folder, or a new one for a folder without a block.
    Raises: SchemeError if there is neither a scheme nor a block; CheckpointError without a config.
    Source: own.
    """
    config = read_json(Path(subject.folder) / "config.json")
    scheme, changes = subject.scheme, {}
    if scheme is not None and "quantmla" not in config:
        block = new_block("rtn", scheme, family_of(config), config)
    else:
        block = QuantMLABlock.from_config(config)
        if scheme is not None:
            changes = {
                "content": PathFormat(bits=scheme.content_bits, group=scheme.group),
                "rope": PathFormat(bits=scheme.rope_bits, group=scheme.group),
                "zero": scheme.zero,
                "format": PLAIN_FORMAT_VERSION,
                **dict.fromkeys(WRITER_KINDS, False),
                "writer_sha256": None,
                "per_layer": {},
            }
    for name in ("sink_tokens", "window_tokens"):
        if getattr(subject, name) is not None:
            changes[name] = getattr(subject, name)
    return block.model_copy(update=changes)


def new_cache(subject: Subject, settings: Settings) -> QuantMLACache | None:
    """Build an empty cache for one batch.

    Args: subject; settings.
    Returns: QuantMLACache, or None for the expanded path.
    Raises: CacheError, SchemeError or CheckpointError of the cache.
    Source: own.
    """
    if subject.path == "expanded":
        return None
    config = read_json(Path(subject.folder) / "config.json")
    # On every device: a replaced NaN would be a score of another model.
    options = {"prefill": settings.prefill, "check_finite": True}
    if settings.prefill == "fast":
        options["chunk_tokens"] = settings.chunk_tokens
    if subject.path == "absorbed":
        return QuantMLACache.from_scheme(KVScheme.parse("c16r16"), config, **options)
    config["quantmla"] = effective_block(subject).to_config()
    return QuantMLACache.from_config(config, folder=subject.folder, **options)
