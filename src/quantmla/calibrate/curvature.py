"""How an error of either cached path reaches the attention output, to first order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantmla.calibrate.objective import LayerAttention


@dataclass(frozen=True)
class OutputSensitivity:
    """Gauss-Newton picture of one layer's output error, from pulled-back random output vectors.

    For a random output vector r the pullback g = J^T r has E[g_j g_j^T] = J_j^T J_j, the block of
    token j. One backward pass a probe therefore samples the blocks of every token and both paths.

    Args:
        content [R, R]: mean block of the unit latent over the training windows, mean diagonal 1.
        content_weight: window -> [T] energy of each token's block, mean 1 over all windows.
        rope_pull: training window -> [probes, T, P] pullbacks of the RoPE key, mean square 1.

    Source: own.
    """

    content: torch.Tensor
    content_weight: dict[int, torch.Tensor]
    rope_pull: dict[int, torch.Tensor]

    @classmethod
    def of(
        cls,
        attention: LayerAttention,
        train: list[int],
        heldout: list[int],
        probes: int,
        seed: int,
    ) -> OutputSensitivity:
        """Sample a layer.

        Args:
            attention: the layer, with the protection that the cache will use.
            train: captured windows that training may learn from.
            heldout: windows that only get token weights, to compare candidates on.
            probes: random output vectors a window.
            seed: of the probes.

        Returns:
            OutputSensitivity on the layer's device.
        """
        generator = torch.Generator().manual_seed(seed)
        rank = attention.kv_b.shape[-1]
        content = torch.zeros(rank, rank, dtype=torch.float64)
        weight, pull = {}, {}
        for window in (*train, *heldout):
            exact_latent, exact_rope, _ = attention.sequence(window)
            latent = exact_latent.clone().requires_grad_(True)
            rope = exact_rope.clone().requires_grad_(True)
            output = attention.output(window, latent, rope)
            energy = torch.zeros_like(exact_latent[:, 0])
            pulls = []
            for probe in range(probes):
                vector = torch.randn(output.shape, generator=generator).to(output)
                latent_pull, rope_pull = torch.autograd.grad(
                    output, (latent, rope), vector, retain_graph=probe + 1 < probes
                )
                energy += latent_pull.square().sum(-1)
                if window in train:
                    content += (latent_pull.T @ latent_pull).double().cpu()
                    pulls.append(rope_pull)
            weight[window] = energy
            if pulls:
                pull[window] = torch.stack(pulls)
        content *= rank / content.trace().clamp_min(1e-30)
        energy_mean = torch.cat(list(weight.values())).mean().clamp_min(1e-30)
        pull_rms = torch.cat(list(pull.values()), 1).square().mean().sqrt().clamp_min(1e-30)
        return cls(
            content.to(attention.device, attention.dtype),
            {window: energy / energy_mean for window, energy in weight.items()},
            {window: rows / pull_rms for window, rows in pull.items()},
        )

    def content_energy(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the weighted output energy of latent errors [T, R], token weights [T]."""
        return (((rows @ self.content) * rows).sum(-1) * weight).sum()

    def rope_energy(self, rows: torch.Tensor, window: int) -> torch.Tensor:
        """Return the sampled output energy of RoPE key errors [T, P] of one window."""
        return (self.rope_pull[window] * rows).sum(-1).square().mean(0).sum()
