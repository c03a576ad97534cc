"""Attention over windows that stay in the order of the video, widths interleaved: what reordering is measured against (Table 8, C).

`interleave` lays a cache's windows out like that; `prepared` reads them in one launch through a table of places and widths,
`prepared_runs` with one launch per run of equal widths. Both run ``kernels/mixed_decode_in_place.cu.j2``, whose arithmetic and
pipeline are those of `mixed_decode`. For measuring: every row has all windows, of 32 tokens each, and one plan, as WindowQuant's
vote makes it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wqlab import codegen
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import fragments
from wqlab.ops.mixed_decode import cuda_kernel
from wqlab.ops.mixed_decode.operands import FragmentSegment, MixedKV, Segment

_LOG2E = 1.4426950408889634
_ROWS = 8
#: Places in the pool are counted in steps of so many bytes.
_STEP = 512
_KINDS = {4: 0, 2: 1, 16: 2}
_DENSE_UNIT = 8
#: Warps of a program that takes a whole table, and of one that takes a run.
_WARPS, _RUN_WARPS = 16, 8
_Pointer, _Long, _Int = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the kernel; strides in bytes."""

    _fields_ = (
        ("query", _Pointer), ("query_batch", _Long), ("query_head", _Long), ("query_token", _Long), ("pool", _Pointer),
        ("pool_head", _Long), ("table", _Pointer), ("first", _Pointer), ("output", _Pointer), ("partial", _Pointer),
        ("arrived", _Pointer), ("kv_heads", _Int), ("group", _Int), ("q_len", _Int), ("slots", _Int), ("first_slot", _Int),
        ("arrivals", _Int), ("accumulate", _Int), ("scaling", ctypes.c_float),
    )  # fmt: skip


class Interleaved(NamedTuple):
    """Windows of 32 tokens in the order of the video.

    Parameters
    ----------
    pool : Tensor
        uint8 [batch, kv_heads, bytes]: window after window; codes and metadata of a packed one, keys and values of a dense one.
    widths : tuple of int
        Bits of each window: 16, 4 or 2.
    head_dim : int
        Channels per head.
    """

    pool: Tensor
    widths: tuple[int, ...]
    head_dim: int

    @property
    def runs(self) -> int:
        """Runs of equal widths."""
        return sum(1 for _ in itertools.groupby(self.widths))


class Unit(NamedTuple):
    """What a warp takes at once: a packed window, or eight dense tokens; where it begins in the pool of a head, and its bytes."""

    offset: int
    bits: int
    size: int


class Launch(NamedTuple):
    """Arguments and grid of one launch."""

    arguments: Arguments
    grid: tuple[int, int, int]


class Call(NamedTuple):
    """The launches that make an output, in lanes that may run at once, and all tensors that must outlive them."""

    lanes: tuple[tuple[Launch, ...], ...]
    tiling: cuda_kernel.Tiling
    output: Tensor
    kept: tuple[Tensor, ...]

    @property
    def launches(self) -> int:
        """Of all lanes."""
        return sum(map(len, self.lanes))


class Prepared(NamedTuple):
    """A call whose kernel is loaded, to be repeated and recorded; calls of one must not overlap."""

    call: Call
    kernel: Any
    streams: tuple[torch.cuda.Stream, ...]

    def launch(self) -> Tensor:
        """Queue all launches on torch's current stream, lanes after the first on streams beside it, and return the output."""
        current = torch.cuda.current_stream(self.call.output.device)
        for stream in self.streams:  # before anything is launched, so that no lane waits for another
            stream.wait_stream(current)
        for lane, stream in zip(self.call.lanes, (current, *self.streams), strict=True):
            for one in lane:
                self.kernel.launch(
                    stream, one.grid, (32 * self.call.tiling.num_warps,), self.call.tiling.shared_bytes, one.arguments
                )
        for stream in self.streams:
            current.wait_stream(stream)
        return self.call.output


