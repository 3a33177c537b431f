"""How much an error of each layer's attention output moves the model's predictions."""

from __future__ import annotations

import torch
from torch import nn

from quantmla.errors import CalibrationError


def layer_weights(
    model: nn.Module, windows: torch.Tensor, *, first_token: int, seed: int
) -> list[float]:
    """Return for each cache layer the KL, to second order, of a relative squared error of 1.

    The gradient g of the log-probability of a token drawn from the model itself has
    E[g^T g] = the curvature of the KL. With errors of no preferred direction, an error of relative
    square D costs D |Y|^2 |g|^2 / (2 dim) nats a token.

    Args:
        model: transformers model of the source checkpoint, best in float32; its parameters take
            no gradients afterwards.
        windows [n, T, int64]: token windows of the training text.
        first_token: tokens before it do not count, as they read nothing packed.
        seed: of the drawn tokens.

    Returns:
        One weight a cache layer, in nats.

    Raises:
        CalibrationError: the windows have no token from `first_token` on.

    Source: own; Fisher information of the attention outputs.
    """
    if windows.shape[1] <= first_token:
        raise CalibrationError(
            "the windows are too short to weigh layers on",
            where="sequence_tokens",
            expected=f"more than the {first_token} tokens that are always read in BF16",
            got=windows.shape[1],
        )
    outputs: dict[int, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(_keeper(outputs, module.layer_idx))
        for module in model.modules()
        if hasattr(module, "kv_a_layernorm")
    ]
    model.requires_grad_(False)
    generator = torch.Generator(model.device).manual_seed(seed)
    totals: dict[int, float] = {}
    for window in windows:
        outputs.clear()
        logits = model(input_ids=window[None].to(model.device), use_cache=False).logits[0].float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
        logits.log_softmax(-1).gather(-1, drawn).sum().backward()
        for layer, output in outputs.items():
            gradient, value = (
                x[0, first_token:].float().square().sum(-1).mean()
                for x in (output.grad, output.detach())
            )
            weight = float(gradient * value) / (2 * output.shape[-1])
            totals[layer] = totals.get(layer, 0.0) + weight / len(windows)
    for hook in hooks:
        hook.remove()
    return [totals[layer] for layer in sorted(totals)]


def _keeper(outputs: dict[int, torch.Tensor], layer: int):
    """Return a hook that keeps an attention output and starts gradients at the first one."""

    def keep(_module, _args, result):
        output = result[0]
        if not output.requires_grad:
            output = output.detach().requires_grad_(True)
        output.retain_grad()
        outputs[layer] = output
        return (output, *result[1:])

    return keep
