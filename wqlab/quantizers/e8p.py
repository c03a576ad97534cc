"""E8P: 65,536 points in eight dimensions from a table of 256 (Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard
Incoherence and Lattice Codebooks", ICML 2024, Sect. 4.1).

A point is an absolute pattern of half-odd numbers, with signs, moved by +1/4 or -1/4 in all coordinates::

    code  = pattern << 8 | signs << 1 | shift        16 bits
    point = (-1)^signs * pattern +- 1/4              bit i of the seven `signs` belongs to coordinate i, the eighth follows

The vectors before the shift lie in D8 + 1/2, whose coordinates add up to an even number. Turning one sign changes the sum by an odd
number, so a pattern allows either the even or the odd numbers of minus signs, and seven signs tell the eighth. The table keeps that
parity in the sign of each pattern's last coordinate: relative to the table, the number of turned signs is always even.

Everything is in whole numbers: the table in halves (1, 3, 5), points in quarters.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

#: Coordinates of a point.
SIZE = 8
#: Stored patterns.
PATTERNS = 256
#: What `decode` returns is in units of one over this.
UNITS = 4
#: The 29 patterns of squared norm 12 that the paper's authors chose, by the places of their three halves; the others are 3/2.
_NORM_12 = "123 023 013 012 367 357 347 356 346 345 267 257 247 256 246 245 167 157 147 156 146 045 067 057 047 056 046 014 237"


def patterns() -> Tensor:
    """Return the table int8 [256, 8] in halves: 227 patterns of squared norm up to 10, then 29 of 12.

    The last coordinate is negative in patterns whose coordinates otherwise add up to an odd number.
    """
    small = [p for p in itertools.product((1, 3, 5), repeat=SIZE) if sum(v * v for v in p) <= 10 * 4]
    large = [tuple(1 if str(i) in places else 3 for i in range(SIZE)) for places in _NORM_12.split()]
    table = torch.tensor(small + large, dtype=torch.int8)
    odd = table.sum(1) // 2 % 2 == 1
    table[odd, -1] *= -1
    return table


def decode(codes: Tensor, table: Tensor) -> Tensor:
    """Return the points of `codes`, by a look-up and bit operations as a kernel does them.

    Parameters
    ----------
    codes : Tensor
        int16 [...], any bits.
    table : Tensor
        int8 [256, 8]: `patterns`, its rows in any order.

    Returns
    -------
    Tensor
        int8 [..., 8] in quarters, from -11 to 11.
    """
    bits = codes.to(torch.int32) & 0xFFFF
    signs = (bits >> 1) & 0x7F
    eighth = signs ^ (signs >> 4)
    eighth = eighth ^ (eighth >> 2)
    eighth = (eighth ^ (eighth >> 1)) & 1
    signs = signs | eighth << 7
    turned = (signs.unsqueeze(-1) >> torch.arange(SIZE, device=codes.device)) & 1
    shift = ((bits & 1) * 2 - 1).unsqueeze(-1)
    entries = table.to(torch.int32)[bits >> 8]
    return (entries * (2 - 4 * turned) + shift).to(torch.int8)


class Nearest:
    """Finds nearest points of the codebook. What depends on the table alone is worked out once, because LDLQ asks block by block.

    Exact: for each shift and pattern the best signs are those of the point itself, and where their parity is wrong, turning the
    coordinate `i` with the smallest ``a_i |y_i|`` costs the least, ``4 a_i |y_i|``. So 512 candidates stand for all 65,536.

    Parameters
    ----------
    table : Tensor
        int8 [256, 8]: `patterns`, its rows in any order.
    dtype : {torch.float32, torch.float64}
        Of the points. Candidates whose distances differ by less than its rounding may change places.
    """

    def __init__(self, table: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self._entries = table.to(dtype) / 2
        self._twice = 2 * self._entries.abs().T
        self._norms = self._entries.square().sum(1)
        self._negative = self._entries[:, -1] < 0
        self._shifts = torch.arange(2, dtype=dtype, device=table.device) / 2 - 0.25
        self._places = torch.arange(SIZE, device=table.device)
        self._bits = 2 << self._places
        self._bits[-1] = 0  # the eighth sign is not stored

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes int16 [n] and the points that they stand for [n, 8], for `points` [n, 8].

        About five tables of 512 scores per point are held at once: 1 GiB for 100,000 points.
        """
        moved = points - self._shifts[:, None, None]
        sizes = moved.abs()
        # A minus sign of the point is a turned sign of the table, except where a pattern is negative in its last coordinate.
        wrong = ((moved < 0).sum(2, keepdim=True) & 1 == 1) ^ self._negative
        repair = sizes[..., :1] * self._twice[0]
        for i in range(1, SIZE):
            torch.minimum(repair, sizes[..., i : i + 1] * self._twice[i], out=repair)
        # Squared distance = |y|^2 - score, where y is the point before its shift: of one y, only scores differ between patterns.
        score = sizes @ self._twice - self._norms - torch.where(wrong, 2 * repair, 0)
        best, pattern = score.max(2)
        # |y - t|^2 = |y|^2 - 2 t sum(y) + 8 t^2, and t^2 is the same for both shifts.
        shift = (best + 2 * self._shifts.unsqueeze(1) * points.sum(1)).argmax(0, keepdim=True)
        pattern = pattern.gather(0, shift)[0]
        shift = shift[0].unsqueeze(1)
        moved = torch.where(shift == 1, moved[1], moved[0])
        chosen = self._entries[pattern]
        products = moved * chosen
        turned = products < 0
        cheapest = products.abs().argmin(1, keepdim=True)
        turned = turned ^ ((self._places == cheapest) & (turned.sum(1, keepdim=True) & 1 == 1))
        found = torch.where(turned, -chosen, chosen) + self._shifts[shift]
        bits = (pattern << 8) + (turned * self._bits).sum(1) + shift[:, 0]
        # The upper half of 16 bits is negative in int16.
        return (bits - ((bits & 0x8000) << 1)).to(torch.int16), found
