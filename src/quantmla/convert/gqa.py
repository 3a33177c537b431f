"""Training-free conversion of one grouped-query attention layer to multi-head latent attention.

The steps, in call order: mix the key/value heads per RoPE frequency so that one component carries
the positions (`mix_key_heads`), split the keys into that shared RoPE key and position-free content
(`split_keys`), compress content and values jointly (`joint_pca`), and solve the up-projection
again for the normalised latent (`refit_after_norm`). `convert_layer` runs them all.

A RoPE pair (x_p, x_{p+d/2}) is the complex number x_p + i x_{p+d/2}; RoPE multiplies it by
exp(i position theta_p). Any complex matrix acting across heads therefore commutes with RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.errors import CalibrationError

# Weight of a window's first token in the refit: its latent is 2 to 6 times smaller than the
# others' (an attention sink with a tiny value), and the latent norm blows it up to their size.
SINK_WEIGHT = 100.0
# Relative ridge of the covariances and of the refit; keeps both solvable when calibration is short.
DAMPING = 1e-6


@dataclass(frozen=True)
class GQAWeights:
    """Projections of one source attention layer, HF orientation (out x in), half-split RoPE.

    Args:
        query: [num_heads * head_dim, D].
        key: [num_kv_heads * head_dim, D].
        value: [num_kv_heads * head_dim, D].
        head_dim: width of one head; even.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    head_dim: int

    @property
    def num_heads(self) -> int:
        return self.query.shape[0] // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[0] // self.head_dim


@dataclass(frozen=True)
class HeadMixing:
    """Invertible mixing of the key heads, one matrix per RoPE frequency.

    Args:
        analysis: [d/2, G, G] complex128; component c is sum_g analysis[c, g] key_g.
        synthesis: [d/2, G, G] complex128, the inverse.
        energy_kept: share of the weighted key energy on component 0, 0 to 1.
    """

    analysis: Tensor
    synthesis: Tensor
    energy_kept: float


@dataclass(frozen=True)
class SplitKeys:
    """Key and query projections after the mixing, all exact apart from the dropped RoPE.

    Args:
        rope_key: [d, D] shared RoPE key (component 0).
        rope_query: [H, d, D] RoPE rows of every query head.
        nope_key: [(G-1) * d, D] components 1 and up, without RoPE.
        nope_expand: [G, d, (G-1) * d] rebuilds the position-free key of kv head g.
    """

    rope_key: Tensor
    rope_query: Tensor
    nope_key: Tensor
    nope_expand: Tensor


@dataclass(frozen=True)
class MLALayer:
    """Weights of the converted layer under the roles of `AttentionNames`.

    Args:
        query: [H * (d + d), D], per head [nope | rope].
        kv_a: [R + d, D], rows [latent | rope key].
        kv_a_norm: [R], all ones; kv_b carries the mean rms.
        kv_b: [H * (d + d), R], per head [nope key | value].
        stats: plain floats (energy kept, variance kept, relative error of the refit).
    """

    query: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    kv_b: Tensor
    stats: dict[str, float]


def convert_layer(
    source: GQAWeights,
    inputs: Tensor,
    kv_lora_rank: int,
    *,
    where: str | None = None,
    sink_weight: float = SINK_WEIGHT,
    dtype: torch.dtype = torch.bfloat16,
) -> MLALayer:
    """Convert one layer from its weights and its calibration inputs.

    Args:
        source: the layer's projections.
        inputs: [windows, T, D] attention inputs (after the layer norm); token 0 starts a window.
        kv_lora_rank: latent width R, at most 2 G d - d.
        where: name of the layer for error messages.
        sink_weight: weight of each window's first token in the refit.
        dtype: storage dtype; the refit sees kv_a as it will be stored.

    Returns:
        The converted weights in `dtype`.

    Raises:
        CalibrationError: non-finite inputs, or a rank that the layer cannot fill.

    Source: own (models_data.md 5.1), after the public TransMLA pipeline (algorithms.md 7.2).
    """
    _check_finite(
        {"input": inputs, "q_proj": source.query, "k_proj": source.key, "v_proj": source.value},
        where,
    )
    covariance = input_covariance(inputs)
    mixing = mix_key_heads(source, covariance)
    keys = split_keys(source, mixing)
    down, _, variance_kept = joint_pca(
        keys.nope_key, source.value.double(), covariance, kv_lora_rank
    )
    down = down.to(dtype).double()
    up, refit_error = refit_after_norm(
        down, joint_targets(keys, source), inputs, sink_weight=sink_weight
    )
    return MLALayer(
        query=pack_query(source, keys).to(dtype),
        kv_a=torch.cat([down, keys.rope_key]).to(dtype),
        kv_a_norm=torch.ones(kv_lora_rank, dtype=dtype),
        kv_b=pack_kv_b(up, source).to(dtype),
        stats={
            "rope_energy_kept": mixing.energy_kept,
            "variance_kept": variance_kept,
            "refit_error": refit_error,
        },
    )


