"""GPTVQ: vectors of four neighbouring weights against a codebook per tile, with feedback of the error to the columns that are still
to come (van Baalen et al., "GPTVQ: The Blessing of Dimensionality for LLM Quantization", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.quantizers import entry_fit, kmeans
from wqlab.quantizers.ldlq import damped
from wqlab.quantizers.weights import LinearStats, QuantizedWeight, WeightQuantizer, weighted_error
from wqlab.registry import register
from wqlab.types import VQSpec

#: Weights that one code stands for.
_SIZE = 4


@register("method", "gptvq")
@dataclass(frozen=True)
class GPTVQQuantizer(WeightQuantizer):
    """GPTVQ-2, VQ<4, 256, 1>: an index of 8 bits for four neighbouring weights of a row, a codebook for each tile of 256 x 256.

    Column tiles go from left to right. The codebooks of all row tiles of one are learnt from the weights as the feedback has left
    them, by k-means in which each coordinate weighs what an error there costs after the columns to its right have made up for it:
    ``1 / U_ii^2`` with `U` the upper Cholesky factor of the inverse Hessian. Then each group of four columns takes the entry that
    is nearest in the whole 4 x 4 metric of that cost, all rows at once, and its error goes to the columns on the right
    (Algorithm 1 of the paper). At last the entries move, with codes fixed, to where the layer's output loses least
    (`wqlab.quantizers.entry_fit`); kept only if it does after they are rounded to 16 bits.

    Stored: uint8 codes [out, in / 4] and float16 codebooks [row tiles, column tiles, 256, 4]. Tiles at the lower and the right edge
    are smaller and have a codebook of their own all the same, which small layers pay for: 0.25 bits per weight where 256 divides
    both sizes, more elsewhere. Tiles with fewer vectors than entries store zeros for the rest. There are no scales.

    Inputs that never fire cost what the damping adds to the Hessian's diagonal. float16 limits entries to 65,504 in size.

    Parameters
    ----------
    num_entries : int
        Entries of a codebook, 2 to 256.
    tile : int
        Rows and columns of a tile, a multiple of 4.
    feedback : bool
        False rounds every group by itself, for comparison.
    refine : int
        Steps of the last fit; 0 for none.
    seed : int
        Of the starts of k-means, from 0.
    damping : float
        What is added to the diagonal of the Hessian, as a share of its mean: 1 %.

    Raises
    ------
    ParameterError
        For an option outside its limits.
    """

    num_entries: int = 256
    tile: int = 256
    feedback: bool = True
    refine: int = 25
    seed: int = 0
    damping: float = 0.01

    name = "gptvq"

    def __post_init__(self) -> None:
        for field, low, high in (("num_entries", 2, 256), ("tile", 4, 2**20), ("refine", 0, 10**4), ("seed", 0, 2**31)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ParameterError(f"{self.name}: {field} = {value!r} is not a whole number from {low} to {high}")
        if self.tile % _SIZE:
            raise ParameterError(f"{self.name}: tile = {self.tile} is no multiple of the vector size {_SIZE}")
        if not isinstance(self.feedback, bool):
            raise ParameterError(f"{self.name}: feedback = {self.feedback!r} is neither True nor False")
        if not 0 < self.damping <= 1:
            raise ParameterError(f"{self.name}: damping = {self.damping!r} is outside (0, 1]")

    @property
    def spec(self) -> VQSpec:  # type: ignore[override]
        """VQ<4, num_entries, 1> per tile (VQ-LLM, Table II and III)."""
        return VQSpec(_SIZE, self.num_entries, 1, scope=f"tile {self.tile}x{self.tile}", switch_axes="MN")

    @property
    def code_bits(self) -> float:
        """2: a byte for four weights, whatever the number of entries."""
        return 8 / _SIZE

    def quantize(self, weight: Tensor, stats: LinearStats) -> QuantizedWeight:
        """Encode `weight` [out_features, in_features] on the device where it lies.

        Raises
        ------
        UnsupportedError
            When `in_features` is no multiple of 4, and as in `WeightQuantizer`.
        """
        self.check(weight, stats)
        out, size = weight.shape
        if size % _SIZE:
            raise UnsupportedError(
                f"{self.name}: in_features = {size} is no multiple of the vector size {_SIZE}; leave this layer as it is"
            )
        raw = stats.hessian.to(weight.device)
        hessian = damped(raw, self.damping)
        if not self.feedback:
            hessian = torch.diag(hessian.diagonal())
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True).float()
        source = weight.float()
        codes, books = self._left_to_right(source, upper)
        found = QuantizedWeight(self.name, {"codes": codes}, {"entries": books}, {}, (out, size), weight.dtype)
        losses = [weighted_error(source, self._decoded(found), raw)]
        if self.refine:
            moved = replace(found, codebooks={"entries": self._refined(found, source, damped(raw, self.damping).float())})
            loss = weighted_error(source, self._decoded(moved), raw)
            found = moved if loss < losses[0] else found
            losses.append(min(loss, losses[0]))
        return replace(found, losses=tuple(losses))

    def _left_to_right(self, source: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return uint8 codes [out, in / 4] and float16 entries [row tiles, column tiles, entries, 4]."""
        out, size = source.shape
        height = min(self.tile, out)
        rows = -(-out // height)
        # Rows below the last weigh nothing in k-means and are cut off at the end: every row tile has the same shape.
        left = torch.nn.functional.pad(source, (0, 0, 0, rows * height - out))
        exists = (torch.arange(rows * height, device=source.device) < out).float().reshape(rows, height, 1, 1)
        cost = upper.diagonal().square().reciprocal()
        codes = torch.empty(rows * height, size // _SIZE, dtype=torch.uint8, device=source.device)
        books = []
        for number, first in enumerate(range(0, size, self.tile)):
            last = min(first + self.tile, size)
            vectors = left[:, first:last].reshape(rows, height, -1, _SIZE)
            weights = (cost[first:last].reshape(1, 1, -1, _SIZE) * exists).expand_as(vectors)
            shape = rows, -1, _SIZE
            learnt = kmeans.learn(vectors.reshape(shape), self.num_entries, weights.reshape(shape), seed=self.seed + number)
            entries = entry_fit.as_half(learnt.entries)
            books.append(entries)
            lost = torch.empty(rows * height, last - first, device=source.device)
            for begin in range(first, last, _SIZE):
                own, later = slice(begin, begin + _SIZE), slice(begin + _SIZE, last)
                # An error d of these columns costs |d U^-1|^2 once the later ones have made up for it.
                metric = torch.linalg.solve_triangular(upper[own, own], torch.eye(_SIZE, device=source.device), upper=True)
                target = left[:, own].reshape(rows, height, _SIZE)
                found = kmeans.assign(target @ metric, entries.float() @ metric)
                codes[:, begin // _SIZE] = found.flatten().to(torch.uint8)
                rounded = entries.float().gather(1, found.unsqueeze(2).expand_as(target))
                error = ((target - rounded) @ metric).flatten(0, 1)
                lost[:, begin - first : begin - first + _SIZE] = error
                left[:, later] -= error @ upper[own, later]
            left[:, last:] -= lost @ upper[first:last, last:]
        return codes[:out].contiguous(), torch.stack(books, 1).contiguous()

    def _refined(self, found: QuantizedWeight, source: Tensor, hessian: Tensor) -> Tensor:
        entries = found.codebooks["entries"]
        places = self._places(found).unsqueeze(0)
        table = entries.reshape(-1, _SIZE).float()
        fitted = entry_fit.fit(table, places, torch.ones_like(source[:, :1]), source, hessian, self.refine)
        return entry_fit.as_half(fitted.reshape(entries.shape))

    def _places(self, quantized: QuantizedWeight) -> Tensor:
        """Return int64 [out, in / 4]: which row of all codebooks, one under the other, each vector reads."""
        codes = quantized.codes["codes"].long()
        return codes + self._tiles(quantized) * self.num_entries

    def _tiles(self, quantized: QuantizedWeight) -> Tensor:
        """Return int64 [out, in / 4]: the number of the tile of each vector, row by row."""
        out, groups = quantized.codes["codes"].shape
        columns = quantized.codebooks["entries"].shape[1]
        device = quantized.codes["codes"].device
        down = torch.arange(out, device=device).unsqueeze(1) // self.tile
        return down * columns + torch.arange(groups, device=device) * _SIZE // self.tile

    def _decoded(self, quantized: QuantizedWeight) -> Tensor:
        table = quantized.codebooks["entries"].reshape(-1, _SIZE).float()
        places = self._places(quantized)
        return table[places].flatten(1)

    def dequantize(self, quantized: QuantizedWeight) -> Tensor:
        """Return the decoded weight [out_features, in_features] in the source's dtype."""
        return self._decoded(quantized).to(quantized.dtype)

    def entry_indices(self, quantized: QuantizedWeight) -> Tensor:
        """Return int64 [row tiles * column tiles, positions of a whole tile]: the entry of each position, -1 past a small tile."""
        rows, columns = quantized.codebooks["entries"].shape[:2]
        codes = quantized.codes["codes"].long()
        out, groups = codes.shape
        wide = self.tile // _SIZE
        padded = torch.nn.functional.pad(codes, (0, columns * wide - groups, 0, rows * self.tile - out), value=-1)
        tiles = padded.reshape(rows, self.tile, columns, wide).transpose(1, 2).reshape(rows * columns, -1)
        # Positions that exist come first, in their order; a tile's width may be smaller than the others'.
        first = (tiles < 0).to(torch.uint8).argsort(dim=1, stable=True)
        return tiles.gather(1, first)

    def relabel(self, quantized: QuantizedWeight, order: Tensor) -> QuantizedWeight:
        """Return the same weight with each tile's entries in the order `order` [tiles, entries]: equal to the bit.

        Raises
        ------
        ParameterError
            When a row of `order` is no permutation.
        """
        entries = quantized.codebooks["entries"]
        places = entry_fit.inverse_order(order, (entries.shape[0] * entries.shape[1], self.num_entries), self.name)
        codes = places.flatten()[self._places(quantized)].to(torch.uint8)
        flat = entries.reshape(*order.shape, _SIZE)
        moved = flat.gather(1, order.unsqueeze(2).expand_as(flat)).reshape(entries.shape)
        return replace(quantized, codes={"codes": codes}, codebooks={"entries": moved})
