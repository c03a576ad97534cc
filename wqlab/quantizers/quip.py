"""QuIP#: weights rotated until they look Gaussian, then rounded to a lattice in eight dimensions (Tseng et al., "QuIP#: Even Better
LLM Quantization with Hadamard Incoherence and Lattice Codebooks", ICML 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.quantizers import e8p
from wqlab.quantizers.incoherence import random_signs, rotate, rotate_back
from wqlab.quantizers.ldlq import damped, feedback, ldlq
from wqlab.quantizers.weights import LinearStats, QuantizedWeight, WeightQuantizer
from wqlab.registry import register
from wqlab.types import VQSpec

#: What a weight of mean square 1 is multiplied with before the first pass, and what that leaves over before the second. The first
#: pair is the published one. Each other pair has the second factor that is best for its first one on 30,000 to 100,000 vectors of
#: N(0, 1), found by scans in steps of 0.1 to 0.15. Of all, 0.9 is best there: a mean square error of 0.0083 after both passes, and
#: 0.0096 with the published pair. Feedback widens what is rounded, the more the fewer directions the inputs have, and the codebook
#: ends at a norm of about 3.5; hence the smaller ones.
PASSES = ((1.03, 3.45), (0.9, 3.85), (0.8, 4.05), (0.7, 4.1), (0.6, 4.1))
#: Rows of the rotated weight on which the pairs are compared: all are mixtures of the same rows.
_SAMPLE = 192


@register("method", "quip")
@dataclass(frozen=True)
class QuIPQuantizer(WeightQuantizer):
    """QuIP#-4, VQ<8, 65536, 2>: two E8P codes for each eight weights of a row of ``U W V^T``.

    `U` and `V` are randomized Hadamard rotations (`wqlab.quantizers.incoherence`) of the outputs and the inputs. In the rotated
    basis blocks of eight columns are rounded with the feedback of `wqlab.quantizers.ldlq`; the first code rounds the block, the
    second what the first one left over. Fine-tuning after the rounding (Sect. 5 of the paper) is not done.

    The published multipliers of the two passes are 1.03 and 3.45 for every layer. Here each layer takes the pair of `PASSES` that
    loses the least of the output over the calibration's inputs, because feedback carries some layers' targets out of the codebook.

    Stored: int16 codes [2, out, in / 8] (`wqlab.quantizers.e8p`), one int8 table of 256 patterns per pass, the signs of both
    rotations as bits, and one float32 step per pass. The two tables are the same in every tensor until they are re-labelled, and
    counted in each, like other codebooks of the scope "tensor". A kernel looks up 256 patterns, so `stored_entries` is 256 and
    indices are of patterns; signs and shifts belong to the codes.

    Inputs that never fire leave no zero on the rotated Hessian's diagonal; the damping gives them a cost. A weight of zeros comes
    back as zeros. Layers with fewer vectors than patterns store the whole table all the same, unread rows with it.

    Parameters
    ----------
    seed : int
        Of the random signs, from 0.
    damping : float
        What is added to the diagonal of the Hessian, as a share of its mean: 1 %.
    search : bool
        False takes the published pair of multipliers.

    Raises
    ------
    ParameterError
        For an option outside its limits.
    """

    seed: int = 0
    damping: float = 0.01
    search: bool = True

    name: ClassVar[str] = "quip"
    spec: ClassVar[VQSpec] = VQSpec(e8p.SIZE, 65536, 2, scope="tensor", switch_axes="R")

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ParameterError(f"{self.name}: seed = {self.seed!r} is not a whole number from 0 to 2^63 - 1")
        if not 0 < self.damping <= 1:
            raise ParameterError(f"{self.name}: damping = {self.damping!r} is outside (0, 1]")
        if not isinstance(self.search, bool):
            raise ParameterError(f"{self.name}: search = {self.search!r} is neither True nor False")

    @property
    def stored_entries(self) -> int:
        """The 256 patterns of a pass; the other factor of 256 are signs and shifts."""
        return e8p.PATTERNS

    def quantize(self, weight: Tensor, stats: LinearStats) -> QuantizedWeight:
        """Encode `weight` [out_features, in_features] on the device where it lies.

        Raises
        ------
        UnsupportedError
            When `in_features` is no multiple of 8, and as in `WeightQuantizer`.
        """
        self.check(weight, stats)
        out, size = weight.shape
        if size % e8p.SIZE:
            raise UnsupportedError(
                f"{self.name}: in_features = {size} is no multiple of the vector size {e8p.SIZE}; leave this layer as it is"
            )
        device = weight.device
        generator = torch.Generator().manual_seed(self.seed)
        out_signs, in_signs = (random_signs(n, generator).to(device) for n in (out, size))
        rotated = rotate(rotate(weight.float(), in_signs).T.contiguous(), out_signs).T.contiguous()
        hessian = rotate(rotate(stats.hessian.to(device).double(), in_signs).T.contiguous(), in_signs)
        hessian = (hessian + hessian.T) / 2
        # The rotation leaves a multiple of the identity as it is, so it makes no difference where the damping is added.
        lower = feedback(damped(hessian, self.damping), e8p.SIZE).float()

        first, second = torch.tensor(PASSES if self.search else PASSES[:1], device=device).T
        steps = rotated.square().mean().sqrt() / torch.stack([first, first * second])
        table = e8p.patterns().to(device)
        if self.search:
            steps = steps[:, _best(rotated, hessian.float(), lower, steps, table)]
        codes, _ = _round(rotated, lower, steps.reshape(2, 1, 1), table)
        return QuantizedWeight(
            self.name,
            {"codes": codes},
            {"patterns": torch.stack([table, table])},
            {"step": steps.reshape(2).contiguous(), "out_signs": out_signs, "in_signs": in_signs},
            (out, size),
            weight.dtype,
        )

    def dequantize(self, quantized: QuantizedWeight) -> Tensor:
        """Return the decoded weight [out_features, in_features] in the original basis and the source's dtype."""
        steps = quantized.scales["step"] / e8p.UNITS
        passes = zip(quantized.codes["codes"], quantized.codebooks["patterns"], steps, strict=True)
        first, second = (e8p.decode(codes, table) * step for codes, table, step in passes)
        rotated = (first + second).reshape(quantized.shape)
        weight = rotate_back(rotate_back(rotated, quantized.scales["in_signs"]).T.contiguous(), quantized.scales["out_signs"]).T
        limit = torch.finfo(quantized.dtype).max
        return weight.clamp(-limit, limit).to(quantized.dtype).contiguous()

    def entry_indices(self, quantized: QuantizedWeight) -> Tensor:
        """Return int64 [2, out * in / 8]: the pattern that each vector of the rotated weight reads, per pass."""
        return ((quantized.codes["codes"].long() >> 8) & 0xFF).flatten(1)

    def relabel(self, quantized: QuantizedWeight, order: Tensor) -> QuantizedWeight:
        """Return the same weight with each pass's patterns in the order `order` [2, 256]: the decoded weight is equal to the bit.

        Raises
        ------
        ParameterError
            When a row of `order` is no permutation.
        """
        table = quantized.codebooks["patterns"]
        expected = torch.arange(e8p.PATTERNS, device=order.device).expand(2, -1)
        if order.shape != expected.shape or not torch.equal(order.sort(1).values, expected):
            raise ParameterError(
                f"{self.name}: an order {list(order.shape)} whose rows are not permutations of {e8p.PATTERNS} patterns; "
                "wqlab.quantizers.weights.reorder_by_frequency makes one"
            )
        places = torch.empty_like(order).scatter_(1, order, expected)
        indices = places.gather(1, self.entry_indices(quantized)).reshape(quantized.codes["codes"].shape)
        bits = indices << 8 | quantized.codes["codes"].long() & 0xFF
        codes = {"codes": (bits - ((bits & 0x8000) << 1)).to(torch.int16)}
        books = {"patterns": table.gather(1, order.unsqueeze(2).expand_as(table))}
        return QuantizedWeight(
            self.name, codes, books, quantized.scales, quantized.shape, quantized.dtype, quantized.meta, quantized.losses
        )


