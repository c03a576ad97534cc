"""``bitpack-v1``: codes of 2, 4 or 8 bits, consecutive along the last axis, the first code in a byte's lowest bits.

Byte `j` of a row holds codes ``j * p ... j * p + p - 1`` with ``p = 8 / num_bits``; code `i` of them lies at bit ``i * num_bits``.
A row whose length is no multiple of `p` is filled with zeros, so every row starts at a byte. The name is part of every file
and record that holds packed data; another arrangement gets another name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError

LAYOUT = "bitpack-v1"
BITS = (2, 4, 8)


def packed_size(size: int, num_bits: int) -> int:
    """Return the bytes of one packed row of `size` codes: ``ceil(size * num_bits / 8)``."""
    return -(-size * _checked(num_bits) // 8)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Pack codes along the last axis.

    Parameters
    ----------
    codes : Tensor
        uint8 [..., size], each below ``2 ** num_bits``.
    num_bits : {2, 4, 8}
        Bits per code.

    Returns
    -------
    Tensor
        uint8 [..., ceil(size * num_bits / 8)], in storage of its own.

    Raises
    ------
    ParameterError
        For other bits, or a code that needs more of them (it would overwrite its neighbour).
    UnsupportedError
        For codes that are not uint8.
    """
    per_byte = 8 // _checked(num_bits)
    if codes.dtype != torch.uint8:
        raise UnsupportedError(f"{LAYOUT} packs uint8 codes, got {codes.dtype}")
    if per_byte == 1:
        return codes.clone(memory_format=torch.contiguous_format)
    if codes.numel() and int(codes.max()) >= 2**num_bits:
        raise ParameterError(f"{LAYOUT}: code {int(codes.max())} does not fit {num_bits} bits")
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    packed = filled[..., ::per_byte].clone(memory_format=torch.contiguous_format)
    for place in range(1, per_byte):
        packed |= filled[..., place::per_byte] << (place * num_bits)
    return packed


def unpack(packed: Tensor, num_bits: int, size: int) -> Tensor:
    """Return the codes of `pack`: uint8 [..., size].

    Raises
    ------
    ParameterError
        For other bits, or when rows of `size` codes have another number of bytes.
    """
    expected = packed_size(size, num_bits)
    if packed.shape[-1] != expected:
        raise ParameterError(f"{LAYOUT}: {size} codes of {num_bits} bits take {expected} bytes per row, got {packed.shape[-1]}")
    if num_bits == 8:
        return packed
    mask = 2**num_bits - 1
    places = [(packed >> (place * num_bits)) & mask for place in range(8 // num_bits)]
    return torch.stack(places, dim=-1).flatten(-2)[..., :size]


def _checked(num_bits: int) -> int:
    if num_bits not in BITS:
        raise ParameterError(f"{LAYOUT}: num_bits = {num_bits!r} is not one of {', '.join(map(str, BITS))}")
    return num_bits