def interleave(cache: MixedKV, widths: Sequence[int]) -> Interleaved:
    """Return the windows of a reordered cache in another order.

    Parameters
    ----------
    cache : MixedKV
        Windows of 32 tokens in fragment order and a dense segment, without lengths, masks and tail.
    widths : sequence of int
        Bits of the windows in the order of the video; the first one of 4 bits is the first of that segment, and so on.

    Raises
    ------
    ParameterError, UnsupportedError
        When the widths are not those of the cache, or it holds anything else.
    """
    parts: dict[int, Tensor] = {}
    for segment in cache.all():
        plain = segment.lengths is None and segment.mask is None and segment is not cache.tail
        size = (*segment.shape[:2], segment.tokens // fragments.BLOCK, -1)
        if isinstance(segment, FragmentSegment) and segment.window_size == fragments.BLOCK and plain:
            parts[segment.num_bits] = torch.cat([segment.codes, segment.meta.view(torch.uint8)], dim=-1)
        elif isinstance(segment, Segment) and isinstance(segment.key, Tensor) and segment.tokens % fragments.BLOCK == 0 and plain:
            assert isinstance(segment.value, Tensor)
            parts[16] = torch.cat([x.half().reshape(size).view(torch.uint8) for x in (segment.key, segment.value)], dim=-1)
        else:
            raise UnsupportedError("in place are whole windows of 32 tokens, in fragment order or dense, that every row has")
    counts = {bits: part.shape[2] for bits, part in parts.items() if part.shape[2]}
    if counts != {bits: list(widths).count(bits) for bits in set(widths)}:
        raise ParameterError(f"the cache holds {counts} windows by their bits, and {len(widths)} widths do not name the same")
    taken = dict.fromkeys(parts, 0)
    windows = []
    for bits in widths:
        windows.append(parts[bits][:, :, taken[bits]])
        taken[bits] += 1
    return Interleaved(torch.cat(windows, dim=-1).contiguous(), tuple(widths), cache.head_dim)


def in_order(kv: Interleaved) -> MixedKV:
    """Return the same windows as segments in the order of the video, one per run of equal widths, for other backends."""
    segments: list[Segment | FragmentSegment] = []
    windows = zip(kv.widths, units_of(kv), strict=True)
    for bits, run in itertools.groupby(windows, key=lambda pair: pair[0]):
        units = [units for _, units in run]
        first, last = units[0][0], units[-1][-1]
        if bits == 16:
            size, end = (len(units), 2, fragments.BLOCK, kv.head_dim), first.offset + len(units) * 4 * fragments.BLOCK * kv.head_dim
            sides = kv.pool[:, :, first.offset : end].contiguous().view(torch.float16).reshape(*kv.pool.shape[:2], *size)
            shape = (*kv.pool.shape[:2], len(units) * fragments.BLOCK, kv.head_dim)
            segments.append(Segment(*(sides[:, :, :, side].reshape(shape) for side in (0, 1))))
        else:
            parts = kv.pool[:, :, first.offset : last.offset + last.size].reshape(*kv.pool.shape[:2], len(units), last.size)
            cut = fragments.code_bytes(bits, kv.head_dim)
            codes, meta = parts[..., :cut].contiguous(), parts[..., cut:].contiguous().view(torch.float16)
            segments.append(FragmentSegment(codes, meta, bits, fragments.BLOCK, kv.head_dim))
    return MixedKV(tuple(segments))


def units_of(kv: Interleaved) -> list[list[Unit]]:
    """Return the units of every window, in the order of the video."""
    windows, at = [], 0
    packed = {bits: fragments.code_bytes(bits, kv.head_dim) + 8 * kv.head_dim for bits in (4, 2)}
    row = 2 * kv.head_dim
    for bits in kv.widths:
        if bits == 16:  # keys of 32 tokens, then values
            starts = range(0, fragments.BLOCK, _DENSE_UNIT)
            windows.append([Unit(at + token * row, 16, 2 * _DENSE_UNIT * row) for token in starts])
            at += 2 * fragments.BLOCK * row
        else:
            windows.append([Unit(at, bits, packed[bits])])
            at += packed[bits]
    return windows


def prepare(
    query: Tensor,
    kv: Interleaved,
    scaling: float,
    multiprocessors: int,
    shared_limit: int,
    order: Literal["video", "width"] = "video",
    num_splits: int | None = None,
) -> Call:
    """Return one launch over the whole table; see `prepared`."""
    units = [unit for window in units_of(kv) for unit in window]
    pairs = query.shape[0] * kv.pool.shape[1]
    tiles = pairs * _row_tiles(query, kv)
    if num_splits is None:
        sizes = [unit.size for unit in units]
        num_warps, num_splits = cuda_kernel._plan(tiles, len(units), sum(sizes), multiprocessors)
    else:
        num_warps = _WARPS
    tiling = cuda_kernel.choose(kv.head_dim, (2, 4), True, shared_limit, num_warps)
    if order == "video":
        programs = _parts(units, num_splits)
    else:  # what lies where it was is read width by width, and every program has its part of each, as of a reordered cache
        widths = [[unit for unit in units if unit.bits == bits] for bits in _KINDS]
        programs = [list(itertools.chain(*parts)) for parts in zip(*(_parts(own, num_splits) for own in widths), strict=True)]
    return _call(query, kv, scaling, tiling, [[programs]])


def prepare_runs(
    query: Tensor, kv: Interleaved, scaling: float, shared_limit: int, num_splits: int = 1, num_lanes: int = 1
) -> Call:
    """Return one launch per run of equal widths; see `prepared_runs`."""
    windows = zip(kv.widths, units_of(kv), strict=True)
    runs = [[unit for _, window in run for unit in window] for _, run in itertools.groupby(windows, key=lambda pair: pair[0])]
    tiling = cuda_kernel.choose(kv.head_dim, (2, 4), True, shared_limit, _RUN_WARPS)
    num_lanes = min(num_lanes, len(runs))
    pieces = [_parts(run, num_splits) for run in runs]
    return _call(query, kv, scaling, tiling, [pieces[lane::num_lanes] for lane in range(num_lanes)])


def prepared(query: Tensor, kv: Interleaved, scaling: float, order: Literal["video", "width"] = "video") -> Prepared:
    """Return attention as one launch over all windows.

    Parameters
    ----------
    query : Tensor
        float16 [batch, num_heads, q_len, head_dim], contiguous.
    kv : Interleaved
        The windows, every one seen by every query.
    scaling : float
        Factor of the scores before softmax.
    order : {"video", "width"}
        Of the table: that of the windows in memory, or those of a width after each other.

    Raises
    ------
    ParameterError
        When query and windows do not fit.
    """
    properties = torch.cuda.get_device_properties(query.device)
    limit = properties.shared_memory_per_multiprocessor - cuda_kernel._RESERVED_BYTES
    call = prepare(query, kv, scaling, properties.multi_processor_count, limit, order)
    return _ready(call, query.device)


def prepared_runs(query: Tensor, kv: Interleaved, scaling: float, num_splits: int = 1, num_lanes: int = 1) -> Prepared:
    """Return attention as one launch per run of equal widths; the last program of all merges their partial results.

    Parameters
    ----------
    query, kv, scaling
        As of `prepared`.
    num_splits : int
        Programs that share a KV head's part of a run.
    num_lanes : int
        Streams on which runs are launched side by side; those of one add up in the same partial results.
    """
    properties = torch.cuda.get_device_properties(query.device)
    limit = properties.shared_memory_per_multiprocessor - cuda_kernel._RESERVED_BYTES
    return _ready(prepare_runs(query, kv, scaling, limit, num_splits, num_lanes), query.device)


def source(tiling: cuda_kernel.Tiling) -> str:
    """Return the CUDA C++ of a tiling."""
    return codegen.render("mixed_decode_in_place", **tiling._asdict())


def _call(query: Tensor, kv: Interleaved, scaling: float, tiling: cuda_kernel.Tiling, lanes: list[list[list[list[Unit]]]]) -> Call:
    """Return the launches of lanes: of each launch the units of its programs, as many of them in every launch."""
    batch, num_heads, q_len, head_dim = query.shape
    device, kv_heads = query.device, kv.pool.shape[1]
    row_tiles = _row_tiles(query, kv)
    if not query.is_contiguous() or query.dtype != torch.float16:
        raise ParameterError(f"the query must be contiguous and float16, not {query.dtype} with strides {query.stride()}")
    num_splits = len(lanes[0][0])
    tiles, slots = batch * kv_heads * row_tiles, num_splits * len(lanes)
    pieces = [piece for lane in lanes for piece in lane]
    entries = [unit.offset // _STEP * 4 + _KINDS[unit.bits] for piece in pieces for units in piece for unit in units]
    starts = list(itertools.accumulate((sum(map(len, piece)) for piece in pieces), initial=0))
    firsts = [_firsts(piece, tiling.num_warps) for piece in pieces]
    table = torch.tensor(entries, dtype=torch.int32, device=device)
    first = torch.tensor(firsts, dtype=torch.int32, device=device)
    output = torch.empty_like(query)
    partial = torch.empty(tiles * slots * _ROWS * (head_dim + 4), dtype=torch.float32, device=device)
    arrived = torch.zeros(tiles, dtype=torch.int32, device=device)
    grid = (batch * kv_heads, num_splits, row_tiles)
    number = itertools.count()

    def launch(lane: int, place: int) -> Launch:
        piece = next(number)
        x = Arguments(
            query=query.data_ptr(), pool=kv.pool.data_ptr(), pool_head=kv.pool.shape[2], table=table[starts[piece] :].data_ptr(),
            first=first[piece].data_ptr(), output=output.data_ptr(), partial=partial.data_ptr(), arrived=arrived.data_ptr(),
            kv_heads=kv_heads, group=num_heads // kv_heads, q_len=q_len, slots=slots, first_slot=lane * num_splits,
            arrivals=len(pieces) * num_splits, accumulate=int(place > 0), scaling=scaling * _LOG2E,
        )  # fmt: skip
        x.query_batch, x.query_head, x.query_token = (2 * stride for stride in query.stride()[:3])
        return Launch(x, grid)

    launches = tuple(tuple(launch(lane, place) for place in range(len(runs))) for lane, runs in enumerate(lanes))
    return Call(launches, tiling, output, (query, kv.pool, table, first, output, partial, arrived))


def _ready(call: Call, device: torch.device) -> Prepared:
    streams = tuple(torch.cuda.Stream(device) for _ in call.lanes[1:])  # type: ignore[no-untyped-call]
    major, minor = torch.cuda.get_device_capability(device)
    return Prepared(call, _kernel(call.tiling, f"sm_{major}{minor}", device), streams)


@functools.cache
def _kernel(tiling: cuda_kernel.Tiling, arch: str, device: torch.device) -> Any:
    return codegen.load(codegen.compile_cubin(source(tiling), arch=arch), "mixed_decode_in_place", device)


def _parts(units: list[Unit], parts: int) -> list[list[Unit]]:
    """Cut units into so many parts of about the same bytes."""
    firsts = _shares([unit.size for unit in units], parts)
    return [units[first:end] for first, end in itertools.pairwise(firsts)]


def _firsts(programs: list[list[Unit]], num_warps: int) -> list[int]:
    """Return the first unit of every warp of every program, counted through all of them, and one past the last."""
    firsts, before = [], 0
    for units in programs:
        firsts += [before + first for first in _shares([unit.size for unit in units], num_warps)[:-1]]
        before += len(units)
    return [*firsts, before]


def _shares(sizes: list[int], parts: int) -> list[int]:
    """Return the first unit of each of so many parts of about the same bytes, and one past the last."""
    total, before, firsts = sum(sizes), 0, [0]
    for number, size in enumerate(sizes):
        before += size
        while len(firsts) < parts and before * parts >= total * len(firsts):
            firsts.append(number + 1)
    return firsts + [len(sizes)] * (parts + 1 - len(firsts))


def _row_tiles(query: Tensor, kv: Interleaved) -> int:
    batch, num_heads, q_len, head_dim = query.shape
    if (batch, head_dim) != (kv.pool.shape[0], kv.head_dim) or num_heads % kv.pool.shape[1]:
        raise ParameterError(f"query {list(query.shape)} does not fit a pool {list(kv.pool.shape)} of head_dim {kv.head_dim}")
    return -(-(num_heads // kv.pool.shape[1]) * q_len // _ROWS)
