"""KIVI: keys per channel, values per token (Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wqlab.quantizers import Quantized, Quantizer, Role, channel_groups
from wqlab.quantizers.rtn import RTNQuantizer
from wqlab.registry import register
from wqlab.types import QuantSpec


@register("method", "kivi")
class KIVIQuantizer(Quantizer):
    """Keys in groups of G tokens of one channel, values in groups of G channels of one token, both on an asymmetric grid.

    Keys have channels of large magnitude, so a group must not mix channels; values have none, and attention sums them over tokens,
    so each token keeps an error of its own (KIVI, sect. 3). `window_size` is G for both, 32 in the paper; a head whose size is no
    multiple of G has a shorter last group. The policy ``kivi`` adds the residual of 128 tokens in full precision::

        QuantizedKVCache("kivi", num_bits=2, policy="kivi", residual_length=128)

    The groups are the method: `granularity` takes its default and says no more.

    Error
    -----
    That of `wqlab.quantizers.rtn.RTNQuantizer`, with the steps of these groups.
    """

    name = "kivi"
    target = "kv"
    supported_bits = (2, 4)
    window_grids = False
    published_policy = "kivi"
    supported_granularities = ("window_channel",)

    def __init__(self, spec: QuantSpec, role: Role = "key") -> None:
        super().__init__(spec, role)
        self._keys = RTNQuantizer(spec, role)

    @property
    def tokens_per_group(self) -> int:
        """`window_size` for keys; 1 for values."""
        return 1 if self.role == "value" else self.spec.window_size

    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim]; for keys `seq` must be a multiple of the window size.

        Returns
        -------
        Quantized
            `scale` and `minimum` are [batch, heads, seq / G, head_dim] for keys, [batch, heads, seq, ceil(head_dim / G)] for
            values.
        """
        self.check(x)
        if self.role != "value":
            return self._keys.quantize(x)
        rows = channel_groups.encode(x, self.spec.num_bits, self.spec.window_size)
        return Quantized(*rows, self.spec, x.dtype)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return ``codes * scale + minimum`` [batch, heads, seq, head_dim], rounded once to the source's dtype."""
        if self.role != "value":
            return self._keys.dequantize(quantized)
        rows = channel_groups.Rows(quantized.codes, quantized.scale, quantized.minimum)
        return channel_groups.decode(rows, self.spec.num_bits, self.spec.window_size, quantized.dtype)

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return codes and metadata: 3.0 for INT2 in groups of 32 in FP16, keys and values."""
        if self.role != "value":
            return self._keys.bits_per_element(shape, dtype)
        groups = channel_groups.num_groups(shape[3], self.spec.window_size)
        return self.spec.num_bits + 2 * 8 * dtype.itemsize * groups / shape[3]
