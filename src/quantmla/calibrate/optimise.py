"""The step loop that both paths share: Adam, warmup, cosine, and the held-out pick."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

FINAL_RATE = 1e-3  # of the peak learning rate, where the cosine ends
GRADIENT_NORM = 1.0
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Phase:
    """One stretch of optimisation with its own loss and its own warmup and cosine.

    Args:
        steps: optimiser steps.
        loss: called with the step number, returns the scalar to minimise.
    """

    steps: int
    loss: Callable[[int], torch.Tensor]


def optimise(
    path: nn.Module,
    rates: dict[str, float],
    phases: list[Phase],
    heldout_error: Callable[[], float],
    warmup_steps: int,
    eval_every: int,
) -> tuple[float, float]:
    """Train a path and leave it in the state with the smallest held-out error, step 0 included.

    Args:
        path: module whose parameters are trained.
        rates: peak learning rate by parameter name; every parameter has one.
        phases: run one after the other.
        heldout_error: measures the current state.
        warmup_steps: linear warmup of each phase.
        eval_every: steps between two measurements; the end of a phase is always measured.

    Returns:
        (held-out error before training, smallest held-out error).

    Source: own loop; settings of algorithms.md section 2.6.
    """
    start = best = _measure(heldout_error)
    state = _copy_state(path)
    for phase in phases:
        parameters = [
            {"params": [parameter], "lr": rates[name], "peak": rates[name]}
            for name, parameter in path.named_parameters()
        ]
        optimiser = torch.optim.Adam(parameters, betas=BETAS)
        for step in range(phase.steps):
            factor = rate_factor(step, phase.steps, warmup_steps)
            for entry in optimiser.param_groups:
                entry["lr"] = entry["peak"] * factor
            optimiser.zero_grad()
            phase.loss(step).backward()
            nn.utils.clip_grad_norm_(path.parameters(), GRADIENT_NORM)
            optimiser.step()
            if (step + 1) % eval_every == 0 or step + 1 == phase.steps:
                error = _measure(heldout_error)
                if error < best:
                    best, state = error, _copy_state(path)
    path.load_state_dict(state)
    return start, best


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak learning rate at a step: linear warmup times cosine decay."""
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return warmup * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def _measure(heldout_error: Callable[[], float]) -> float:
    with torch.no_grad():
        error = heldout_error()
    return error if math.isfinite(error) else math.inf


def _copy_state(path: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in path.state_dict().items()}
