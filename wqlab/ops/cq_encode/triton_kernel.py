"""`cq_encode` in Triton: scores by tensor cores, split into halves where they need it, and the best entry by maxima of integers.

A program owns a few neighbouring books (channel groups of one head) and a run of vectors. With `m` the mean of a book, the entry
nearest to a vector `x` has the largest ::

    (x - m) . (c - m) - |c - m|^2 / 2 + bias  =  x . (c - m) + [bias - |c - m|^2 / 2 - m . (c - m)]

which is one product of up to 15 terms: `x` in its own half precision times each part of ``c - m`` (two of float16 or three of
bfloat16), and one times each of three parts of the bracket. So `x` is multiplied as it was read, and sums are in float32.

The mean of ``c - m`` is zero, so one of the products ``(x - m) . (c - m)`` is not negative, and with ``bias >= |c - m|^2 / 2`` the
largest score is not either. Its bits then compare as an integer, and sm_90 takes the largest of three integers in one instruction.

Entries whose indices are equal modulo `classes` form a class. The largest score of each class comes first. The number of the class
then replaces its lowest bits, so that the largest key names the class, and the few entries of that class are compared in float32,
from differences. With 256 classes the key names the entry, and nothing is left to compare.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wqlab.errors import ParameterError

#: 2, and what the terms of a product have room for.
VECTOR_SIZES = (2, 4)
NUM_CODES = 256
#: Terms of a product on tensor cores.
_TERMS = 16
#: Parts of an entry that together hold about 23 bits, by the dtype of the vectors they are multiplied with.
_PARTS = {torch.float16: 2, torch.bfloat16: 3}
_CONSTANT_PARTS = 3
#: The largest factor of a book's table, as a power of two: float16 has room above, and its parts keep their bits.
_TOP = 14
#: The bias over the largest half square: more than 1, because rounding must not make the best score negative.
_BIAS = 1.25
#: Constant of an entry that a short book lacks: below every score that is not negative.
_NOWHERE = -60000.0
#: Programs per multiprocessor to aim at, and the most blocks of vectors that one of them encodes.
_PROGRAMS_PER_SM, _MOST_BLOCKS = 16, 8


class Tiling(NamedTuple):
    """How the kernel is compiled.

    Parameters
    ----------
    block : int
        Vectors of a step.
    num_warps : int
        Of a program. With 4, or 8 for 128 vectors, sm_90 multiplies by groups of four warps.
    columns : int
        Entries of a product, 16 to 256.
    classes : int
        16 to 256; see the module.
    books : {4, 2, 1}
        Neighbouring groups of a program at most; their number divides the groups.
    max_registers : int, optional
        Of a thread: fewer let more programs share a multiprocessor. Default: as many as the compiler likes.
    """

    block: int
    num_warps: int
    columns: int
    classes: int
    books: int
    max_registers: int | None = None


#: By vector size: what `encode` takes unless it is told otherwise. `wqlab bench cq_encode` compares them with others.
TILINGS = {2: Tiling(64, 2, 64, 16, 4), 4: Tiling(64, 2, 64, 16, 2)}


@dataclass(frozen=True, eq=False)
class PreparedEntries:
    """Codebooks as the kernel reads them; made once by `prepare`.

    Parameters
    ----------
    entries : Tensor
        float32 [heads, groups, num_entries, vector_size], as given.
    table : Tensor
        [books, 256, 16] in the dtype of the vectors: the factors of an entry in the product. Entries that a short book lacks have
        scores below all others.
    exact : Tensor
        float32 [books, classes, 256 / classes, vector_size]: the entries, class by class; infinite where there is none.
    """

    entries: Tensor
    table: Tensor
    exact: Tensor

    @property
    def classes(self) -> int:
        """Classes of entries, as in `Tiling`."""
        return int(self.exact.shape[1])

    def nbytes(self) -> int:
        """Return the bytes that the kernel may read."""
        return self.table.nbytes + self.exact.nbytes


def prepare(entries: Tensor, dtype: torch.dtype = torch.float16, classes: int | None = None) -> PreparedEntries:
    """Return codebooks as the kernel reads them.

    Parameters
    ----------
    entries : Tensor
        float32 [heads, groups, num_entries, vector_size], finite, at most 256 entries.
    dtype : torch.dtype
        Of the vectors: float16 or bfloat16.
    classes : int, optional
        As in the `Tiling` they will be used with. Default: that of `TILINGS`.
    """
    heads, groups, count, size = entries.shape
    classes = TILINGS[size].classes if classes is None else classes
    books = heads * groups
    known = entries.reshape(books, count, size).double()
    mean = known.mean(1, keepdim=True)
    centred = known - mean
    half_square = centred.square().sum(-1, keepdim=True) / 2
    constant = _BIAS * half_square.amax(1, keepdim=True) - half_square - (mean * centred).sum(-1, keepdim=True)
    largest = torch.cat([centred, constant], -1).abs().amax((1, 2), keepdim=True)
    # Any power of two leaves the order of a book's scores as it is. A book of equal entries at zero has nothing to scale.
    scale = torch.where(largest == 0, 1.0, torch.exp2(_TOP - torch.frexp(largest).exponent.double()))
    factors = torch.cat([*_parts(centred * scale, _PARTS[dtype], dtype), *_parts(constant * scale, _CONSTANT_PARTS, dtype)], -1)
    table = torch.zeros(books, NUM_CODES, _TERMS, dtype=dtype, device=entries.device)
    table[:, :count, : factors.shape[-1]] = factors
    table[:, count:, _PARTS[dtype] * size] = _NOWHERE
    exact = torch.full((books, NUM_CODES, size), torch.inf, dtype=torch.float32, device=entries.device)
    exact[:, :count] = entries.reshape(books, count, size)
    exact = exact.reshape(books, NUM_CODES // classes, classes, size).transpose(1, 2).contiguous()
    return PreparedEntries(entries, table, exact)


def _parts(x: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return `count` tensors of `dtype` whose sum is `x`, each the rounding of what those before it leave."""
    parts: list[Tensor] = []
    for _ in range(count):
        parts.append(x.to(dtype))
        x = x - parts[-1].double()
    return parts