def _round(weight: Tensor, lower: Tensor, steps: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rotated `weight` float32 [out, in] with feedback and return int16 codes [2, out, in / 8] and the rounded weight.

    `steps` float32 [2, out, 1] or [2, 1, 1] is what one unit of the codebook stands for, per pass.
    """
    out, size = weight.shape
    codes = torch.empty(2, out, size // e8p.SIZE, dtype=torch.int16, device=weight.device)
    # A weight of zeros has step 0; dividing by 1 instead gives some code without 0/0, and the step makes it zero again.
    divisors = torch.where(steps > 0, steps, torch.ones_like(steps))

    nearest = e8p.Nearest(table)

    def two_passes(block: int, target: Tensor) -> Tensor:
        codes[0, :, block], first = nearest(target / divisors[0])
        first = first * steps[0]
        codes[1, :, block], second = nearest((target - first) / divisors[1])
        return first + second * steps[1]

    return codes, ldlq(weight, lower, e8p.SIZE, two_passes)


def _best(weight: Tensor, hessian: Tensor, lower: Tensor, steps: Tensor, table: Tensor) -> Tensor:
    """Return, on the device, which column of `steps` [2, candidates] loses least on a sample of the rows of `weight`."""
    places = torch.linspace(0, weight.shape[0] - 1, min(weight.shape[0], _SAMPLE), device=weight.device).long()
    # All candidates at once, as rows: rows are rounded independently of each other, and the loop over the columns runs once.
    rows = weight[places].repeat(steps.shape[1], 1)
    _, rounded = _round(rows, lower, steps.repeat_interleave(places.shape[0], dim=1).unsqueeze(2), table)
    lost = rounded - rows
    return (lost @ hessian * lost).sum(1).reshape(steps.shape[1], -1).sum(1).argmin()