def _check_finite(tensors: dict[str, Tensor], where: str | None) -> None:
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise CalibrationError(
                "a layer holds NaN or Inf",
                where=f"{where or 'attention'}, {name}",
                expected="finite weights and activations",
                got=f"{bad} of {tensor.numel()} values",
                next_step="check the source weights; load them in float32",
            )


def input_covariance(inputs: Tensor) -> Tensor:
    """Mean of x^T x over all tokens, [D, D] float64, uncentred, accumulated window by window."""
    covariance = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float64)
    for window in inputs:
        covariance += (window.T @ window).double()
    return covariance / (inputs.shape[0] * inputs.shape[1])


def to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """[heads * d, D] half-split rows -> [heads, d/2, D] complex128."""
    rows = weight.double().view(-1, 2, head_dim // 2, weight.shape[-1])
    return torch.complex(rows[:, 0], rows[:, 1])


def from_pairs(pairs: Tensor) -> Tensor:
    """[..., d/2, D] complex -> [..., d, D] half-split rows."""
    return torch.cat([pairs.real, pairs.imag], dim=-2)


def mix_key_heads(source: GQAWeights, covariance: Tensor) -> HeadMixing:
    """Concentrate the key energy that queries can see on component 0, per RoPE frequency.

    The key of head g is scaled by w_g = sqrt(energy of the queries that read it), and the scaled
    keys are rotated into the eigenbasis of their Hermitian covariance, largest first.

    Args:
        source: the layer's projections.
        covariance: [D, D] float64 of the inputs.

    Source: own; the unweighted real form is TransMLA's RoRoPE.
    """
    key = to_pairs(source.key, source.head_dim)  # [G, d/2, D]
    query = to_pairs(source.query, source.head_dim)  # [H, d/2, D]
    energy = ((query @ covariance.to(query.dtype)) * query.conj()).sum(-1).real  # [H, d/2]
    weight = energy.view(source.num_kv_heads, -1, energy.shape[-1]).sum(1).T.sqrt()  # [d/2, G]
    weight = weight + DAMPING * weight.mean().clamp_min(torch.finfo(torch.float64).tiny)
    scaled = key.transpose(0, 1) * weight[..., None]  # [d/2, G, D]
    values, vectors = torch.linalg.eigh(scaled @ covariance.to(key.dtype) @ scaled.mH)
    values, vectors = values.flip(-1).clamp_min(0), vectors.flip(-1)
    total = float(values.sum())
    return HeadMixing(
        analysis=vectors.mH * weight[:, None, :],
        synthesis=vectors / weight[..., None],
        energy_kept=float(values[:, 0].sum()) / total if total else 1.0,
    )


def split_keys(source: GQAWeights, mixing: HeadMixing) -> SplitKeys:
    """Apply the mixing to the weights: component 0 keeps RoPE, the others lose it.

    The score of a query and the key of its head g is Re(conj(q) sum_c synthesis[g, c] z_c), so
    the query of component c is conj(synthesis[g, c]) q.
    """
    groups, half = source.num_kv_heads, source.head_dim // 2
    key = to_pairs(source.key, source.head_dim).transpose(0, 1)  # [d/2, G, D]
    components = mixing.analysis @ key  # [d/2, G(component), D]
    query = to_pairs(source.query, source.head_dim).unflatten(0, (groups, -1))  # [G, H/G, d/2, D]
    factor = mixing.synthesis[:, :, 0].T.conj()[:, None, :, None]  # [G, 1, d/2, 1]
    # Complex product with synthesis[f, g, c] as real [d, d] blocks on half-split numbers.
    rest = mixing.synthesis[:, :, 1:].permute(1, 2, 0)  # [G, G-1, d/2]
    expand = key.real.new_zeros(groups, 2, half, groups - 1, 2, half)
    index = torch.arange(half)
    for out, source_part, block in (
        (0, 0, rest.real),
        (0, 1, -rest.imag),
        (1, 0, rest.imag),
        (1, 1, rest.real),
    ):
        expand[:, out, index, :, source_part, index] = block.permute(2, 0, 1)
    return SplitKeys(
        rope_key=from_pairs(components[:, 0]),
        rope_query=from_pairs(query * factor).flatten(0, 1),
        nope_key=from_pairs(components[:, 1:].transpose(0, 1)).flatten(0, 1),
        nope_expand=expand.flatten(3).flatten(1, 2),
    )


def joint_pca(
    nope_key: Tensor, value: Tensor, covariance: Tensor, kv_lora_rank: int
) -> tuple[Tensor, Tensor, float]:
    """Compress position-free keys and values jointly in activation space.

    Keys are divided by alpha = mean channel norm of keys / mean channel norm of values before the
    PCA, so that neither side takes the whole latent.

    Args:
        nope_key: [K, D] float64.
        value: [G * d, D] float64.
        covariance: [D, D] float64 of the inputs.
        kv_lora_rank: number of components R.

    Returns:
        down [R, D] with mean square latent 1, up [K + G * d, R], and the share of variance kept.

    Raises:
        CalibrationError: R is larger than K + G * d.
    """
    width = nope_key.shape[0] + value.shape[0]
    if not 0 < kv_lora_rank <= width:
        raise CalibrationError(
            "latent rank does not fit the layer",
            where="kv_lora_rank",
            expected=f"1 to {width} (position-free keys and values)",
            got=str(kv_lora_rank),
            next_step="pass a smaller --kv-lora-rank",
        )
    alpha = _key_balance(nope_key, value, covariance)
    joint = torch.cat([nope_key / alpha, value])  # [K + G d, D]
    values, vectors = torch.linalg.eigh(joint @ covariance @ joint.T)
    values, vectors = values.flip(-1).clamp_min(0), vectors.flip(-1)[:, :kv_lora_rank]
    rms = (values[:kv_lora_rank].mean()).sqrt()
    up = vectors * rms
    up = torch.cat([up[: nope_key.shape[0]] * alpha, up[nope_key.shape[0] :]])
    return vectors.T @ joint / rms, up, float(values[:kv_lora_rank].sum() / values.sum())


def _key_balance(nope_key: Tensor, value: Tensor, covariance: Tensor) -> float:
    """Mean channel norm of keys over that of values; 1 where either has nothing to balance."""
    norms = [
        float(((weight @ covariance) * weight).sum(-1).clamp_min(0).sqrt().mean())
        for weight in (nope_key, value)
        if weight.shape[0]
    ]
    if len(norms) < 2 or min(norms) < DAMPING * max(norms):
        return 1.0
    return norms[0] / norms[1]


def joint_targets(keys: SplitKeys, source: GQAWeights) -> Tensor:
    """What kv_b must produce: [G * (d + d), D], per kv head [position-free key | value]."""
    nope = keys.nope_expand @ keys.nope_key  # [G, d, D]
    value = source.value.double().view(source.num_kv_heads, source.head_dim, -1)
    return torch.cat([nope, value], dim=1).flatten(0, 1)


def refit_after_norm(
    down: Tensor, targets: Tensor, inputs: Tensor, *, sink_weight: float = SINK_WEIGHT
) -> tuple[Tensor, float]:
    """Weighted least squares from the RMS-normalised latent to the targets.

    Args:
        down: [R, D] float64 latent projection.
        targets: [O, D] float64 linear maps of the input to be matched.
        inputs: [windows, T, D].
        sink_weight: weight of token 0 of each window.

    Returns:
        up [O, R] float64 and the weighted relative error.
    """
    rank, dtype = down.shape[0], inputs.dtype
    gram = down.new_zeros(rank, rank)
    cross = down.new_zeros(rank, targets.shape[0])
    energy = down.new_zeros(())
    down, targets = down.to(dtype), targets.to(dtype)
    for window in inputs:
        latent = window @ down.T
        latent = latent * latent.square().mean(-1, keepdim=True).rsqrt()  # [T, R]
        output = window @ targets.T
        weighted = latent.clone()
        weighted[0] *= sink_weight
        gram += (weighted.T @ latent).double()
        cross += (weighted.T @ output).double()
        energy += output.square().sum().double() + (sink_weight - 1) * output[0].square().sum()
    ridge = DAMPING * gram.diagonal().mean() * torch.eye(rank, dtype=gram.dtype)
    up = torch.linalg.solve(gram + ridge, cross).T  # [O, R]
    residual = energy - 2 * (up * cross.T).sum() + ((up @ gram) * up).sum()
    return up, float(residual.clamp_min(0) / energy)


def pack_query(source: GQAWeights, keys: SplitKeys) -> Tensor:
    """Query rows per head [nope | rope], times sqrt 2: MLA divides by sqrt(2 d), not sqrt d."""
    nope = source.query.double().view(source.num_heads, source.head_dim, -1)
    return torch.cat([nope, keys.rope_query], dim=1).flatten(0, 1) * 2**0.5


def pack_kv_b(up: Tensor, source: GQAWeights) -> Tensor:
    """Repeat the rows of each kv head for the query heads that share it."""
    rows = up.view(source.num_kv_heads, 1, 2 * source.head_dim, -1)
    shared = source.num_heads // source.num_kv_heads
    return rows.expand(-1, shared, -1, -1).reshape(-1, up.shape[-1])
