"""`cq_encode` in plain torch: what every kernel is held to, and how codes are judged."""

from __future__ import annotations

import torch
from torch import Tensor

from wqlab.quantizers.codebooks import nearest_entries

#: Distances that are held at once: 512 MB in float64.
_AT_ONCE = 2**26
#: See `bound`.
_RELATIVE, _ABSOLUTE = 2.0**-16, 2.0**-12


def encode(x: Tensor, entries: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the index of the nearest entry; of equally near ones the lowest.

    Distances are compared from differences, so that a large common offset loses nothing. In float32 the quantizer does this.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim], on any device.
    entries : Tensor
        [heads, groups, num_entries, vector_size].
    dtype : torch.dtype
        Of the computation; float64 for a tighter truth.

    Returns
    -------
    Tensor
        uint8 [batch, heads, seq, groups].
    """
    if dtype == torch.float32:
        return nearest_entries(x, entries)
    vectors, known = _vectors(x, entries, dtype)
    codes = torch.empty(vectors.shape[:2], dtype=torch.uint8, device=x.device)
    step = _step(entries)
    for start in range(0, vectors.shape[1], step):
        codes[:, start : start + step] = _distances(vectors[:, start : start + step], known).argmin(-1)
    return _as_codes(codes, x, entries)


def excess(x: Tensor, entries: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much farther the entries that `codes` name are than the nearest ones, in float64.

    Parameters
    ----------
    x, entries, codes : Tensor
        As `encode` takes and returns them.

    Returns
    -------
    excess, least : Tensor
        float64 [batch, heads, seq, groups]: squared distance to the named entry less that to the nearest, and the latter. A code
        that names no entry gives infinity.
    """
    vectors, known = _vectors(x, entries, torch.float64)
    count = entries.shape[2]
    named = codes.permute(1, 3, 0, 2).reshape(vectors.shape[:2]).long()
    found, least = (torch.empty(vectors.shape[:2], dtype=torch.float64, device=x.device) for _ in range(2))
    step = _step(entries)
    for start in range(0, vectors.shape[1], step):
        part = slice(start, start + step)
        apart = _distances(vectors[:, part], known)
        least[:, part] = apart.amin(-1)
        chosen = apart.gather(-1, named[:, part].clamp(max=count - 1).unsqueeze(-1)).squeeze(-1)
        found[:, part] = torch.where(named[:, part] < count, chosen - least[:, part], torch.inf)
    return _as_codes(found, x, entries), _as_codes(least, x, entries)


def bound(x: Tensor, entries: Tensor, least: Tensor) -> Tensor:
    """Return how much farther than the nearest entry, in squared distance, a kernel's choice may be.

    ``2^-16 * least + 2^-12 * r * (r + |x| + |m|)``, where `r` is the largest distance of an entry's coordinate from the mean
    `m` of its book and ``|.|`` the largest coordinate. The absolute part is that of two scores: 16 roundings of a sum up to
    ``4 r (|x| + |m|)`` in float32 that cuts off, parts of entries that hold 22 bits, and keys that keep 15 bits or more; see
    `wqlab.ops.cq_encode.triton_kernel`.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim].
    entries : Tensor
        [heads, groups, num_entries, vector_size].
    least : Tensor
        [batch, heads, seq, groups]: squared distance to the nearest entry.

    Returns
    -------
    Tensor
        float64, like `least`.
    """
    known = entries.double()
    mean = known.mean(2, keepdim=True)
    radius = (known - mean).abs().amax((2, 3)).unsqueeze(1)  # [heads, 1, groups]
    far = x.double().reshape(*x.shape[:3], entries.shape[1], entries.shape[3]).abs().amax(-1)
    allowed: Tensor = _RELATIVE * least + _ABSOLUTE * radius * (radius + far + mean.abs().amax((2, 3)).unsqueeze(1))
    return allowed


def _vectors(x: Tensor, entries: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return vectors [books, batch * seq, vector_size] and entries [books, num_entries, vector_size]."""
    batch, heads, seq, _ = x.shape
    _, groups, count, size = entries.shape
    grouped = x.reshape(batch, heads, seq, groups, size).permute(1, 3, 0, 2, 4)
    return grouped.reshape(heads * groups, batch * seq, size).to(dtype), entries.reshape(heads * groups, count, size).to(dtype)


def _distances(vectors: Tensor, known: Tensor) -> Tensor:
    """Return squared distances [books, rows, num_entries]."""
    total = (vectors[:, :, None, 0] - known[:, None, :, 0]).square_()
    for channel in range(1, known.shape[-1]):
        total += (vectors[:, :, None, channel] - known[:, None, :, channel]).square_()
    return total


def _step(entries: Tensor) -> int:
    return max(_AT_ONCE // entries[..., 0].numel(), 1)


def _as_codes(values: Tensor, x: Tensor, entries: Tensor) -> Tensor:
    """Return [books, batch * seq] as [batch, heads, seq, groups]."""
    heads, groups = entries.shape[:2]
    return values.reshape(heads, groups, x.shape[0], x.shape[2]).permute(2, 0, 3, 1).contiguous()
