"""`cq_encode` in Triton: distances by tensor cores in split half precision, the nearest entry by minima of integers.

A program owns a few neighbouring books (channel groups of one head) and a run of vectors. For a vector `x` and an entry `c`, both
less the mean of the book and times a power of two, ::

    |x - c|^2 / 2  =  |x|^2 / 2 - x . c + |c|^2 / 2

is one product of 16 terms. Every number is a high and a low half of float16: the terms are ``x_high c_high``, ``x_low c_high``,
``x_high c_low``, and both halves of each square times one. Sums are in float32. With the square of `x` inside, what is compared is
the distance itself and not a small difference of large scores. A distance is not negative, so its bits compare as integers, and
sm_90 takes the least of three integers in one instruction.

Entries whose indices are equal modulo `classes` form a class. The least distance of each class comes first. The number of the class
then replaces its lowest bits, so that the least key names the class, and the few entries of that class are compared in float32,
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

VECTOR_SIZES = (2, 4)
NUM_CODES = 256
#: A code's squared distance exceeds the least one by at most ``RELATIVE * least + ABSOLUTE * radius ** 2``, where `radius` is the
#: largest distance of an entry's coordinate from the mean of its book. Keys keep 15 bits or more behind the point, and pulling far
#: vectors nearer costs 2^-12 of the least distance; together the relative part. The absolute part is 16 roundings of sums up to 16
#: (radius 2, 4 channels), in float32 that cuts off, for two entries.
RELATIVE, ABSOLUTE = 2.0**-11, 2.0**-15
#: Terms of a product on tensor cores.
_TERMS = 16
#: Half of the squared distance of an entry that a short book lacks: more than any other, and finite in float16.
_NOWHERE = 60000.0
#: Exponents of the scale: the largest finite float32 stays finite after it.
_MOST_EXPONENT = 60
#: Programs per multiprocessor to aim at, and the most blocks of vectors that one of them encodes with the books it has loaded.
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
    """

    block: int
    num_warps: int
    columns: int
    classes: int
    books: int


#: What `encode` takes unless it is told otherwise; `wqlab bench cq_encode` compares it with others.
TILING = Tiling(128, 4, 64, 16, 4)


@dataclass(frozen=True, eq=False)
class PreparedEntries:
    """Codebooks as the kernel reads them; made once by `prepare`.

    Parameters
    ----------
    entries : Tensor
        float32 [heads, groups, num_entries, vector_size], as given.
    table : Tensor
        float16 [books, 256, 16]: the factors of an entry in the product. Entries that a short book lacks lie far away.
    frame : Tensor
        float32 [books, vector_size + 1]: mean of the book, and the power of two that brings `radius` into (1, 2].
    exact : Tensor
        float32 [books, classes, 256 / classes, vector_size]: the entries, class by class; infinite where there is none.
    """

    entries: Tensor
    table: Tensor
    frame: Tensor
    exact: Tensor

    @property
    def classes(self) -> int:
        """Classes of entries, as in `Tiling`."""
        return int(self.exact.shape[1])

    def nbytes(self) -> int:
        """Return the bytes that the kernel may read; the entries as given not counted."""
        return self.table.nbytes + self.frame.nbytes + self.exact.nbytes


