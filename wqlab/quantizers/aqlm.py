"""AQLM: each eight neighbouring weights are the sum of one entry from each of two learnt codebooks (Egiazarian et al., "Extreme
Compression of Large Language Models via Additive Quantization", ICML 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitstream
from wqlab.quantizers import entry_fit, kmeans
from wqlab.quantizers.ldlq import damped
from wqlab.quantizers.weights import LinearStats, QuantizedWeight, WeightQuantizer, weighted_error
from wqlab.registry import register
from wqlab.types import VQSpec

#: Numbers of a distance matrix that are held at once: 1 GB on a GPU, and on a CPU what is quick.
_AT_ONCE = {"cuda": 2**28, "cpu": 2**24}
#: Steps of k-means for the start; what follows moves the entries further.
_START_STEPS = 8
#: Row scales stay normal numbers of float16, so that dividing by them is safe.
_LEAST_SCALE = 2.0**-14
#: A sweep that gains less than this share of the loss is the last.
_LEAST_GAIN = 1e-3


@register("method", "aqlm")
@dataclass(frozen=True)
class AQLMQuantizer(WeightQuantizer):
    """AQLM-3, VQ<8, 4096, 2>: two indices of 12 bits for eight neighbouring weights of a row, two codebooks for the whole layer.

    A weight is ``scale_row * (C_0[i_0] + C_1[i_1])``. The start is k-means of the rows over their root mean square, and k-means of
    what it leaves. Then codes, entries and scales are improved in turn, each by the error of the layer's output ``tr(D H D^T)``:

    * codes, group of columns after group of columns and all rows at once. With the others fixed the best sum for a group is the one
      nearest to a target in the metric of the group's own 8 x 8 block of `H`; the target holds what the errors of all other groups
      ask of this one. Searched are the `beam` best entries of one codebook beside the present one of the other, and with each of
      them the best of the other; the present pair stays when none is better (beam search, Sect. 3.2 of the paper).
    * entries, by conjugate gradients on all of them at once (`wqlab.quantizers.entry_fit`), rounded to float16.
    * the scale of each row, in closed form.

    A step that does not lower the error is taken back, so `QuantizedWeight.losses` never rise: `weighted_error` with the damped
    Hessian, of the start and after each sweep. The paper's fine-tuning of whole blocks is not done.

    Stored: indices packed without gaps (``bitstream-v1``), row by row, those of one vector side by side: 3 bytes for eight weights.
    Two float16 codebooks of 4,096 x 8, 128 KiB, which small layers pay dearly for: 3.2 bits per weight where the layer is
    576 x 576. A float16 scale per row. Layers with fewer vectors than entries leave the rest of the entries zero.

    Parameters
    ----------
    num_entries : int
        Entries of a codebook, 2 to 65,536.
    num_residuals : {1, 2}
        Codebooks that are summed.
    vector_size : int
        Weights that one set of indices stands for.
    beam : int
        Candidates of the first codebook in the search of codes.
    sweeps : int
        Rounds of codes, entries and scales, at most; fewer when one gains less than 0.1 %.
    seed : int
        Of the starts of k-means, from 0.
    damping : float
        What is added to the diagonal of the Hessian, as a share of its mean: 1 %.

    Raises
    ------
    ParameterError
        For an option outside its limits.
    """

    num_entries: int = 4096
    num_residuals: int = 2
    vector_size: int = 8
    beam: int = 8
    sweeps: int = 6
    seed: int = 0
    damping: float = 0.01

    name = "aqlm"

    def __post_init__(self) -> None:
        limits = {
            "num_entries": (2, 2**bitstream.WIDEST), "num_residuals": (1, 2), "vector_size": (1, 64), "beam": (1, 256),
            "sweeps": (0, 1000), "seed": (0, 2**31),
        }  # fmt: skip
        for field, (low, high) in limits.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ParameterError(f"{self.name}: {field} = {value!r} is not a whole number from {low} to {high}")
        if not 0 < self.damping <= 1:
            raise ParameterError(f"{self.name}: damping = {self.damping!r} is outside (0, 1]")

    @property
    def spec(self) -> VQSpec:  # type: ignore[override]
        """VQ<vector_size, num_entries, num_residuals>, a codebook per tensor and residual (VQ-LLM, Table II and III)."""
        return VQSpec(self.vector_size, self.num_entries, self.num_residuals, scope="tensor and residual", switch_axes="R")

    def quantize(self, weight: Tensor, stats: LinearStats) -> QuantizedWeight:
        """Encode `weight` [out_features, in_features] on the device where it lies.

        Raises
        ------
        UnsupportedError
            When `in_features` is no multiple of the vector size, and as in `WeightQuantizer`.
        """
        self.check(weight, stats)
        if weight.shape[1] % self.vector_size:
            raise UnsupportedError(
                f"{self.name}: in_features = {weight.shape[1]} is no multiple of the vector size {self.vector_size}; "
                "leave this layer as it is"
            )
        hessian = damped(stats.hessian.to(weight.device), self.damping).float()
        source = weight.float()
        state = self._start(source)
        losses = [_loss(state, source, hessian)]
        for sweep in range(self.sweeps):
            best = losses[-1]
            for step in (self._coded, _fitted, _scaled):
                moved = step(state, source, hessian, sweep)
                loss = _loss(moved, source, hessian)
                if loss < best:
                    state, best = moved, loss
            losses.append(best)
            if best > (1 - _LEAST_GAIN) * losses[-2]:
                break
        packed = bitstream.pack(state.codes.permute(1, 2, 0).flatten(1), self.spec.index_bits)
        return QuantizedWeight(
            self.name,
            {"codes": packed},
            {"entries": state.entries.half()},
            {"scale": state.scale.half()},
            (weight.shape[0], weight.shape[1]),
            weight.dtype,
            losses=tuple(losses),
        )

    def _start(self, source: Tensor) -> _State:
        """Return residual k-means of the rows over their root mean square."""
        scale = source.square().mean(1, keepdim=True).sqrt().clamp_min(_LEAST_SCALE).half().float()
        rest = (source / scale).reshape(1, -1, self.vector_size)
        codes, entries = [], []
        for residual in range(self.num_residuals):
            found = kmeans.learn(rest, self.num_entries, seed=self.seed + residual, iterations=_START_STEPS)
            book = entry_fit.as_half(found.entries[0]).float()
            entries.append(book)
            codes.append(found.assignment.reshape(source.shape[0], -1))
            rest = rest - book[found.assignment]
        return _State(torch.stack(codes), torch.stack(entries), scale)

    def _coded(self, state: _State, source: Tensor, hessian: Tensor, sweep: int) -> _State:
        """Choose codes anew, group after group of columns."""
        size = self.vector_size
        codes = state.codes.clone()
        errors = state.decoded() - source
        pull = errors @ hessian
        # The codebooks take turns in giving the candidates.
        first = sweep % self.num_residuals
        groups = torch.arange(codes.shape[2], device=source.device)
        blocks = hessian.reshape(len(groups), size, len(groups), size)[groups, :, groups]
        # All at once: each factorization by itself would wait for the device.
        metrics = torch.linalg.cholesky(blocks)
        inverses = torch.cholesky_inverse(metrics)
        for group, (block, metric, inverse) in enumerate(zip(blocks, metrics, inverses, strict=True)):
            own = slice(group * size, (group + 1) * size)
            # Without this group's own error, what the others ask of it.
            asked = (pull[:, own] - errors[:, own] @ block) @ inverse
            target = (source[:, own] - asked) / state.scale @ metric
            chosen = self._search(target, state.entries @ metric, codes[:, :, group], first)
            codes[:, :, group] = chosen
            decoded = sum(state.entries[r][chosen[r]] for r in range(self.num_residuals)) * state.scale
            change = decoded - source[:, own] - errors[:, own]
            errors[:, own] += change
            pull += change @ hessian[own]
        return state._replace(codes=codes)

    def _search(self, target: Tensor, entries: Tensor, codes: Tensor, first: int) -> Tensor:
        """Return int64 [residuals, rows]: codes whose sum lies nearest to `target` [rows, size], the present ones among them."""
        rows = target.shape[0]
        if self.num_residuals == 1:
            return kmeans.assign(target.unsqueeze(0), entries)
        second = 1 - first
        beam = min(self.beam, self.num_entries)
        lengths = entries.square().sum(2)
        found = codes.clone()
        step = max(_AT_ONCE["cuda" if target.is_cuda else "cpu"] // (beam * self.num_entries), 1)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            wanted, present = target[part], codes[:, part]
            near = lengths[first] - 2 * (wanted - entries[second][present[second]]) @ entries[first].T
            # The present entry goes first, so that the present pair is a candidate, whatever the beam.
            candidates = torch.cat([present[first].unsqueeze(1), near.topk(beam, dim=1, largest=False).indices], dim=1)
            left = wanted.unsqueeze(1) - entries[first][candidates]
            distance, best = torch.min(lengths[second] - 2 * left @ entries[second].T, dim=2)
            distance += left.square().sum(2)
            winner = distance.argmin(1, keepdim=True)
            found[first, part] = candidates.gather(1, winner)[:, 0]
            found[second, part] = best.gather(1, winner)[:, 0]
        return found

    def dequantize(self, quantized: QuantizedWeight) -> Tensor:
        """Return the decoded weight [out_features, in_features] in the source's dtype."""
        return self._state(quantized).decoded().to(quantized.dtype)

    def entry_indices(self, quantized: QuantizedWeight) -> Tensor:
        """Return int64 [num_residuals, out * in / vector_size]."""
        return self._state(quantized).codes.flatten(1)

    def relabel(self, quantized: QuantizedWeight, order: Tensor) -> QuantizedWeight:
        """Return the same weight with each codebook's entries in the order `order` [num_residuals, entries]: equal to the bit.

        Raises
        ------
        ParameterError
            When a row of `order` is no permutation.
        """
        places = entry_fit.inverse_order(order, (self.num_residuals, self.num_entries), self.name)
        codes = torch.stack([place[code] for place, code in zip(places, self._state(quantized).codes, strict=True)])
        entries = quantized.codebooks["entries"]
        moved = entries.gather(1, order.unsqueeze(2).expand_as(entries))
        packed = bitstream.pack(codes.permute(1, 2, 0).flatten(1), self.spec.index_bits)
        return replace(quantized, codes={"codes": packed}, codebooks={"entries": moved})

    def _state(self, quantized: QuantizedWeight) -> _State:
        groups = quantized.shape[1] // self.vector_size
        flat = bitstream.unpack(quantized.codes["codes"], self.spec.index_bits, groups * self.num_residuals)
        codes = flat.reshape(-1, groups, self.num_residuals).permute(2, 0, 1).long()
        return _State(codes, quantized.codebooks["entries"].float(), quantized.scales["scale"].float())


