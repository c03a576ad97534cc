"""Shared-memory loads of warps, replayed address by address: wavefronts and bank conflicts as the hardware's counters count them.

Shared memory has 32 banks of 4 bytes. A warp's load is served in wavefronts; in one, every bank gives one word, and lanes that want
the same word share it. Loads of 8 bytes are served a half warp at a time, loads of 16 bytes a quarter warp at a time, because one
wavefront returns 128 bytes. Where, in the whole warp, lanes i and i xor 1 want the same address, or all lanes i and i xor 2 do (an
inactive lane agrees with any), every two neighbouring parts are served together. A phase is what is served together, a conflict a
wavefront beyond one per phase:

    wavefronts = sum over phases of max over banks of distinct words,    conflicts = wavefronts - phases with an active lane

That the whole warp decides is what an H200 counted in 64 cases (``wqlab bench bank_conflicts``): pairs in the first half warp alone
are served in four phases, and 16-byte loads with inactive lanes rule out that one half agrees at distance 1 and the other at 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wqlab.errors import ParameterError
from wqlab.simulate.gpus import GPUSpec

Scheme = Literal["contiguous", "padded", "swizzled", "replicated"]
SCHEMES: tuple[Scheme, ...] = ("contiguous", "padded", "swizzled", "replicated")
ACCESS_BYTES = (4, 8, 16)
WARP = 32
#: Bytes of a wavefront: all banks once.
ROW_BYTES = 128
#: Marks a lane that loads nothing.
INACTIVE = -1
#: Warp accesses that are replayed at a time, so that they stay in the cache.
_CHUNK = 1 << 14

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Replay:
    """What the loads of many warps cost.

    Parameters
    ----------
    wavefronts : ndarray
        int64 [num_accesses]; 0 for an access without an active lane.
    conflicts : ndarray
        int64 [num_accesses]; wavefronts beyond one per phase.
    """

    wavefronts: NDArray[np.int64]
    conflicts: NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Where a codebook's entries lie in shared memory; addresses start at a multiple of 128 bytes.

    An entry is loaded in chunks of `access_bytes`. Chunk k of entry e is unit ``e * stride + k`` (in chunks). A swizzle exchanges
    units within rows of 128 bytes by xor with the row's number. Copies of a unit lie side by side; lane l reads ``l mod copies``.

    Parameters
    ----------
    num_entries : int
        Of the codebook.
    entry_bytes : int
        Of an entry, a multiple of `access_bytes`.
    access_bytes : {4, 8, 16}
        Per lane and load.
    scheme : {"contiguous", "padded", "swizzled", "replicated"}
        What differs from entry after entry.
    padding_bytes : int
        Behind every entry, a multiple of `access_bytes`; only for ``padded``.
    copies : int
        A power of two up to 32; only for ``replicated``.

    Raises
    ------
    ParameterError
        For a size that is negative, or no multiple, or that the scheme does not have; names value and limit.
    """

    num_entries: int
    entry_bytes: int
    access_bytes: int = 4
    scheme: Scheme = "contiguous"
    padding_bytes: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        if self.access_bytes not in ACCESS_BYTES:
            raise ParameterError(f"access_bytes = {self.access_bytes}: a lane loads 4, 8 or 16 bytes")
        if self.scheme not in SCHEMES:
            raise ParameterError(f"scheme = {self.scheme!r}: known are {', '.join(SCHEMES)}")
        if self.num_entries < 1:
            raise ParameterError(f"num_entries = {self.num_entries}: a codebook has 1 or more")
        if self.entry_bytes < 1 or self.entry_bytes % self.access_bytes:
            raise ParameterError(
                f"entry_bytes = {self.entry_bytes}: must be a positive multiple of access_bytes = {self.access_bytes}"
            )
        if self.padding_bytes < 0 or self.padding_bytes % self.access_bytes:
            raise ParameterError(
                f"padding_bytes = {self.padding_bytes}: must be 0 or a positive multiple of access_bytes = {self.access_bytes}"
            )
        if self.copies not in (1, 2, 4, 8, 16, 32):
            raise ParameterError(f"copies = {self.copies}: must be a power of two from 1 to 32")
        if self.padding_bytes and self.scheme != "padded":
            raise ParameterError(f"padding_bytes = {self.padding_bytes}: only the scheme 'padded' has padding, not {self.scheme!r}")
        if self.copies > 1 and self.scheme != "replicated":
            raise ParameterError(f"copies = {self.copies}: only the scheme 'replicated' has copies, not {self.scheme!r}")

    @property
    def chunks(self) -> int:
        """Loads per entry."""
        return self.entry_bytes // self.access_bytes

    @property
    def stride(self) -> int:
        """Chunks from an entry to the next."""
        return self.chunks + self.padding_bytes // self.access_bytes

    @property
    def swizzle(self) -> int:
        """Mask of the row's number that is xored into the unit; 0 without a swizzle."""
        return ROW_BYTES // self.access_bytes - 1 if self.scheme == "swizzled" else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory that it takes, bytes; whole rows, because a swizzle exchanges units within them."""
        size = self.num_entries * self.stride * self.copies * self.access_bytes
        return -(-size // ROW_BYTES) * ROW_BYTES

    def check(self, gpu: GPUSpec) -> None:
        """Raise ParameterError where a block of `gpu` cannot hold it; names both sizes."""
        if self.shared_bytes > gpu.shared_bytes_per_block:
            raise ParameterError(
                f"{self.num_entries} entries of {self.entry_bytes} bytes, {self.scheme}, take {self.shared_bytes} bytes of shared "
                f"memory; a block on {gpu.name} has at most {gpu.shared_bytes_per_block}: keep fewer entries or copies there"
            )

    def addresses(self, indices: Ints, n_reg: int = 0) -> NDArray[np.int32]:
        """Return the byte addresses of look-ups.

        Parameters
        ----------
        indices : ndarray
            Integers [num_warps, 32]: the entry that each lane looks up.
        n_reg : int
            Entries with a smaller index are held in registers and load nothing.

        Returns
        -------
        ndarray
            int32 [num_warps, chunks, 32], `INACTIVE` where a lane loads nothing.

        Raises
        ------
        ParameterError
            For an index outside the codebook, another shape, or a negative `n_reg`.
        """
        if indices.ndim != 2 or indices.shape[1] != WARP:
            raise ParameterError(f"indices are {list(indices.shape)}; they must be [num_warps, {WARP}], one entry per lane")
        if not 0 <= n_reg <= self.num_entries:
            raise ParameterError(f"n_reg = {n_reg}: must be 0 to {self.num_entries}, the entries of the codebook")
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_entries:
            low, high = indices.min(), indices.max()
            raise ParameterError(f"indices reach from {low} to {high}; the codebook has 0 to {self.num_entries - 1}")
        entries = indices.astype(np.int32)[:, None, :]
        unit = entries * np.int32(self.stride) + np.arange(self.chunks, dtype=np.int32)[None, :, None]
        if self.swizzle:
            unit ^= (unit // (self.swizzle + 1)) & self.swizzle
        if self.copies > 1:
            unit = unit * np.int32(self.copies) + np.arange(WARP, dtype=np.int32) % np.int32(self.copies)
        unit *= np.int32(self.access_bytes)
        return np.where(entries < n_reg, np.int32(INACTIVE), unit) if n_reg else unit


def replay(addresses: Ints, access_bytes: int) -> Replay:
    """Count the wavefronts and conflicts of shared-memory loads.

    Parameters
    ----------
    addresses : ndarray
        Integers [..., 32]: byte address of each lane, aligned to `access_bytes`; negative for a lane that loads nothing.
    access_bytes : {4, 8, 16}
        Per lane.

    Returns
    -------
    Replay
        One number per warp access, in order; leading axes are flattened.

    Raises
    ------
    ParameterError
        For another access size, another last axis, an address that is not aligned, or one of 1 GiB and more.
    """
    if access_bytes not in ACCESS_BYTES:
        raise ParameterError(f"access_bytes = {access_bytes}: a lane loads 4, 8 or 16 bytes")
    if addresses.shape[-1:] != (WARP,):
        raise ParameterError(f"addresses are {list(addresses.shape)}; the last axis must be the {WARP} lanes of a warp")
    rows = addresses.reshape(-1, WARP)
    wavefronts, conflicts = (np.zeros(len(rows), dtype=np.int64) for _ in range(2))
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        wavefronts[part], conflicts[part] = _chunk(rows[part], access_bytes)
    return Replay(wavefronts, conflicts)


def _chunk(rows: Ints, access_bytes: int) -> tuple[Ints, Ints]:
    highest = int(rows.max(initial=0))
    if highest >= 1 << 30:
        raise ParameterError(f"address {highest}: shared memory ends far below 1 GiB")
    unit = np.maximum(rows, -1).astype(np.int32)
    if np.any((unit & (access_bytes - 1))[unit >= 0] != 0):
        raise ParameterError(f"addresses must be multiples of access_bytes = {access_bytes}; align the layout")
    # -1 >> n stays -1: an inactive lane.
    unit >>= access_bytes.bit_length() - 1
    if access_bytes == 4:
        found = _phases(unit, WARP)
        return found, found - (found > 0)
    lanes = ROW_BYTES // access_bytes  # of a phase
    apart = _phases(unit.reshape(-1, lanes), lanes).reshape(-1, 2)
    pairs = unit.reshape(-1, 2 * lanes)  # two neighbouring phases
    together = np.repeat(_agree(unit, 1) | _agree(unit, 2), WARP // (2 * lanes))
    wavefronts, phases = apart.sum(axis=1), (apart > 0).sum(axis=1)
    if together.any():
        wavefronts[together] = _phases(pairs[together], lanes)
        phases[together] = wavefronts[together] > 0
    per_warp = -1, WARP // (2 * lanes)
    wavefronts, phases = wavefronts.reshape(per_warp).sum(axis=1), phases.reshape(per_warp).sum(axis=1)
    return wavefronts, wavefronts - phases


def _agree(unit: Ints, distance: int) -> NDArray[np.bool_]:
    """Return, per row, whether every two lanes that far apart want the same address, or one of them none."""
    pairs = unit.reshape(len(unit), -1, 2, distance)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    return np.asarray(((first == second) | (first < 0) | (second < 0)).all(axis=(1, 2)))


def _phases(unit: Ints, banks: int) -> Ints:
    """Return the wavefronts of each row of units: the most distinct ones in a bank, where `banks` is a power of two."""
    # The bank in the high bits: sorted, the units of a bank follow each other, and equal ones too. Inactive lanes come first.
    shift = 31 - banks.bit_length()
    key = ((unit & (banks - 1)) << shift) | (unit >> (banks.bit_length() - 1))
    key[unit < 0] = -1
    key.sort(axis=1)
    lanes = np.ascontiguousarray(key.T)
    bank = (lanes >> shift).astype(np.int8)
    run = (lanes[0] >= 0).astype(np.int8)
    most = run.copy()
    for i in range(1, len(lanes)):
        # One more distinct unit of the same bank, or the first of the next.
        run *= bank[i] == bank[i - 1]
        run += lanes[i] != lanes[i - 1]
        np.maximum(most, run, out=most)
    return np.asarray(most.astype(np.int64))


def zipf_indices(num_warps: int, num_entries: int, skew: float, seed: int) -> NDArray[np.int32]:
    """Return random look-ups whose frequency falls with the index, as of a codebook sorted by frequency.

    Parameters
    ----------
    num_warps : int
        Of 32 lanes each.
    num_entries : int
        Of the codebook.
    skew : float
        Entry e is looked up in proportion to ``(e + 1) ** -skew``; 0: all alike.
    seed : int
        Of the draw.

    Returns
    -------
    ndarray
        int32 [num_warps, 32].

    Raises
    ------
    ParameterError
        For a size or skew below zero, or no entries.
    """
    if num_warps < 0:
        raise ParameterError(f"num_warps = {num_warps}: must be 0 or more")
    draws = np.random.default_rng(seed).random((num_warps, WARP))
    return np.searchsorted(np.cumsum(frequencies(num_entries, skew))[:-1], draws, side="right").astype(np.int32)


def frequencies(num_entries: int, skew: float) -> NDArray[np.float64]:
    """Return the share of the look-ups that each entry gets, float64 [num_entries], as `zipf_indices` draws them."""
    if num_entries < 1:
        raise ParameterError(f"num_entries = {num_entries}: a codebook has 1 or more")
    if not 0 <= skew < np.inf:
        raise ParameterError(f"skew = {skew}: must be 0 (all entries alike) or more")
    weight = np.arange(1, num_entries + 1, dtype=np.float64) ** -skew
    return np.asarray(weight / weight.sum())
