"""Load models and tokenizers by transformers' own classes: complete, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantmla.errors import CheckpointError, QuantMLAError

SHOWN_NAMES = 4


def load_model(model_class: Any, folder: str | Path, **options: Any) -> Any:
    """Load a model whose every weight comes from the files; transformers fills gaps at random.

    A weight that is tied to another one, as lm_head often is, need not be in the files.

    Args:
        model_class: class of transformers with from_pretrained, or one of its Auto classes.
        folder: checkpoint folder.
        options: of from_pretrained, such as dtype.
    Returns: the model.
    Raises: CheckpointError naming the tensors that are missing or have another shape, or with the
        loader's reason.
    Source: own.
    """
    try:
        with quiet_loading():
            model, found = model_class.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,  # None would ask, and run the folder's code on a "y"
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # each reader (GGUF, safetensors, conversions) has its own types
        raise CheckpointError(
            "the model cannot be loaded",
            where=folder,
            expected="a complete checkpoint that the installed transformers can read",
            got=f"{type(error).__name__}: {error}",
            next_step="check the files, or download them again",
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            "tensors of the model are missing",
            where=folder,
            expected=f"every tensor of {type(model).__name__}",
            got="no " + _listed(missing),
            next_step="compare config.json with the tensors, or download the checkpoint again",
        )
    wrong = sorted(
        f"{name} {list(stored)} instead of {list(wanted)}"
        for name, stored, wanted in found["mismatched_keys"]
    )
    if wrong:
        raise CheckpointError(
            "tensors have another shape than config.json says",
            where=folder,
            expected=f"the shapes of {type(model).__name__}",
            got=_listed(wrong),
            next_step="check that config.json belongs to these shards",
        )
    return model


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bars and load reports of transformers; errors still raise.

    Source: own.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(folder: str | Path, **options: Any) -> Any:
    """Load the tokenizer of a checkpoint folder.

    Args: folder [checkpoint folder]; options [of from_pretrained].
    Returns: the transformers tokenizer.
    Raises: CheckpointError if there is none that loads.
    Source: own.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise CheckpointError(
            "the checkpoint has no tokenizer that loads",
            where=folder,
            expected="tokenizer.json and tokenizer_config.json, or those of a slow tokenizer",
            got=(str(error).splitlines() or [type(error).__name__])[0],
            next_step="copy the tokenizer files of the original model into the folder",
        ) from error


def check_device(device: str) -> None:
    """Refuse a torch device that this machine does not have, before any work.

    Args: device [torch device name].
    Raises: QuantMLAError.
    Source: own.
    """
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise QuantMLAError(
            "this device cannot be used",
            where=f"--device {device}",
            expected="cpu" + "".join(f", cuda:{index}" for index in range(gpus)),
            got=str(error).splitlines()[0],
            next_step="use --device cpu, or install a torch build that finds the GPU",
        ) from error