class _State(NamedTuple):
    """Codes int64 [residuals, out, groups]; entries [residuals, num_entries, size] and scales [out, 1], numbers of float16."""

    codes: Tensor
    entries: Tensor
    scale: Tensor

    def places(self) -> Tensor:
        """Codes as rows of all codebooks, one under the other."""
        books, num_entries = self.entries.shape[:2]
        return self.codes + torch.arange(books, device=self.codes.device).reshape(-1, 1, 1) * num_entries

    def decoded(self) -> Tensor:
        """The weight [out, in]."""
        return entry_fit.decode(self.entries.flatten(0, 1), self.places(), self.scale)


def _loss(state: _State, source: Tensor, hessian: Tensor) -> float:
    return weighted_error(source, state.decoded(), hessian)


def _fitted(state: _State, source: Tensor, hessian: Tensor, sweep: int) -> _State:
    """Move the entries."""
    table = entry_fit.fit(state.entries.flatten(0, 1), state.places(), state.scale, source, hessian)
    return state._replace(entries=entry_fit.as_half(table).float().reshape(state.entries.shape))


def _scaled(state: _State, source: Tensor, hessian: Tensor, sweep: int) -> _State:
    """Move the scale of each row to ``w H q^T / q H q^T``, with `q` the row before its scale."""
    plain = state.decoded() / state.scale
    through = plain @ hessian
    size = (through * plain).sum(1, keepdim=True)
    best = torch.where(size > 0, (through * source).sum(1, keepdim=True) / size, state.scale)
    usable = (best >= _LEAST_SCALE) & (best <= torch.finfo(torch.float16).max)
    return state._replace(scale=torch.where(usable, best, state.scale).half().float())
