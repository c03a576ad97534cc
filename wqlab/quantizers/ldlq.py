"""LDLQ: rounding with feedback, column block after column block (Chee et al., "QuIP: 2-Bit Quantization of Large Language Models
With Guarantees", NeurIPS 2023, Sect. 3; in blocks: QuIP#, Sect. 4.2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def damped(hessian: Tensor, share: float) -> Tensor:
    """Return `hessian` in float64 with `share` of its mean diagonal added to the diagonal; the identity for a Hessian of zeros.

    The mean of x xT over few tokens is singular, and an input that never fires makes it so for any number of them. With the damping
    every pivot is positive, and such an input has a small cost of its own instead of none.
    """
    wide = hessian.double()
    mean = wide.diagonal().mean()
    extra = torch.where(mean > 0, share * mean, torch.ones_like(mean))
    return wide + extra * torch.eye(wide.shape[0], dtype=wide.dtype, device=wide.device)


def feedback(hessian: Tensor, size: int) -> Tensor:
    """Return `L` of ``hessian = L D L^T``: unit lower triangular in blocks of `size`, with `D` block diagonal.

    Parameters
    ----------
    hessian : Tensor
        float64 [n, n], positive definite; `n` a multiple of `size`.
    size : int
        Columns per block.

    Returns
    -------
    Tensor
        float64 [n, n]. From Cholesky's ``C C^T``: each block of columns times the inverse of its diagonal block.
    """
    n = hessian.shape[0]
    columns = torch.linalg.cholesky(hessian).reshape(n, n // size, size).transpose(0, 1)
    blocks = torch.arange(n // size, device=hessian.device)
    diagonal = columns.reshape(n // size, n // size, size, size)[blocks, blocks]
    solved: Tensor = torch.linalg.solve_triangular(diagonal, columns, upper=False, left=False)
    return solved.transpose(0, 1).reshape(n, n)


def ldlq(weight: Tensor, lower: Tensor, size: int, round_block: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Round `weight` block by block from the last columns to the first, each after adding what the later ones owe it.

    Block `k` is rounded at ``W_k + sum over j > k of (W_j - R_j) L_jk``, which leaves the error ``tr(E D E^T)`` with `E` what the
    rounding itself lost: with `L` = 1 the errors of all blocks would add up through the whole Hessian instead.

    Parameters
    ----------
    weight : Tensor
        float32 [out, n].
    lower : Tensor
        float32 [n, n]: `L` of `feedback`.
    size : int
        Columns per block.
    round_block : callable
        Takes the block's number and the target float32 [out, size], returns the rounded block `R_k` of the same shape.

    Returns
    -------
    Tensor
        The rounded weight, float32 [out, n].
    """
    lost = torch.zeros_like(weight)
    for block in reversed(range(weight.shape[1] // size)):
        own, later = slice(block * size, (block + 1) * size), slice((block + 1) * size, None)
        target = weight[:, own] + lost[:, later] @ lower[later, own]
        lost[:, own] = weight[:, own] - round_block(block, target)
    return weight - lost
