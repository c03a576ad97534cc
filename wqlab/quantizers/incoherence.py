"""Randomized Hadamard rotation: it spreads the outliers of a weight over all its elements (QuIP#, Sect. 3).

A vector of ``n = p * m`` numbers, `p` the largest power of two in `n` and `m` odd, is multiplied by random signs and then by
``C_m (x) H_p / sqrt(p)``: Sylvester's Hadamard matrix as butterflies, and for the odd part the orthonormal DCT-II, which is dense
and exists for every size, as Hadamard matrices do not. Both are orthogonal, so is the product. The DCT's elements reach
sqrt(2 / m) instead of sqrt(1 / m), so the bound on the largest element after the rotation is up to sqrt(2) looser than with a
Hadamard matrix. An odd `n` is left to the DCT alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def random_signs(size: int, generator: torch.Generator) -> Tensor:
    """Return `size` random signs as they are stored: uint8 [ceil(size / 8)], sign `i` at bit ``i % 8`` of byte ``i // 8``.

    1 is minus. Bits past `size` are zero. The generator is of the CPU, so that one seed gives the same signs on every device.
    """
    bits = torch.randint(0, 2, (-(-size // 8) * 8,), generator=generator, dtype=torch.int32)
    bits[size:] = 0
    places = torch.arange(8, dtype=torch.int32)
    return (bits.reshape(-1, 8) << places).sum(1).to(torch.uint8)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Rotate the last axis of `x` float32 or float64 [..., n] by the stored `signs` uint8 [ceil(n / 8)] on the same device."""
    size = x.shape[-1]
    power = size & -size
    y = _hadamard((x * _unpacked(signs, size, x.dtype)).reshape(*x.shape[:-1], size // power, power))
    return (_dct(size // power, x.dtype, x.device) @ y).reshape(x.shape)


def rotate_back(x: Tensor, signs: Tensor) -> Tensor:
    """Undo `rotate`: its transpose, because the rotation is orthogonal."""
    size = x.shape[-1]
    power = size & -size
    y = _dct(size // power, x.dtype, x.device).T @ x.reshape(*x.shape[:-1], size // power, power)
    return _hadamard(y).reshape(x.shape) * _unpacked(signs, size, x.dtype)


def _unpacked(signs: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return +1 and -1 [size]."""
    bits = (signs.to(torch.int32).unsqueeze(1) >> torch.arange(8, device=signs.device)) & 1
    return (1 - 2 * bits.flatten()[:size]).to(dtype)


def _hadamard(x: Tensor) -> Tensor:
    """Multiply the last axis, a power of two, by Sylvester's Hadamard matrix over sqrt(n), which is its own inverse."""
    shape, size = x.shape, x.shape[-1]
    half = size // 2
    while half:
        first, second = x.reshape(-1, 2, half).unbind(1)
        x = torch.stack([first + second, first - second], dim=1)
        half //= 2
    return x.reshape(shape) / math.sqrt(size)


def _dct(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II [size, size], computed in float64: row `k` is ``cos(pi k (2 i + 1) / (2 size))``, length 1."""
    k = torch.arange(size, dtype=torch.float64, device=device)
    rows = torch.cos(math.pi / (2 * size) * k.unsqueeze(1) * (2 * k + 1)) * math.sqrt(2 / size)
    rows[0] = math.sqrt(1 / size)
    return rows.to(dtype)
