"""How the functions of this package become ops of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_LIBRARY = torch.library.Library("quantmla", "DEF")


def op(fake: Callable, mutates_args: tuple[str, ...] = ()) -> Callable:
    """Make a function an op of torch with a fake implementation, and return the op.

    torch.library.custom_op does the same, but a call through it takes several times as long, and
    a decode step makes one for each layer.

    Args:
        fake: gives results of the right shape and type, without data.
        mutates_args: names of the tensors that the function writes.
    Returns: decorator for the function.
    Source: own.
    """

    def register(function: Callable) -> torch._ops.OpOverload:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"quantmla::{name}", fake, lib=_LIBRARY)
        made = getattr(torch.ops.quantmla, name).default
        made.__doc__ = function.__doc__
        return made

    return register


def current_gpu(device: torch.device) -> AbstractContextManager:
    """Make the GPU of the tensors the current one: Triton launches there, wherever they are.

    Args:
        device: of the tensors of a call.
    Returns: context manager; does nothing for a CPU.
    Source: own.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
