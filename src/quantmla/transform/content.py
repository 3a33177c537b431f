"""Content transform: orthogonal matrices for the normed latent, parametrised and checked."""

from __future__ import annotations

import torch

from quantmla.errors import CalibrationError

ORTHOGONAL_TOLERANCE = 1e-8


def cayley(free: torch.Tensor) -> torch.Tensor:
    """Map any square matrix to an orthogonal one, differentiably; zero maps to the identity.

    Args:
        free [R, R]: only its antisymmetric part A = free - free^T counts.

    Returns:
        [R, R] (I + A/2)^-1 (I - A/2), orthogonal to about 1e-6 in float32.

    Source: Cayley transform.
    """
    half = (free - free.transpose(-1, -2)) / 2
    eye = torch.eye(free.shape[-1], dtype=free.dtype, device=free.device)
    return torch.linalg.solve(eye + half, eye - half)


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """Return the closest orthogonal matrix [R, R, float64].

    Raises:
        CalibrationError: the matrix is not finite, or too close to singular to have one.

    Source: polar decomposition by SVD.
    """
    wide = matrix.detach().double()
    if not torch.isfinite(wide).all():
        raise CalibrationError(
            "the content rotation is not finite", expected="finite numbers", got="NaN or Inf"
        )
    left, _, right = torch.linalg.svd(wide)
    rotation = left @ right
    check_orthogonal(rotation)
    return rotation


def random_hadamard(size: int, seed: int) -> torch.Tensor:
    """Return a random orthogonal matrix that spreads every channel over all channels.

    For size = m 2^k with m odd it is diag(random signs) (Q_m (x) H), H the Hadamard matrix of size
    2^k: a randomised Hadamard matrix for powers of two (m = 1), otherwise its Kronecker product
    with a random orthogonal Q_m.

    Args:
        size: R.
        seed: the result is a function of (size, seed).

    Returns:
        [R, R, float64].

    Source: QuaRot (randomised Hadamard); the Kronecker form for other sizes is own.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    power = size & -size  # largest power of two that divides size
    matrix = hadamard(power)
    if size // power > 1:
        matrix = torch.kron(_random_orthogonal(size // power, generator), matrix)
    return signs[:, None] * matrix


def hadamard(size: int) -> torch.Tensor:
    """Return the orthogonal Sylvester Hadamard matrix [size, size, float64].

    Raises:
        CalibrationError: size is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise CalibrationError(
            "a Hadamard matrix needs a power of two", expected="1, 2, 4, ...", got=size
        )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.kron(step, matrix)
    return matrix / size**0.5


def check_orthogonal(rotation: torch.Tensor, tolerance: float = ORTHOGONAL_TOLERANCE) -> float:
    """Return max |R^T R - I| of a square float64 matrix.

    Raises:
        CalibrationError: the matrix is not square, or the error is above `tolerance`.
    """
    if rotation.ndim != 2 or rotation.shape[0] != rotation.shape[1]:
        raise CalibrationError(
            "a rotation must be square", expected="[R, R]", got=list(rotation.shape)
        )
    wide = rotation.double()
    eye = torch.eye(wide.shape[0], dtype=torch.float64, device=wide.device)
    error = float((wide.T @ wide - eye).abs().max())
    if not error <= tolerance:  # also catches NaN
        raise CalibrationError(
            "the content rotation is not orthogonal",
            expected=f"max |R^T R - I| <= {tolerance:g}",
            got=f"{error:.3g}",
            next_step="project it with transform.content.polar",
        )
    return error


def _random_orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return (q * r.diagonal().sign()).contiguous()  # sign fix makes the distribution uniform (Haar)