def prepare(entries: Tensor, classes: int = TILING.classes) -> PreparedEntries:
    """Return codebooks as the kernel reads them.

    Parameters
    ----------
    entries : Tensor
        float32 [heads, groups, num_entries, vector_size], finite, at most 256 entries.
    classes : int
        As in the `Tiling` they will be used with.
    """
    heads, groups, count, size = entries.shape
    books = heads * groups
    known = entries.reshape(books, count, size).double()
    mean = known.mean(1, keepdim=True).float().double()  # the kernel subtracts it in float32
    reach = radius(entries).reshape(books, 1, 1)
    # frexp gives [0.5, 1) * 2^e; e - 1 brings the radius into [1, 2), and a book of equal entries has none.
    exponent = (1 - torch.frexp(reach).exponent).clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    scale = torch.where(reach == 0, 1.0, torch.exp2(exponent.double()))
    centred = (known - mean) * scale
    high, low = _halves(centred)
    square_high, square_low = _halves(centred.square().sum(-1, keepdim=True) / 2)
    table = torch.zeros(books, NUM_CODES, _TERMS, dtype=torch.float16, device=entries.device)
    ones = torch.ones_like(square_high)
    factors = torch.cat([-high, -high, -low, ones, ones, square_high, square_low], -1)
    table[:, :count, : factors.shape[-1]] = factors
    table[:, count:, 3 * size : 3 * size + 2] = 1.0
    table[:, count:, 3 * size + 2] = _NOWHERE
    exact = torch.full((books, NUM_CODES, size), torch.inf, dtype=torch.float32, device=entries.device)
    exact[:, :count] = entries.reshape(books, count, size)
    exact = exact.reshape(books, NUM_CODES // classes, classes, size).transpose(1, 2).contiguous()
    frame = torch.cat([mean.reshape(books, size), scale.reshape(books, 1)], 1).float()
    return PreparedEntries(entries, table, frame, exact)


def radius(entries: Tensor) -> Tensor:
    """Return the largest distance of an entry's coordinate from the mean of its book: float64 [heads, groups]."""
    known = entries.double()
    return (known - known.mean(2, keepdim=True).float().double()).abs().amax((2, 3))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.half()
    return high, (x - high.double()).half()


@triton.jit
def _columns(tile, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the columns of [BLOCK, COUNT] as a tuple, in order."""
    if COUNT == 1:
        return (tl.reshape(tile, [BLOCK]),)
    else:  # noqa: RET505 - Triton compiles what follows a return, but not the other branch of a constant
        first, second = tl.split(tl.permute(tl.reshape(tile, [BLOCK, 2, COUNT // 2]), (0, 2, 1)))
        return _columns(first, COUNT // 2, BLOCK) + _columns(second, COUNT // 2, BLOCK)


@triton.jit
def _split_halves(x):
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _stack8(a, b, c, d, e, f, g, h):
    """Return [BLOCK, 2, 2, 2]: the arguments in order along the last three axes, the last of them counting ones."""
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def _centred(x, mean, scale):
    # Finite, however far: infinity times the zero that pulls it nearer would be NaN.
    return tl.clamp((x - tl.load(mean)) * scale, -1e30, 1e30)


@triton.jit
def _nearer(most):
    """Return the factor that pulls far vectors towards the mean, to 128 where entries lie within 2.

    Half of their square then stays below float16's last finite number, and which entry is nearest hardly changes.
    """
    return 128.0 / tl.maximum(most, 128.0)


@triton.jit
def _lower(best, score, TIMES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the least of `best` [BLOCK, WIDTH] and all of `score` [BLOCK, TIMES * WIDTH], column by column modulo WIDTH."""
    if TIMES == 1:
        return tl.minimum(best, tl.reshape(score, [BLOCK, WIDTH]))
    elif TIMES == 2:  # noqa: RET505
        first, second = tl.split(tl.permute(tl.reshape(score, [BLOCK, 2, WIDTH]), (0, 2, 1)))
        return tl.minimum(tl.minimum(first, second), best)
    else:
        first, second = tl.split(tl.permute(tl.reshape(score, [BLOCK, 2, TIMES // 2, WIDTH]), (0, 2, 3, 1)))
        return _lower(_lower(best, first, TIMES // 2, BLOCK, WIDTH), second, TIMES // 2, BLOCK, WIDTH)


@triton.jit
def _scores(left, table, first, COLUMNS: tl.constexpr):
    """Return half of the squared distances to entries [first, first + COLUMNS) as the integers of their bits."""
    entry = first + tl.arange(0, COLUMNS)
    right = tl.load(table + entry[None, :] * 16 + tl.arange(0, 16)[:, None])
    return tl.dot(left, right).to(tl.int32, bitcast=True)


@triton.jit
def _nearest(
    x, frame, table, exact, VECTOR: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """Return the index of the nearest entry of one book for the vectors whose coordinates are the tuple `x`."""
    scale = tl.load(frame + VECTOR)
    zero = tl.zeros([BLOCK], tl.float16)
    one = tl.full([BLOCK], 1.0, tl.float16)
    if VECTOR == 2:
        y0, y1 = _centred(x[0], frame, scale), _centred(x[1], frame + 1, scale)
        near = _nearer(tl.maximum(tl.abs(y0), tl.abs(y1)))
        y0, y1 = y0 * near, y1 * near
        h0, l0 = _split_halves(y0)
        h1, l1 = _split_halves(y1)
        high, low = _split_halves(0.5 * (y0 * y0 + y1 * y1))
        # In order: h0 h1 l0 l1 h0 h1 high low 1 1 0 0 0 0 0 0; neighbours go to the two halves of the join.
        even = _stack8(h0, l0, h0, high, one, zero, zero, zero)
        odd = _stack8(h1, l1, h1, low, one, zero, zero, zero)
    else:
        y0, y1 = _centred(x[0], frame, scale), _centred(x[1], frame + 1, scale)
        y2, y3 = _centred(x[2], frame + 2, scale), _centred(x[3], frame + 3, scale)
        most = tl.maximum(tl.maximum(tl.abs(y0), tl.abs(y1)), tl.maximum(tl.abs(y2), tl.abs(y3)))
        near = _nearer(most)
        y0, y1, y2, y3 = y0 * near, y1 * near, y2 * near, y3 * near
        h0, l0 = _split_halves(y0)
        h1, l1 = _split_halves(y1)
        h2, l2 = _split_halves(y2)
        h3, l3 = _split_halves(y3)
        high, low = _split_halves(0.5 * (y0 * y0 + y1 * y1 + (y2 * y2 + y3 * y3)))
        even = _stack8(h0, h2, l0, l2, h0, h2, high, one)
        odd = _stack8(h1, h3, l1, l3, h1, h3, low, one)
    left = tl.reshape(tl.join(even, odd), [BLOCK, 16])

    if CLASSES <= COLUMNS:
        best = tl.full([BLOCK, CLASSES], 0x7F800000, tl.int32)
        for first in tl.static_range(0, 256, COLUMNS):
            best = _lower(best, _scores(left, table, first, COLUMNS), COLUMNS // CLASSES, BLOCK, CLASSES)
        key = (best & -CLASSES) | tl.arange(0, CLASSES)[None, :]
    else:
        key = tl.full([BLOCK, 16], 0x7F800000, tl.int32)
        for first in tl.static_range(0, CLASSES, COLUMNS):
            best = _scores(left, table, first, COLUMNS)
            for later in tl.static_range(CLASSES, 256, CLASSES):
                best = tl.minimum(best, _scores(left, table, later + first, COLUMNS))
            named = (best & -CLASSES) | (first + tl.arange(0, COLUMNS))[None, :]
            key = _lower(key, named, COLUMNS // 16, BLOCK, 16)
    chosen = tl.min(key, 1) & (CLASSES - 1)
    if CLASSES == 256:
        return chosen
    else:  # noqa: RET505
        MEMBERS: tl.constexpr = 256 // CLASSES
        start = exact + chosen * (MEMBERS * VECTOR)
        members = tl.load(start[:, None] + tl.arange(0, MEMBERS * VECTOR)[None, :])
        if VECTOR == 2:
            e0, e1 = tl.split(tl.reshape(members, [BLOCK, MEMBERS, 2]))
            d0, d1 = x[0][:, None] - e0, x[1][:, None] - e1
            distance = d0 * d0 + d1 * d1
        else:
            even, odd = tl.split(tl.reshape(members, [BLOCK, MEMBERS, 2, 2]))
            e0, e2 = tl.split(even)
            e1, e3 = tl.split(odd)
            d0, d1, d2, d3 = x[0][:, None] - e0, x[1][:, None] - e1, x[2][:, None] - e2, x[3][:, None] - e3
            distance = d0 * d0 + d1 * d1 + (d2 * d2 + d3 * d3)
        member = (distance.to(tl.int32, bitcast=True) & -MEMBERS) | tl.arange(0, MEMBERS)[None, :]
        return (tl.min(member, 1) & (MEMBERS - 1)) * CLASSES + chosen


@triton.jit(do_not_specialize=["rows", "seq", "blocks", "last"])
def _encode_kernel(
    x, batch_stride, head_stride, token_stride, frame, table, exact, codes, rows, seq, heads, groups, blocks, last,
    VECTOR: tl.constexpr, BOOKS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    book = tl.program_id(1) * BOOKS
    head, group = book // groups, book % groups
    frame += book * (VECTOR + 1)
    table += book * (256 * 16)
    exact += book * (256 * VECTOR)
    for block in range(tl.program_id(0) * blocks, tl.minimum((tl.program_id(0) + 1) * blocks, tl.cdiv(rows, BLOCK))):
        row = block * BLOCK + tl.arange(0, BLOCK)
        batch, token = (row // seq).to(tl.int64), (row % seq).to(tl.int64)
        here = row < rows
        start = x + batch * batch_stride + head * head_stride + token * token_stride + group * VECTOR
        tile = tl.load(start[:, None] + tl.arange(0, BOOKS * VECTOR)[None, :], mask=here[:, None], other=0.0)
        columns = _columns(tile.to(tl.float32), BOOKS * VECTOR, BLOCK)
        packed = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(BOOKS):
            if VECTOR == 2:
                vector = (columns[2 * i], columns[2 * i + 1])
            else:
                vector = (columns[4 * i], columns[4 * i + 1], columns[4 * i + 2], columns[4 * i + 3])  # type: ignore[assignment]
            code = _nearest(
                vector, frame + i * (VECTOR + 1), table + i * (256 * 16), exact + i * (256 * VECTOR),
                VECTOR, BLOCK, COLUMNS, CLASSES,
            )  # fmt: skip
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
    head, group = book // groups, book % groups
    entries += book.to(tl.int64) * count * VECTOR
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch, token = (row // seq).to(tl.int64), (row % seq).to(tl.int64)
    here = row < rows
    start = x + batch * batch_stride + head * head_stride + token * token_stride + group * VECTOR
    tile = tl.load(start[:, None] + tl.arange(0, VECTOR)[None, :], mask=here[:, None], other=0.0)
    vector = _columns(tile.to(tl.float32), VECTOR, BLOCK)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    code = tl.zeros([BLOCK], tl.int32)
    for entry in range(count):
        distance = tl.zeros([BLOCK], tl.float32)
        for channel in tl.static_range(VECTOR):
            apart = vector[channel] - tl.load(entries + entry * VECTOR + channel)
            distance += apart * apart
        code = tl.where(distance < least, entry, code)
        least = tl.minimum(distance, least)
    tl.store(codes + ((batch * heads + head) * seq + token) * groups + group, code.to(tl.uint8), mask=here)


#: Whether TRITON_INTERPRET was set when this module was imported: the kernel then runs on the CPU, slowly.
INTERPRETED = not isinstance(_encode_kernel, triton.runtime.JITFunction)
#: Books of a program -> what holds their codes.
_PACKS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def encode(x: Tensor, prepared: PreparedEntries, tiling: Tiling = TILING) -> Tensor:
    """Return the codes of `x`; see `wqlab.ops.cq_encode.encode`, which also checks the arguments.

    Parameters
    ----------
    x : Tensor
        [batch, heads, seq, head_dim] on a CUDA device (or anywhere in the interpreter).
    prepared : PreparedEntries
        Codebooks on the same device, with the classes of `tiling`.
    tiling : Tiling
        How the kernel is compiled.

    Returns
    -------
    Tensor
        uint8 [batch, heads, seq, groups], contiguous.
    """
    codes = torch.empty((*x.shape[:3], prepared.entries.shape[1]), dtype=torch.uint8, device=x.device)
    encode_into(codes, x, prepared, tiling)
    return codes


def encode_into(codes: Tensor, x: Tensor, prepared: PreparedEntries, tiling: Tiling = TILING) -> None:
    """Write the codes of `x` into `codes`, contiguous; as `encode`, without allocations where rows of `x` are contiguous.

    Raises
    ------
    ParameterError
        When the codebooks were prepared for other classes than the tiling's.
    """
    if prepared.classes != tiling.classes:
        raise ParameterError(f"the codebooks were prepared for {prepared.classes} classes, the tiling has {tiling.classes}")
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
    with torch.cuda.device(x.device if x.is_cuda else -1):
        _encode_kernel[(triton.cdiv(all_blocks, blocks), sets)](
            x, *x.stride()[:3], prepared.frame, prepared.table, prepared.exact, codes.view(_PACKS[books]), rows, seq, heads, groups,
            blocks, count - 1, VECTOR=size, BOOKS=books, BLOCK=tiling.block, COLUMNS=tiling.columns, CLASSES=tiling.classes,
            num_warps=tiling.num_warps, num_stages=1,
        )  # fmt: skip


def encode_plainly(codes: Tensor, x: Tensor, entries: Tensor, block: int = 128) -> None:
    """Write the codes of `x` into `codes` without tensor cores, in float32 from differences; the lowest index of equally near ones.

    What `wqlab bench cq_encode` compares the kernel with. Arguments as of `reference.encode` and `encode_into`, contiguous.
    """
    batch, heads, seq, _ = x.shape
    _, groups, count, size = entries.shape
    with torch.cuda.device(x.device if x.is_cuda else -1):
        _plain_kernel[(triton.cdiv(batch * seq, block), heads * groups)](
            x, *x.stride()[:3], entries, codes, batch * seq, seq, heads, groups, count, VECTOR=size, BLOCK=block, num_warps=4
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
