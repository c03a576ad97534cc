"""FP8: 8-bit floating point, e4m3 without infinities (Micikevicius et al., "FP8 Formats for Deep Learning", Table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wqlab.quantizers import Quantized, Quantizer
from wqlab.quantizers.rtn import SPANS, round_up
from wqlab.registry import register

#: Largest finite number of e4m3, 1.75 * 2^8.
LARGEST = 448.0


@register("method", "fp8")
class FP8Quantizer(Quantizer):
    """Numbers ``x / scale`` in e4m3, with one scale per group; codes are the bit patterns.

    ``scale = max|x| / 448`` over the group, rounded up in the source's dtype, so nothing saturates. Engines that serve FP8 caches
    take one scale per tensor; granularity ``window`` is closest to that.

    Error
    -----
    e4m3 keeps 3 bits behind the leading one, down to 2^-6, and counts in steps of 2^-9 below. For an element `x` decoded as `y`,
    with `s` the stored scale, `eps` and `tiny` as in `wqlab.quantizers.rtn`::

        |x - y| <= max(|x| / 16, s / 1024) * (1 + 2^-20) + max(eps |y|, tiny) / 2 * (1 + 2^-12)

    Unlike an integer grid the error follows the element, not the range of its group: an outlier costs its neighbours little.
    """

    name = "fp8"
    target = "kv"
    supported_bits = (8,)
    window_grids = False
    relative_error = 2.0**-4

    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim]; `seq` must be a multiple of the window size.

        Returns
        -------
        Quantized
            `scale` as RTN's; `minimum` is empty, [batch, heads, windows, 0], because the grid is symmetric.
        """
        self.check(x)
        batch, heads, seq, head_dim = x.shape
        windows = seq // self.spec.window_size
        grouped = x.reshape(batch, heads, windows, self.spec.window_size, head_dim)
        largest = grouped.abs().amax(SPANS[self.spec.granularity], keepdim=True)
        scale = round_up(largest.double() / LARGEST, x.dtype)
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        # The quotient may pass 448 by its own rounding, and e4m3 would make that NaN.
        numbers = (grouped.float() / divisor).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        codes = numbers.view(torch.uint8).reshape(x.shape)
        return Quantized(codes, scale.squeeze(3), x.new_empty(batch, heads, windows, 0), self.spec, x.dtype)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return ``e4m3(codes) * scale`` [batch, heads, seq, head_dim], rounded once to the source's dtype."""
        codes = quantized.codes
        batch, heads, seq, head_dim = codes.shape
        size = quantized.spec.window_size
        numbers = codes.contiguous().view(torch.float8_e4m3fn).float().reshape(batch, heads, seq // size, size, head_dim)
        limit = torch.finfo(quantized.dtype).max
        values = numbers.mul_(quantized.scale.unsqueeze(3).float()).clamp_(-limit, limit)
        return values.to(quantized.dtype).reshape(codes.shape)

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return ``8 + bits(dtype) / elements per group``: one scale per group and nothing else."""
        _, heads, _, head_dim = shape
        size = self.spec.window_size
        elements = {"window_channel": size, "window_head": size * head_dim, "window": heads * size * head_dim}
        return 8 + 8 * dtype.itemsize / elements[self.spec.granularity]
