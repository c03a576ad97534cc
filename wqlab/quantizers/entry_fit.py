"""The entries of codebooks that lose the least of a layer's output while the codes stay: least squares by conjugate gradients.

The layer's error ``tr((Q - W) H (Q - W)^T)`` is quadratic in the entries, because each vector of the decoded weight `Q` is a sum of
entries times its row's scale. The normal equations of all entries are too large to write down (AQLM-3 has 65,536 unknowns) but
cheap to apply: look up, multiply with `H`, add up per entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.quantizers.kmeans import sum_by_entry


def decode(table: Tensor, places: Tensor, scale: Tensor) -> Tensor:
    """Return the weight [out, groups * vector_size] that the codes stand for, in the dtype of `table`.

    Parameters
    ----------
    table : Tensor
        [entries, vector_size]: the entries of all codebooks, one under the other.
    places : Tensor
        int64 [residuals, out, groups]: rows of `table`; a vector is the sum over the residuals.
    scale : Tensor
        [out, 1].
    """
    total = table[places[0]]
    for residual in places[1:]:
        total = total + table[residual]
    return total.flatten(1) * scale


def fit(
    table: Tensor, places: Tensor, scale: Tensor, weight: Tensor, hessian: Tensor, iterations: int = 20, ridge: float = 1e-4
) -> Tensor:
    """Return entries with a smaller error than those of `table`, from conjugate gradients with a diagonal preconditioner.

    Parameters
    ----------
    table, places, scale : Tensor
        As in `decode`, float32 and int64.
    weight : Tensor
        float32 [out, groups * vector_size]: what to come close to.
    hessian : Tensor
        float32 [groups * vector_size] squared, positive definite.
    iterations : int
        Steps; each costs one product with the Hessian. The error falls with every one, so any number will do.
    ridge : float
        Share of an entry's own curvature that keeps it near where it was: without it the codebooks of one sum could drift apart,
        one by what the other loses.

    Returns
    -------
    Tensor
        float32 like `table`. Entries that no code names stay as they are.
    """
    rows, size = table.shape

    def gathered(values: Tensor) -> Tensor:
        """The transpose of `decode`: the sums per entry of [out, groups * vector_size], float32 [entries, vector_size]."""
        vectors = (values * scale).reshape(1, -1, size)
        return sum(
            (sum_by_entry(vectors, residual.reshape(1, -1), rows)[0].float() for residual in places), torch.zeros_like(table)
        )

    curvature = gathered((scale * hessian.diagonal()).expand_as(weight).contiguous())
    hold = ridge * curvature

    def applied(direction: Tensor) -> Tensor:
        return gathered(decode(direction, places, scale) @ hessian) + hold * direction

    inverse = torch.where(curvature > 0, 1 / curvature, torch.zeros_like(curvature))
    found = torch.zeros_like(table)
    rest = gathered((weight - decode(table, places, scale)) @ hessian)
    direction = inverse * rest
    size_now = (rest * direction).sum()
    for _ in range(iterations):
        product = applied(direction)
        bend = (direction * product).sum()
        # Solved to the last digit: every further step is 0/0.
        step = torch.where(bend > 0, size_now / bend, torch.zeros_like(bend))
        found = found + step * direction
        rest = rest - step * product
        preconditioned = inverse * rest
        size_next = (rest * preconditioned).sum()
        turn = torch.where(size_now > 0, size_next / size_now, torch.zeros_like(size_now))
        direction = preconditioned + turn * direction
        size_now = size_next
    return table + found


def as_half(entries: Tensor) -> Tensor:
    """Return `entries` as they are stored: float16, the few beyond its range at its ends."""
    limit = torch.finfo(torch.float16).max
    return entries.clamp(-limit, limit).half()


def inverse_order(order: Tensor, shape: tuple[int, int], method: str) -> Tensor:
    """Return int64 [books, entries]: the new index of each old entry, for `order` as in `WeightQuantizer.relabel`.

    Raises
    ------
    ParameterError
        When `order` has another shape or a row that is no permutation.
    """
    expected = torch.arange(shape[1], device=order.device).expand(shape)
    if tuple(order.shape) != shape or not torch.equal(order.sort(1).values, expected):
        raise ParameterError(
            f"{method}: an order {list(order.shape)} is not {list(shape)} with a permutation in each row; "
            "wqlab.quantizers.weights.reorder_by_frequency makes one"
        )
    return torch.empty_like(order).scatter_(1, order, expected)
