"""k-means of many codebooks at once, with weights per point or per coordinate, on the device where the points lie.

Lloyd's iterations from a k-means++ start (Arthur and Vassilvitskii, "k-means++: The Advantages of Careful Seeding", 2007).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.quantizers import check_finite

#: Entries are drawn one by one up to this number, and in this number of equal rounds beyond (k-means||, Bahmani et al., 2012):
#: thousands of draws of one entry cost more than all that follows.
ROUNDS = 256
#: A book is finished when a step lowers its loss by less than this share.
TOLERANCE = 1e-4
#: What a point in [-1, 1] loses to rounding alone: no reason to give it an entry of its own.
_ROUNDING = 1e-13
#: Distances that are held at once: 1 GB on a GPU, and on a CPU what stays in its caches.
_AT_ONCE = {"cuda": 2**28, "cpu": 2**17}


@dataclass(frozen=True, eq=False)
class Codebooks:
    """What `learn` found.

    Parameters
    ----------
    entries : Tensor
        float32 [books, num_entries, vector_size]. Entries that no point is nearest to are zero.
    assignment : Tensor
        int64 [books, n]: the nearest entry of each point.
    losses : Tensor
        float64 [books, steps]: the sum of weighted squared distances with the start and after each step; never rising. Books that
        finish early repeat their last one.
    counts : Tensor
        int64 [books, num_entries]: points per entry.
    """

    entries: Tensor
    assignment: Tensor
    losses: Tensor
    counts: Tensor


def learn(
    points: Tensor,
    num_entries: int,
    weights: Tensor | None = None,
    *,
    seed: int = 0,
    iterations: int = 25,
    start: Tensor | None = None,
) -> Codebooks:
    """Learn one codebook per book so that the weighted squared distances of its points to their nearest entries are small.

    The start is drawn with chances in proportion to weight times squared distance to what is drawn already, without the trials of
    greedy k-means++. An entry whose points weigh nothing moves to the point that loses most, the second such entry to the second
    such point. A book that has fewer different points than entries gets each point as an entry; the rest are zero, with count 0
    (with weights per coordinate, some may be copies that differ in the last digit). Points that weigh nothing pull no entry, but
    are assigned and counted.

    Distances are in float32 of points shifted to their mean and scaled to their range, so large offsets cost no precision. Sums are
    in fixed point: they do not depend on the order of the additions, so the same seed gives the same entries on one machine.

    Parameters
    ----------
    points : Tensor
        [books, n, vector_size], of any floating dtype.
    num_entries : int
        Entries per book.
    weights : Tensor, optional
        [books, n], or [books, n, vector_size] for each coordinate by itself; not negative. Default: all alike.
    seed : int
        Of the start.
    iterations : int
        Steps of Lloyd at most; 0 gives the start. A book stops when a step gains less than `TOLERANCE`.
    start : Tensor, optional
        [books, num_entries, vector_size]: where to begin instead of k-means++.

    Raises
    ------
    ParameterError
        For another shape, no points, ``num_entries < 1``, ``iterations < 0`` or a negative weight.
    NonFiniteError
        When a number is NaN or infinite.
    """
    _check(points, num_entries, weights, iterations, start)
    books, n, _ = points.shape
    wide = points.float()
    mean = wide.mean(1, keepdim=True)
    unit = _positive((wide - mean).abs().amax((1, 2), keepdim=True))
    x = (wide - mean) / unit
    w, heaviest = None, torch.ones(books, 1, 1, device=x.device)
    if weights is not None:
        w = weights.float().reshape(books, n, -1)
        heaviest = _positive(w.amax((1, 2), keepdim=True))
        w = w / heaviest
    entries = _draw(x, w, num_entries, seed) if start is None else (start.to(x) - mean) / unit

    assignment = assign(x, entries, w)
    losses = [_lost(x, entries, assignment, w).sum(1)]
    active = torch.arange(books, device=x.device)
    for _ in range(iterations):
        ours = x[active], None if w is None else w[active]
        moved = _means(ours[0], ours[1], entries[active], assignment[active])
        nearest = assign(ours[0], moved, ours[1])
        before, after = losses[-1][active], _lost(ours[0], moved, nearest, ours[1]).sum(1)
        # The last digit of a distance in float32 may make a step look worse than none.
        better = after < before
        kept = active[better]
        entries[kept], assignment[kept] = moved[better], nearest[better]
        losses.append(losses[-1].index_copy(0, kept, after[better]))
        active = active[after < before * (1 - TOLERANCE)]
        if not active.numel():
            break
    counts = torch.zeros(books, num_entries, dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, assignment, torch.ones_like(assignment))
    entries = torch.where(counts.unsqueeze(2) > 0, entries * unit + mean, torch.zeros((), device=x.device))
    return Codebooks(entries, assignment, torch.stack(losses, 1) * (unit.double() ** 2 * heaviest).reshape(books, 1), counts)


def assign(points: Tensor, entries: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return int64 [books, n]: the entry nearest to each point; of equal ones the lowest index, on a CPU.

    Parameters
    ----------
    points : Tensor
        float32 [books, n, vector_size]. Distances lose digits when offsets are large against them: shift the points before.
    entries : Tensor
        float32 [books, num_entries, vector_size].
    weights : Tensor, optional
        [books, n] or [books, n, 1], which change nothing, or [books, n, vector_size].
    """
    books, n, size = points.shape
    num_entries = entries.shape[1]
    # Without the square of the point, which is the same for all entries, a distance is one product of matrices and a constant.
    square = entries.square()
    if weights is None or weights.dim() == 2 or weights.shape[2] < size:
        left, right, constant = points, -2 * entries.transpose(1, 2), square.sum(2).unsqueeze(1)
    else:
        left = torch.cat([points * weights, weights], dim=2)
        right, constant = torch.cat([-2 * entries, square], dim=2).transpose(1, 2), entries.new_zeros(books, 1, num_entries)
    found = torch.empty(books, n, dtype=torch.int64, device=points.device)
    at_once = _AT_ONCE["cuda" if points.is_cuda else "cpu"]
    step = max(min(at_once // num_entries, n), 1)
    together = max(at_once // (num_entries * step), 1)
    for first in range(0, books, together):
        here = slice(first, first + together)
        for begin in range(0, n, step):
            rows = slice(begin, begin + step)
            found[here, rows] = torch.baddbmm(constant[here], left[here, rows], right[here]).argmin(2)
    return found


def sum_by_entry(values: Tensor, assignment: Tensor, num_entries: int) -> Tensor:
    """Return float64 [books, num_entries, width]: the sums of `values` [books, n, width] whose `assignment` [books, n] is the same.

    In fixed point of 62 bits, scaled to the largest value of the tensor: additions of whole numbers give the same sum in any order,
    which those of a GPU's threads are not.
    """
    books, n, width = values.shape
    scale = torch.exp2(61 - torch.log2(_positive(values.abs().amax().double()) * n).ceil())
    whole = (values.double() * scale).round_().long()
    sums = torch.zeros(books, num_entries, width, dtype=torch.int64, device=values.device)
    sums.scatter_add_(1, assignment.unsqueeze(2).expand_as(whole), whole)
    return sums.double() / scale


def _means(x: Tensor, w: Tensor | None, entries: Tensor, assignment: Tensor) -> Tensor:
    """Return the entries at the weighted means of their points; those without weight at the points that lose most."""
    num_entries, size = entries.shape[1:]
    each = torch.ones_like(x[..., :1]) if w is None else w
    found = sum_by_entry(torch.cat([x * each, each], dim=2), assignment, num_entries)
    sums, mass = found[..., :size], found[..., size:]
    # A coordinate that none of an entry's points weigh stays where it is.
    means = torch.where(mass > 0, sums / _positive(mass), entries.double()).float()
    dead = mass.sum(2) == 0
    most = int(dead.sum(1).max())
    if most:
        lost = _lost(x, entries, assignment, w)
        worst = lost.topk(min(most, lost.shape[1]), dim=1)
        rank = (dead.cumsum(1) - 1).clamp(0, worst.indices.shape[1] - 1)
        usable = dead & (dead.cumsum(1) <= worst.indices.shape[1]) & (worst.values.gather(1, rank) > _ROUNDING)
        places = worst.indices.gather(1, rank).unsqueeze(2).expand_as(means)
        means = torch.where(usable.unsqueeze(2), x.gather(1, places), means)
    return means


def _lost(x: Tensor, entries: Tensor, assignment: Tensor, w: Tensor | None) -> Tensor:
    """Return float64 [books, n]: each point's weighted squared distance to its entry."""
    squares = (x - entries.gather(1, assignment.unsqueeze(2).expand_as(x))).square()
    return (squares if w is None else squares * w).sum(2).double()


def _draw(x: Tensor, w: Tensor | None, num_entries: int, seed: int) -> Tensor:
    """Return the k-means++ start [books, num_entries, size]; zero where there are no more points."""
    books, n, size = x.shape
    generator = torch.Generator(device=x.device).manual_seed(seed)
    drawn = torch.zeros(books, num_entries, size, device=x.device)
    mass = x.new_ones(books, n) if w is None else w.sum(2)
    count, together = 0, max(num_entries // ROUNDS, 1)
    # Coordinates first: sums over the first axis read memory in order.
    columns, heavy = x.permute(2, 0, 1).contiguous(), None if w is None else w.permute(2, 0, 1).unsqueeze(3)
    apart = torch.full((books, n), torch.inf, device=x.device)
    while count < min(num_entries, n):
        take = min(together, num_entries - count, n - count) if count else 1
        # The first to ring of clocks with these rates: a draw in proportion to the masses, of several without putting back.
        places = mass.div_(torch.empty_like(mass).exponential_(generator=generator)).topk(take, dim=1).indices
        new = x.gather(1, places.unsqueeze(2).expand(books, take, size))
        drawn[:, count : count + take] = new
        squares = (columns.unsqueeze(3) - new.permute(2, 0, 1).unsqueeze(2)).square_()
        nearest = (squares if heavy is None else squares * heavy).sum(0).amin(2)
        apart = torch.minimum(apart, nearest)
        mass = apart.clone()
        count += take
    return drawn


def _positive(x: Tensor) -> Tensor:
    """Return `x` with 1 in place of zeros, to divide by."""
    return torch.where(x > 0, x, torch.ones_like(x))


def _check(points: Tensor, num_entries: int, weights: Tensor | None, iterations: int, start: Tensor | None) -> None:
    if points.dim() != 3 or 0 in points.shape:
        raise ParameterError(f"k-means: points {list(points.shape)} are not [books, n, vector_size] of 1 or more each")
    for name, value, least in (("num_entries", num_entries, 1), ("iterations", iterations, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ParameterError(f"k-means: {name} = {value!r} is not a whole number, {least} or more")
    check_finite(points, "k-means: points")
    if weights is not None:
        if weights.shape not in (points.shape[:2], points.shape):
            raise ParameterError(
                f"k-means: weights {list(weights.shape)} are neither per point nor per coordinate of {list(points.shape)}"
            )
        check_finite(weights, "k-means: weights")
        if bool((weights < 0).any()):
            raise ParameterError(f"k-means: the weight {float(weights.min())} is negative; the least is 0")
    if start is not None:
        expected = (points.shape[0], num_entries, points.shape[2])
        if start.shape != expected:
            raise ParameterError(f"k-means: start {list(start.shape)} is not {list(expected)}")
        check_finite(start, "k-means: start")
