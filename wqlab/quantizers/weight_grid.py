"""Equal steps with a zero point over groups of input channels: the grid that element-wise methods of weights share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitpack
from wqlab.quantizers.rtn import round_up
from wqlab.quantizers.weights import QuantizedWeight


class GridCodes(NamedTuple):
    """`codes` uint8 [out, in]; `scale` float16 and `zero` uint8 [out, groups]: an element is ``(code - zero) * scale``."""

    codes: Tensor
    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class WeightGrid:
    """Asymmetric round to nearest: one scale and one zero point per output channel and group of input channels.

    The range of a group is stretched to hold 0, so the zero point is one of the codes and takes `num_bits` too. Zero itself is then
    exact, as AWQ and GPTQ kernels expect, and a constant group is off by the rounding of its scale only.

    Parameters
    ----------
    num_bits : {2, 4, 8}
        Bits per code and per zero point: what `wqlab.layouts.bitpack` packs.
    group_size : int
        Input channels per group; the last group of a row may be shorter.

    Error
    -----
    The stored scale `s` is the true step rounded up to float16, so the codes reach over the whole range, and an element `x` decoded
    as `y` keeps ``|x - y| <= s / 2`` but for the last bits of float32. Where both ends of the range lie half a step off the grid,
    the upper one is clipped by exactly that half.

    Raises
    ------
    ParameterError
        For other bits, or a group size below 1.
    """

    num_bits: int = 4
    group_size: int = 128

    def __post_init__(self) -> None:
        if isinstance(self.num_bits, bool) or self.num_bits not in bitpack.BITS:
            raise ParameterError(f"num_bits = {self.num_bits!r} is not one of {', '.join(map(str, bitpack.BITS))}")
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise ParameterError(f"group_size = {self.group_size!r} is not a whole number of input channels, 1 or more")

    def encode(self, weight: Tensor) -> GridCodes:
        """Round `weight` float32 [out, in]. A scale beyond float16 comes back infinite; `store` refuses it."""
        out, size = weight.shape
        groups = -(-size // self.group_size)
        levels = 2**self.num_bits - 1
        # Filled with zeros, which every range holds anyway.
        grouped = pad(weight, (0, groups * self.group_size - size)).reshape(out, groups, self.group_size)
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        # float64 for these few numbers: high - low can overflow float32.
        scale = round_up((high.double() - low.double()) / levels, torch.float16)
        step = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        zero = (-low / step).round_()
        codes = (grouped / step.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, levels).to(torch.uint8)
        return GridCodes(codes.reshape(out, -1)[:, :size].contiguous(), scale, zero.to(torch.uint8))

    def decode(self, stored: GridCodes) -> Tensor:
        """Return the values float32 [out, in]."""
        out, size = stored.codes.shape
        groups = stored.scale.shape[1]
        codes = pad(stored.codes, (0, groups * self.group_size - size)).reshape(out, groups, self.group_size)
        values = (codes.float() - stored.zero.float().unsqueeze(2)).mul_(stored.scale.float().unsqueeze(2))
        return values.reshape(out, -1)[:, :size]

    def store(self, method: str, weight: Tensor, found: GridCodes, channel: Tensor | None = None) -> QuantizedWeight:
        """Return `found` as `method` stores it, with codes and zero points packed.

        Parameters
        ----------
        method : str
            The registry key.
        weight : Tensor
            The source, for its shape and dtype.
        found : GridCodes
            What `encode` returned.
        channel : Tensor, optional
            float16 [in]: what the input channels were multiplied with before.

        Raises
        ------
        UnsupportedError
            When a group's step is beyond float16.
        """
        if bool(torch.isinf(found.scale).any()):
            raise UnsupportedError(
                f"{method}: a group of weights spans more than {2**self.num_bits - 1} steps of 65504, the most that float16 holds; "
                "scale the layer down first"
            )
        scales = {"scale": found.scale, "zero": bitpack.pack(found.zero, self.num_bits)}
        if channel is not None:
            scales["channel"] = channel
        meta = {"num_bits": self.num_bits, "group_size": self.group_size}
        codes = {"codes": bitpack.pack(found.codes, self.num_bits)}
        return QuantizedWeight(method, codes, {}, scales, (weight.shape[0], weight.shape[1]), weight.dtype, meta)


def load(quantized: QuantizedWeight) -> Tensor:
    """Return the decoded weight [out, in] of what `WeightGrid.store` made, in the source's dtype.

    Bits and groups are those of `quantized.meta`, whatever the options of the object that reads it.
    """
    grid = WeightGrid(quantized.meta["num_bits"], quantized.meta["group_size"])
    scale = quantized.scales["scale"]
    codes = bitpack.unpack(quantized.codes["codes"], grid.num_bits, quantized.shape[1])
    values = grid.decode(GridCodes(codes, scale, bitpack.unpack(quantized.scales["zero"], grid.num_bits, scale.shape[1])))
    if "channel" in quantized.scales:
        values = values / quantized.scales["channel"].float()
    # The outermost codes may lie a little beyond the group's ends, past the dtype's last finite number.
    limit = torch.finfo(quantized.dtype).max
    return values.clamp(-limit, limit).to(quantized.dtype)
