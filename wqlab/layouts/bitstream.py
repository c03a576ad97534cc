"""``bitstream-v1``: codes of any 1 to 16 bits, one after the other along the last axis without gaps, lowest bits first.

Bit `b` of code `i` is bit ``(i * num_bits + b) % 8`` of byte ``(i * num_bits + b) // 8`` of its row. Codes of 12 bits, such as
AQLM-3's, straddle bytes and words (VQ-LLM, Sect. 4.1, calls them unaligned): two of them take three bytes. The last byte of a row
is filled with zeros, so every row starts at a byte. The name is part of every file and record that holds packed data; another
arrangement gets another name. Widths 2, 4 and 8 give the bytes of ``bitpack-v1``.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError

LAYOUT = "bitstream-v1"
WIDEST = 16


def packed_size(size: int, num_bits: int) -> int:
    """Return the bytes of one packed row of `size` codes: ``ceil(size * num_bits / 8)``."""
    return -(-size * _checked(num_bits) // 8)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Pack codes along the last axis.

    Parameters
    ----------
    codes : Tensor
        Of any integer dtype [..., size], each from 0 to ``2 ** num_bits - 1``.
    num_bits : int
        Bits per code, 1 to 16.

    Returns
    -------
    Tensor
        uint8 [..., ceil(size * num_bits / 8)].

    Raises
    ------
    ParameterError
        For other bits, or a code that does not fit them (it would overwrite its neighbour).
    UnsupportedError
        For codes that are no whole numbers.
    """
    size = codes.shape[-1]
    taken = packed_size(size, num_bits)
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype == torch.bool:
        raise UnsupportedError(f"{LAYOUT} packs whole numbers, got {codes.dtype}")
    wide = codes.to(torch.int32)
    if codes.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < 2**num_bits:
        raise ParameterError(f"{LAYOUT}: codes from {int(wide.min())} to {int(wide.max())} do not fit {num_bits} bits")
    per_turn, bytes_per_turn = _turn(num_bits)
    filled: Tensor = torch.nn.functional.pad(wide, (0, -size % per_turn))
    filled = filled.reshape(*codes.shape[:-1], -(-size // per_turn), per_turn)
    packed = torch.zeros(*filled.shape[:-1], bytes_per_turn, dtype=torch.int32, device=codes.device)
    for code in range(per_turn):
        first = code * num_bits
        for byte in range(first // 8, (first + num_bits - 1) // 8 + 1):
            packed[..., byte] |= _shift(filled[..., code], first - 8 * byte) & 0xFF
    return packed.to(torch.uint8).flatten(-2)[..., :taken].contiguous()


def unpack(packed: Tensor, num_bits: int, size: int) -> Tensor:
    """Return the codes of `pack`: int32 [..., size].

    Raises
    ------
    ParameterError
        For other bits, or when rows of `size` codes have another number of bytes.
    UnsupportedError
        For bytes that are not uint8.
    """
    expected = packed_size(size, num_bits)
    if packed.dtype != torch.uint8:
        raise UnsupportedError(f"{LAYOUT} unpacks uint8, got {packed.dtype}")
    if packed.shape[-1] != expected:
        raise ParameterError(f"{LAYOUT}: {size} codes of {num_bits} bits take {expected} bytes per row, got {packed.shape[-1]}")
    per_turn, bytes_per_turn = _turn(num_bits)
    filled: Tensor = torch.nn.functional.pad(packed, (0, -expected % bytes_per_turn)).to(torch.int32)
    filled = filled.reshape(*packed.shape[:-1], -(-expected // bytes_per_turn), bytes_per_turn)
    codes = torch.zeros(*filled.shape[:-1], per_turn, dtype=torch.int32, device=packed.device)
    for code in range(per_turn):
        first = code * num_bits
        for byte in range(first // 8, (first + num_bits - 1) // 8 + 1):
            codes[..., code] |= _shift(filled[..., byte], 8 * byte - first)
    whole: Tensor = (codes & (2**num_bits - 1)).flatten(-2)
    return whole[..., :size].contiguous()


def _turn(num_bits: int) -> tuple[int, int]:
    """Return after how many codes, and bytes, the places of the codes inside bytes repeat."""
    return 8 // gcd(num_bits, 8), num_bits // gcd(num_bits, 8)


def _shift(x: Tensor, places: int) -> Tensor:
    """Return `x` with its bits `places` higher, or lower when negative."""
    return x << places if places >= 0 else x >> -places


def _checked(num_bits: int) -> int:
    if isinstance(num_bits, bool) or not isinstance(num_bits, int) or not 1 <= num_bits <= WIDEST:
        raise ParameterError(f"{LAYOUT}: num_bits = {num_bits!r} is not a whole number from 1 to {WIDEST}")
    return num_bits
