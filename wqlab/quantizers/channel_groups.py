"""Groups along the channels of one token, on RTN's grid: what the methods that quantize per token share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wqlab.quantizers import Quantized
from wqlab.quantizers.rtn import RTNQuantizer
from wqlab.types import QuantSpec


class Rows(NamedTuple):
    """`codes` uint8 [batch, heads, seq, head_dim]; `scale`, `minimum` [batch, heads, seq, groups] in the source's dtype."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor


def num_groups(head_dim: int, group_size: int) -> int:
    """Return the groups of one token: ``ceil(head_dim / group_size)``; the last one may be shorter."""
    return -(-head_dim // group_size)


def encode(x: Tensor, num_bits: int, group_size: int) -> Rows:
    """Encode each token's groups of `group_size` neighbouring channels on RTN's grid, whose error bound therefore holds.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim] in float16, bfloat16 or float32; any `seq`.
    num_bits : {2, 4, 8}
        Bits per code.
    group_size : int
        Channels per group.
    """
    batch, heads, seq, head_dim = x.shape
    groups = num_groups(head_dim, group_size)
    size = min(group_size, head_dim)
    # The last channel again fills up the last group: a value that is there already moves no minimum and no maximum.
    filled = torch.cat([x, x[..., -1:].expand(-1, -1, -1, groups * size - head_dim)], dim=-1)
    grid = _grid(num_bits).quantize(filled.reshape(batch, heads, seq * groups, size))
    codes = grid.codes.reshape(batch, heads, seq, groups * size)[..., :head_dim].contiguous()
    shape = batch, heads, seq, groups
    return Rows(codes, grid.scale.reshape(shape), grid.minimum.reshape(shape))


def decode(rows: Rows, num_bits: int, group_size: int, dtype: torch.dtype) -> Tensor:
    """Return the decoded tensor [batch, heads, seq, head_dim] in `dtype`."""
    batch, heads, seq, head_dim = rows.codes.shape
    groups = rows.scale.shape[3]
    size = min(group_size, head_dim)
    codes = pad(rows.codes, (0, groups * size - head_dim)).reshape(batch, heads, seq * groups, size)
    one = batch, heads, seq * groups, 1
    grid = _grid(num_bits)
    values = grid.dequantize(Quantized(codes, rows.scale.reshape(one), rows.minimum.reshape(one), grid.spec, dtype))
    return values.reshape(batch, heads, seq, groups * size)[..., :head_dim].contiguous()


def _grid(num_bits: int) -> RTNQuantizer:
    """RTN over rows: each row of the reshaped tensor is one group."""
    return RTNQuantizer(QuantSpec(num_bits, 1, "window_head"))
