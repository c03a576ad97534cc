"""RTN, round to nearest: asymmetric uniform quantization per group (WindowQuant, Eq. 14-16)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wqlab.quantizers import Quantized, Quantizer
from wqlab.registry import register

#: Granularity -> axes of [batch, heads, windows, window_size, head_dim] that one group spans.
SPANS: dict[str, tuple[int, ...]] = {"window_channel": (3,), "window_head": (3, 4), "window": (1, 3, 4)}


@register("method", "rtn")
class RTNQuantizer(Quantizer):
    """Round to nearest with one ``(scale, minimum)`` per group of a window.

    The paper writes ``q = clamp(round(x / s) + z)`` and ``x ~ s (q - z)`` with ``s = (max - min) / (2^b - 1)`` and an integer
    zero point `z`. Here the group's minimum itself is stored instead of `z`: as many bits, but the minimum of a group, and so
    every constant group, comes back exactly, and a range far from zero (where `z` would be a huge integer) loses nothing.

    Error
    -----
    Let ``d = (max - min) / (2^b - 1)`` be the true step of a group, `eps` the spacing of the source's dtype at 1 (2^-10 for
    float16, 2^-7 for bfloat16, 2^-23 for float32), `tiny` its smallest subnormal. The stored scale `s` is `d` rounded **up**,
    so ``d <= s <= max(d (1 + eps), d + tiny)``. Rounding to nearest instead could leave ``(2^b - 1) s`` short of the range by up
    to ``(2^b - 1) eps / 2`` steps, which is a whole step for 8 bits in bfloat16. Hence, for an element `x` decoded as `y`::

        |x - y| <= s / 2 * (1 + 2^-13) + max(eps |y|, tiny) / 2 * (1 + 2^-12)

    that is half a stored step, and the rounding of the result to the source's dtype. The factors in brackets cover the working
    precision: ``x - minimum`` and the quotient by `s` are each off by 2^-24, on at most 255 steps. Where ``d < tiny`` the codes
    count subnormals and the result is exact.
    """

    name = "rtn"
    target = "kv"

    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim]; `seq` must be a multiple of the window size.

        Returns
        -------
        Quantized
            `scale` and `minimum` are [batch, heads, windows, head_dim] for ``window_channel``, [batch, heads, windows, 1] for
            ``window_head`` and [batch, 1, windows, 1] for ``window``.
        """
        self.check(x)
        batch, heads, seq, head_dim = x.shape
        levels = 2**self.spec.num_bits - 1
        grouped = x.reshape(batch, heads, seq // self.spec.window_size, self.spec.window_size, head_dim)
        spans = SPANS[self.spec.granularity]
        low, high = grouped.amin(spans, keepdim=True), grouped.amax(spans, keepdim=True)
        # float64 for these few numbers: in the source's own dtype high - low can overflow.
        scale = round_up((high.double() - low.double()) / levels, x.dtype)
        work = _working_dtype(x.dtype)
        # A constant group has scale 0; dividing by 1 instead gives code 0 without 0/0.
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale).to(work)
        codes = ((grouped.to(work) - low.to(work)) / divisor).round_().clamp_(0, levels).to(torch.uint8)
        return Quantized(codes.reshape(x.shape), scale.squeeze(3), low.squeeze(3), self.spec, x.dtype)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return ``codes * scale + minimum`` [batch, heads, seq, head_dim], rounded once to the source's dtype."""
        codes = quantized.codes
        batch, heads, seq, head_dim = codes.shape
        size = quantized.spec.window_size
        work = _working_dtype(quantized.dtype)
        grouped = codes.reshape(batch, heads, seq // size, size, head_dim).to(work)
        values = grouped.mul_(quantized.scale.unsqueeze(3).to(work)).add_(quantized.minimum.unsqueeze(3).to(work))
        # The top code may lie a little above the group's maximum, past the dtype's last finite number.
        limit = torch.finfo(quantized.dtype).max
        return values.clamp_(-limit, limit).to(quantized.dtype).reshape(codes.shape)

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return ``num_bits + 2 * bits(dtype) / elements per group``: 3.0 for INT2 per window of 32 and channel in FP16."""
        _, heads, _, head_dim = shape
        size = self.spec.window_size
        elements = {"window_channel": size, "window_head": size * head_dim, "window": heads * size * head_dim}
        return self.spec.num_bits + 2 * 8 * dtype.itemsize / elements[self.spec.granularity]


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return where codes are computed: float16's whole range fits float32 with room; the others need float64 for max - min."""
    return torch.float32 if dtype == torch.float16 else torch.float64


def round_up(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest numbers of `dtype` that are not below the float64 numbers `exact` (zero or positive)."""
    nearest = exact.to(dtype)
    # Bit patterns of non-negative floats are ordered like the numbers; torch.nextafter lacks half types on some devices.
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    above = (nearest.view(bits) + 1).view(dtype)
    return torch.where(nearest.double() < exact, above, nearest)