@triton.jit
def _higher(best, score, TIMES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest of `best` [BLOCK, WIDTH] and of `score` [BLOCK, TIMES * WIDTH], column by column modulo WIDTH."""
    if TIMES == 1:
        return tl.maximum(best, tl.reshape(score, [BLOCK, WIDTH]))
    elif TIMES == 2:  # noqa: RET505 - what follows a return is compiled, the other branch of a constant is not
        first, second = tl.split(tl.permute(tl.reshape(score, [BLOCK, 2, WIDTH]), (0, 2, 1)))
        return tl.maximum(tl.maximum(first, second), best)
    else:
        first, second = tl.split(tl.permute(tl.reshape(score, [BLOCK, 2, TIMES // 2, WIDTH]), (0, 2, 3, 1)))
        return _higher(_higher(best, first, TIMES // 2, BLOCK, WIDTH), second, TIMES // 2, BLOCK, WIDTH)


@triton.jit
def _scores(left, table, first, DOT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the scores of entries [first, first + COLUMNS) as the integers of their bits."""
    entry = first + tl.arange(0, COLUMNS)
    right = tl.load(table + entry[None, :] * 16 + tl.arange(0, 16)[:, None])
    return tl.dot(left, right.to(DOT), input_precision="ieee").to(tl.int32, bitcast=True)


@triton.jit
def _nearest(
    x, table, exact, DOT: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Return the index of one book's entry that is nearest to each vector of `x` [BLOCK, VECTOR]."""
    term = tl.arange(0, 16)[None, :]
    repeated = tl.reshape(tl.broadcast_to(x[:, None, :], [BLOCK, 16 // VECTOR, VECTOR]), [BLOCK, 16])
    ones = tl.where(term < PARTS * VECTOR + 3, 1.0, 0.0).to(DOT)
    left = tl.where(term < PARTS * VECTOR, repeated.to(DOT), ones)
    if CLASSES <= COLUMNS:
        best = tl.full([BLOCK, CLASSES], -0x80000000, tl.int32)
        for first in tl.static_range(0, 256, COLUMNS):
            best = _higher(best, _scores(left, table, first, DOT, COLUMNS), COLUMNS // CLASSES, BLOCK, CLASSES)
        key = (best & -CLASSES) | tl.arange(0, CLASSES)[None, :]
    else:
        key = tl.full([BLOCK, 16], -0x80000000, tl.int32)
        for first in tl.static_range(0, CLASSES, COLUMNS):
            best = _scores(left, table, first, DOT, COLUMNS)
            for later in tl.static_range(CLASSES, 256, CLASSES):
                best = tl.maximum(best, _scores(left, table, later + first, DOT, COLUMNS))
            named = (best & -CLASSES) | (first + tl.arange(0, COLUMNS))[None, :]
            key = _higher(key, named, COLUMNS // 16, BLOCK, 16)
    chosen = tl.max(key, 1) & (CLASSES - 1)
    if CLASSES == 256:
        return chosen
    else:  # noqa: RET505
        MEMBERS: tl.constexpr = 256 // CLASSES
        start = exact + chosen * (MEMBERS * VECTOR)
        members = tl.load(start[:, None] + tl.arange(0, MEMBERS * VECTOR)[None, :])
        apart = tl.reshape(members, [BLOCK, MEMBERS, VECTOR]) - x.to(tl.float32)[:, None, :]
        distance = tl.sum(apart * apart, 2)
        member = (distance.to(tl.int32, bitcast=True) & -MEMBERS) | tl.arange(0, MEMBERS)[None, :]
        return (tl.min(member, 1) & (MEMBERS - 1)) * CLASSES + chosen


@triton.jit(do_not_specialize=["rows", "seq", "blocks", "last"])
def _encode_kernel(
    x, batch_stride, head_stride, token_stride, table, exact, codes, rows, seq, heads, groups, blocks, last,
    DOT: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, BOOKS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    book = tl.program_id(1) * BOOKS
    head, group = (book // groups).to(tl.int64), book % groups  # 64 bits: a long prompt has more elements than 32 can count
    table += book.to(tl.int64) * (256 * 16)
    exact += book.to(tl.int64) * (256 * VECTOR)
    for block in range(tl.program_id(0) * blocks, tl.minimum((tl.program_id(0) + 1) * blocks, tl.cdiv(rows, BLOCK))):
        row = block * BLOCK + tl.arange(0, BLOCK)
        batch, token = (row // seq).to(tl.int64), (row % seq).to(tl.int64)
        here = row < rows
        start = x + batch * batch_stride + head * head_stride + token * token_stride + group * VECTOR
        packed = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(BOOKS):
            channel = i * VECTOR + tl.arange(0, VECTOR)
            vector = tl.load(start[:, None] + channel[None, :], mask=here[:, None], other=0.0)
            code = _nearest(vector, table + i * (256 * 16), exact + i * (256 * VECTOR), DOT, PARTS, VECTOR, BLOCK, COLUMNS, CLASSES)
            packed |= tl.minimum(code, last) << (8 * i)  # only a vector of NaN is nearest to an entry that is not there
        out = codes + ((batch * heads + head) * seq + token) * (groups // BOOKS) + group // BOOKS
        tl.store(out, packed.to(codes.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "seq", "count"])
def _plain_kernel(
    x, batch_stride, head_stride, token_stride, entries, codes, rows, seq, heads, groups, count,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A thread per vector, entry after entry."""
    book = tl.program_id(1)
    head, group = (book // groups).to(tl.int64), book % groups
    entries += book.to(tl.int64) * count * VECTOR
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch, token = (row // seq).to(tl.int64), (row % seq).to(tl.int64)
    here = row < rows
    start = x + batch * batch_stride + head * head_stride + token * token_stride + group * VECTOR
    tile = tl.load(start[:, None] + tl.arange(0, VECTOR)[None, :], mask=here[:, None], other=0.0)
    vector = tile.to(tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    code = tl.zeros([BLOCK], tl.int32)
    for entry in range(count):
        apart = vector - tl.load(entries + entry * VECTOR + tl.arange(0, VECTOR))[None, :]
        distance = tl.sum(apart * apart, 1)
        code = tl.where(distance < least, entry, code)
        least = tl.minimum(distance, least)
    tl.store(codes + ((batch * heads + head) * seq + token) * groups + group, code.to(tl.uint8), mask=here)


#: Whether TRITON_INTERPRET was set when this module was imported: the kernel then runs on the CPU, slowly.
INTERPRETED = not isinstance(_encode_kernel, triton.runtime.JITFunction)
_DOT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
#: Books of a program -> what holds their codes.
_PACKS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def encode(x: Tensor, prepared: PreparedEntries, tiling: Tiling | None = None) -> Tensor:
    """Return the codes of `x`; see `wqlab.ops.cq_encode.encode`, which also checks the arguments.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim] on a CUDA device (or anywhere in the interpreter).
    prepared : PreparedEntries
        Codebooks on the same device, for the dtype of `x` and the classes of `tiling`.
    tiling : Tiling, optional
        How the kernel is compiled. Default: that of `TILINGS`.

    Returns
    -------
    Tensor
        uint8 [batch, heads, seq, groups], contiguous.
    """
    codes = torch.empty((*x.shape[:3], prepared.entries.shape[1]), dtype=torch.uint8, device=x.device)
    encode_into(codes, x, prepared, tiling)
    return codes


def encode_into(codes: Tensor, x: Tensor, prepared: PreparedEntries, tiling: Tiling | None = None) -> None:
    """Write the codes of `x` into `codes`, contiguous; as `encode`, without allocations where rows of `x` are contiguous.

    Raises
    ------
    ParameterError
        When the codebooks were prepared for another dtype than that of `x`, or for other classes than the tiling's.
    """
    tiling = TILINGS[prepared.entries.shape[3]] if tiling is None else tiling
    if (prepared.table.dtype, prepared.classes) != (x.dtype, tiling.classes):
        raise ParameterError(
            f"the codebooks were prepared for vectors of {prepared.table.dtype} and {prepared.classes} classes, not for {x.dtype} "
            f"and {tiling.classes}; prepare them anew"
        )
    if x.stride(3) != 1:
        x = x.contiguous()
    batch, heads, seq, _ = x.shape
    _, groups, count, size = prepared.entries.shape
    rows = batch * seq
    if not codes.numel():
        return
    books = next(n for n in _PACKS if n <= tiling.books and groups % n == 0)
    sets, all_blocks = heads * groups // books, triton.cdiv(rows, tiling.block)
    wanted = triton.cdiv(_PROGRAMS_PER_SM * _multiprocessors(x.device), sets)
    blocks = min(triton.cdiv(all_blocks, wanted), _MOST_BLOCKS)
    # bf16 products are wrong in the interpreter; float32 ones are exact there.
    dot = tl.float32 if INTERPRETED and x.dtype == torch.bfloat16 else _DOT[x.dtype]
    with torch.cuda.device(x.device if x.is_cuda else -1):
        _encode_kernel[(triton.cdiv(all_blocks, blocks), sets)](
            x, *x.stride()[:3], prepared.table, prepared.exact, codes.view(_PACKS[books]), rows, seq, heads, groups, blocks,
            count - 1, DOT=dot, PARTS=_PARTS[x.dtype], VECTOR=size, BOOKS=books, BLOCK=tiling.block, COLUMNS=tiling.columns,
            CLASSES=tiling.classes, num_warps=tiling.num_warps, num_stages=1, maxnreg=tiling.max_registers,
        )  # fmt: skip


def encode_plainly(codes: Tensor, x: Tensor, entries: Tensor, block: int = 128) -> None:
    """Write the codes of `x` into `codes` without tensor cores, in float32 from differences; the lowest index of equally near ones.

    For vectors of float32, and what `wqlab bench cq_encode` compares the kernel with. Entries as of `prepare`, contiguous.
    """
    if x.stride(3) != 1:
        x = x.contiguous()
    batch, heads, seq, _ = x.shape
    _, groups, count, size = entries.shape
    if not codes.numel():
        return
    with torch.cuda.device(x.device if x.is_cuda else -1):
        _plain_kernel[(triton.cdiv(batch * seq, block), heads * groups)](
            x, *x.stride()[:3], entries, codes, batch * seq, seq, heads, groups, count, VECTOR=size, BLOCK=block, num_warps=4
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
