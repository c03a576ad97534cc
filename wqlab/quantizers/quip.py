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

#: What N(0, 1) is multiplied with before the first pass.
_FIRST = 1.03
#: What the first pass leaves over is multiplied with before the second.
_SECOND = 3.45


@register("method", "quip")
@dataclass(frozen=True)
class QuIPQuantizer(WeightQuantizer):
    """QuIP#-4, VQ<8, 65536, 2>: two E8P codes for each eight weights of a row of ``U W V^T``.

    `U` and `V` are randomized Hadamard rotations (`wqlab.quantizers.incoherence`) of the outputs and the inputs. In the rotated
    basis blocks of eight columns are rounded with the feedback of `wqlab.quantizers.ldlq`; the first code rounds the block, the
    second what the first one left over. Fine-tuning after the rounding (Sect. 5 of the paper) is not done.

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

    Raises
    ------
    ParameterError
        For an option outside its limits.
    """

    seed: int = 0
    damping: float = 0.01

    name: ClassVar[str] = "quip"
    spec: ClassVar[VQSpec] = VQSpec(e8p.SIZE, 65536, 2, scope="tensor", switch_axes="R")

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ParameterError(f"{self.name}: seed = {self.seed!r} is not a whole number from 0 to 2^63 - 1")
        if not 0 < self.damping <= 1:
            raise ParameterError(f"{self.name}: damping = {self.damping!r} is outside (0, 1]")

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
        hessian = damped(stats.hessian.to(device), self.damping)
        hessian = rotate(rotate(hessian, in_signs).T.contiguous(), in_signs)
        lower = feedback((hessian + hessian.T) / 2, e8p.SIZE).float()

        steps = rotated.square().mean().sqrt() / torch.tensor([_FIRST, _FIRST * _SECOND], device=device)
        # A weight of zeros has step 0; dividing by 1 instead gives some code without 0/0, and the step makes it zero again.
        divisors = torch.where(steps > 0, steps, torch.ones_like(steps))
        table = e8p.patterns().to(device)
        codes = torch.empty(2, out, size // e8p.SIZE, dtype=torch.int16, device=device)

        def two_passes(block: int, target: Tensor) -> Tensor:
            rounded = torch.zeros_like(target)
            for which in range(2):
                codes[which, :, block] = e8p.encode((target - rounded) / divisors[which], table)
                rounded = rounded + e8p.decode(codes[which, :, block], table) * (steps[which] / e8p.UNITS)
            return rounded

        ldlq(rotated, lower, e8p.SIZE, two_passes)
        return QuantizedWeight(
            self.name,
            {"codes": codes},
            {"patterns": torch.stack([table, table])},
            {"step": steps, "out_signs": out_signs, "in_signs": in_signs},
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
