"""The fast path of `mixed_decode`: one launch of ``kernels/mixed_decode.cu.j2`` over all widths of every row, combine included."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wqlab import codegen
from wqlab.errors import ParameterError
from wqlab.layouts import fragments
from wqlab.ops.mixed_decode.operands import FragmentSegment, MixedKV, Segment
from wqlab.types import QuantSpec

HEAD_DIMS = fragments.HEAD_DIMS
#: Oldest architecture with cp.async and mma.m16n8k16.
MIN_CAPABILITY = (8, 0)
#: Architectures on which its tests have passed. On others it runs when it is asked for by name.
TESTED: frozenset[tuple[int, int]] = frozenset({(9, 0)})
_LOG2E = 1.4426950408889634
#: Query rows of a program: the columns of a tensor-core tile.
_ROWS = 8
_DENSE_UNIT = 8
#: Shared memory of a multiprocessor that is left for its other needs.
_RESERVED_BYTES = 2048
#: Warps of a multiprocessor, at 128 registers a thread; programs of 16 merge more within them, programs of 8 fill odd grids better.
_RESIDENT_WARPS = 16
_WARPS = (16, 8)
_MOST_SPLITS = 256
#: What `_plan` weighs, of an H200: microseconds before a program's first unit arrives, microseconds to merge one more split, and
#: bytes per microsecond.
_START_US, _SPLIT_US, _RATE = 3.0, 0.06, 4.0e6

#: (device, stream, whether it was being recorded) -> (id of the recording or 0, counters of arrived programs). See `_counters`.
_arrived: dict[tuple[torch.device, int, bool], tuple[int, Tensor]] = {}

_Pointer, _Long, _Int = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class Packed(ctypes.Structure):
    """``struct Packed`` of the kernel."""

    _fields_ = (
        ("codes", _Pointer), ("meta", _Pointer), ("lengths", _Pointer), ("mask", _Pointer), ("mask_batch", _Long),
        ("num_windows", _Int), ("blocks_per_window", _Int),
    )  # fmt: skip


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the kernel; strides in bytes."""

    _fields_ = (
        ("query", _Pointer), ("query_batch", _Long), ("query_head", _Long), ("query_token", _Long),
        ("key", _Pointer), ("value", _Pointer), ("key_batch", _Long), ("key_head", _Long),
        ("value_batch", _Long), ("value_head", _Long),
        ("last", _Pointer), ("mask", _Pointer), ("mask_batch", _Long), ("four", Packed), ("two", Packed),
        ("output", _Pointer), ("partial", _Pointer), ("arrived", _Pointer),
        ("batch", _Int), ("kv_heads", _Int), ("group", _Int), ("q_len", _Int), ("dense_tokens", _Int),
        ("key_token", _Int), ("value_token", _Int), ("scaling", ctypes.c_float),
    )  # fmt: skip


class Tiling(NamedTuple):
    """How a kernel is compiled; the template's parameters.

    Parameters
    ----------
    head_dim : int
        Channels per head.
    num_warps : int
        Of a program.
    num_stages : int
        Units of a warp that are on their way or in use.
    slot_bytes : int
        Of the largest unit that occurs.
    """

    head_dim: int
    num_warps: int
    num_stages: int
    slot_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a program: the warps' slots, later their results, and a few things beside them."""
        slots = self.num_warps * self.num_stages * self.slot_bytes
        results = 4 * _ROWS * max(self.num_warps * (self.head_dim + 4), 2 * _MOST_SPLITS)
        return max(slots, results) + _other_bytes(self.head_dim, self.num_warps)


class Call(NamedTuple):
    """One launch: arguments, grid and all tensors that must outlive it."""

    arguments: Arguments
    tiling: Tiling
    grid: tuple[int, int, int]
    output: Tensor
    kept: tuple[Tensor, ...]


class Prepared(NamedTuple):
    """A launch whose arguments are ready, to be repeated without host work or allocations; made by `prepared`.

    Parameters
    ----------
    call : Call
        Its ``output`` is where every launch writes, ``grid[1]`` the number of splits.
    kernel : wqlab.codegen.load.Kernel
        Loaded on the device of the call.
    """

    call: Call
    kernel: Any

    def launch(self, stream: torch.cuda.Stream | int | None = None) -> Tensor:
        """Queue the kernel on a stream (default: torch's current one) and return the output that it will write.

        A CUDA graph records one kernel. Launches of the same call must not overlap: they share output and workspace.
        """
        call = self.call
        if call.output.numel():
            self.kernel.launch(stream, call.grid, (32 * call.tiling.num_warps,), call.tiling.shared_bytes, call.arguments)
        return call.output


def takes(spec: QuantSpec, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether windows of this kind can lie in fragment order."""
    whole = spec.window_size % fragments.BLOCK == 0 and spec.granularity == "window_channel"
    return whole and spec.num_bits in fragments.BITS and head_dim in HEAD_DIMS and dtype == torch.float16


def refusal(query: Tensor, cache: MixedKV) -> str | None:
    """Return why this kernel cannot serve a call, or None. Where the tensors lie is not asked here."""
    if query.dtype != torch.float16:
        return f"the query is {query.dtype}, and the CUDA kernel computes in float16"
    if cache.head_dim not in HEAD_DIMS:
        return f"head_dim = {cache.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    widths = [s.num_bits for s in cache.segments if isinstance(s, FragmentSegment) and s.tokens]
    dense = [s for s in cache.all() if isinstance(s, Segment) and s.tokens]
    if len(set(widths)) != len(widths):
        return f"there are several segments of {max(widths, key=widths.count)} bits; put them together"
    if len(dense) > 1:
        return f"there are {len(dense)} segments that are not in fragment order; one dense one can be served"
    if not dense:
        return None
    only = dense[0]
    if not (isinstance(only.key, Tensor) and isinstance(only.value, Tensor)):
        return "windows are packed row by row; pack them with FragmentSegment.pack"
    if only.key.dtype != torch.float16 or only.value.dtype != torch.float16:
        return f"dense keys and values are {only.key.dtype} and {only.value.dtype}, and the CUDA kernel computes in float16"
    for name, side in (("keys", only.key), ("values", only.value)):
        if side.stride(3) != 1 or _misplaced(side):
            return f"dense {name} have strides {side.stride()}; rows must be contiguous and start at multiples of 16 bytes"
        if 2 * side.stride(2) >= 2**31:
            return f"dense {name} have strides {side.stride()}; tokens must be less than 2 GiB apart"
    if query.shape[2] > 1 and only is not cache.tail:
        return "several query tokens need a tail that holds their own keys and values"
    return None


def prepare(
    query: Tensor,
    cache: MixedKV,
    scaling: float,
    multiprocessors: int,
    shared_limit: int,
    num_splits: int | None,
    own_counters: bool = False,
) -> Call:
    """Return the launch that serves this call.

    Parameters
    ----------
    query : Tensor
        float16 [batch, num_heads, q_len, head_dim].
    cache : MixedKV
        That `refusal` accepts.
    scaling : float
        Factor of the scores before softmax.
    multiprocessors, shared_limit : int
        Of the device; shared memory in bytes per multiprocessor.
    num_splits : int, optional
        Programs of 16 warps that share a KV head's tokens, at most 256; default: see `_plan`.
    own_counters : bool
        Whether the call shares its counters of arrived programs with no other, so that it may run on any stream and in any
        recorded graph; else they are those of torch's current stream.
    """
    query = query if query.stride(-1) == 1 and not _misplaced(query) else query.contiguous()
    batch, num_heads, q_len, head_dim = query.shape
    kv_heads, device = cache.num_kv_heads, query.device
    group = num_heads // kv_heads
    packed = {s.num_bits: s for s in cache.segments if isinstance(s, FragmentSegment) and s.tokens}
    dense = next((s for s in cache.all() if isinstance(s, Segment) and s.tokens), None)
    pairs, row_tiles = batch * kv_heads, -(-group * q_len // _ROWS)
    tiles = pairs * row_tiles
    counts = [s.codes.shape[2] for s in packed.values()] + ([-(-dense.tokens // _DENSE_UNIT)] if dense is not None else [])
    sizes = [_unit_bytes(bits, head_dim) for bits in packed] + ([_unit_bytes(16, head_dim)] if dense is not None else [])
    num_warps, splits = _plan(tiles, sum(counts), sum(map(operator.mul, counts, sizes)), multiprocessors)
    if num_splits is not None:
        num_warps, splits = _WARPS[0], min(num_splits, _MOST_SPLITS)
    tiling = choose(head_dim, tuple(sorted(packed)), dense is not None, shared_limit, num_warps)

    output = torch.empty((batch, num_heads, q_len, head_dim), dtype=query.dtype, device=device)
    partial = torch.empty(tiles * splits * _ROWS * (head_dim + 4) if splits > 1 else 0, dtype=torch.float32, device=device)
    arrived = torch.zeros(tiles, dtype=torch.int32, device=device) if own_counters else _counters(tiles, device)
    kept = [query, output, partial, arrived, *cache.tensors()]

    def bytes_of(mask: Tensor) -> Tensor:
        kept.append(mask if mask.stride(1) == 1 else mask.contiguous())
        return kept[-1].view(torch.uint8)

    def pointer(x: Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    x = Arguments(
        query=pointer(query), output=pointer(output), partial=pointer(partial), arrived=pointer(arrived),
        batch=batch, kv_heads=kv_heads, group=group, q_len=q_len, scaling=scaling * _LOG2E,
    )  # fmt: skip
    x.query_batch, x.query_head, x.query_token = (2 * stride for stride in query.stride()[:3])
    for num_bits, name in ((4, "four"), (2, "two")):
        s = packed.get(num_bits)
        if s is not None:
            mask = None if s.mask is None else bytes_of(s.mask)
            row = 0 if mask is None else mask.stride(0)
            windows, blocks = s.meta.shape[2], s.window_size // fragments.BLOCK
            at = (pointer(s.codes), pointer(s.meta), pointer(s.lengths), pointer(mask))
            setattr(x, name, Packed(*at, row, windows, blocks))
    if dense is not None:
        key, value = dense.key, dense.value
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        x.dense_tokens, x.key, x.value = dense.tokens, pointer(key), pointer(value)
        x.key_batch, x.key_head, x.key_token = (2 * stride for stride in key.stride()[:3])
        x.value_batch, x.value_head, x.value_token = (2 * stride for stride in value.stride()[:3])
        if dense.lengths is not None:
            last = dense.lengths.contiguous()  # int32 is read where it lies, also by a recorded graph; the kernel limits it
            if last.dtype != torch.int32:
                last = last.clamp(0, dense.tokens).to(torch.int32)
            kept.append(last)
            x.last = pointer(last)
        if dense.mask is not None:
            mask = bytes_of(dense.mask)
            x.mask, x.mask_batch = pointer(mask), mask.stride(0)
    return Call(x, tiling, (pairs, splits, row_tiles), output, tuple(kept))


def attend(query: Tensor, cache: MixedKV, scaling: float, num_splits: int | None = None) -> Tensor:
    """Return attention of `query` over `cache`; see `wqlab.ops.mixed_decode.mixed_decode`, which also checks the arguments.

    A call is one kernel, without a memset. In a CUDA graph that records calls, one memset clears the counters of all of them.
    """
    return _ready(query, cache, scaling, num_splits, own_counters=False).launch()


def prepared(query: Tensor, cache: MixedKV, scaling: float, num_splits: int | None = None) -> Prepared:
    """Return attention of `query` over `cache` as a launch that can be repeated, for graphs and for measuring.

    A launch reads query and cache as they are then. What has to be copied is that of this call's time: `lengths` of dense tokens
    that are not int32, and masks whose rows are not contiguous.

    Parameters
    ----------
    query, cache, scaling
        As of `wqlab.ops.mixed_decode.mixed_decode`; their storage must stay in place. `refusal` must accept them.
    num_splits : int, optional
        Programs that share a KV head's tokens; default: as many as fill the device.

    Raises
    ------
    ParameterError
        For a query that would have to be copied: later values would not be seen.
    """
    ready = _ready(query, cache, scaling, num_splits, own_counters=True)
    if ready.call.kept[0] is not query:
        raise ParameterError(
            f"a prepared launch reads the query where it lies, and one with strides {query.stride()} has no contiguous rows at "
            "multiples of 16 bytes; pass query.contiguous()"
        )
    return ready


def _misplaced(x: Tensor) -> bool:
    """Return whether some rows do not begin at multiples of 16 bytes, as copies need it."""
    return any(stride % 8 for stride in x.stride()[:3]) or x.data_ptr() % 16 != 0


def _ready(query: Tensor, cache: MixedKV, scaling: float, num_splits: int | None, own_counters: bool) -> Prepared:
    device = query.device
    properties = torch.cuda.get_device_properties(device)
    shared_limit = properties.shared_memory_per_multiprocessor - _RESERVED_BYTES
    call = prepare(query, cache, scaling, properties.multi_processor_count, shared_limit, num_splits, own_counters)
    return Prepared(call, _kernel(call.tiling, f"sm_{properties.major}{properties.minor}", device))


def _counters(count: int, device: torch.device) -> Tensor:
    """Return `count` or more counters, zero whenever a launch begins; the kernel counts each back to zero before it ends.

    Launches that may overlap must not share them, so every stream has its own, kept for its next launch. A recorded graph may
    later be replayed beside the stream that it was recorded on: its launches share counters of their own, which live in the
    graph's memory and are cleared when a replay begins.
    """
    stream = recording = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                from cuda.bindings import driver

                recording = int(driver.cuStreamGetCaptureInfo(stream)[2])
    key = device, stream, recording != 0
    known, held = _arrived.get(key, (0, None))
    if held is None or known != recording or held.numel() < count:
        held = torch.zeros(count, dtype=torch.int32, device=device)
        _arrived[key] = recording, held
    return held


def choose(head_dim: int, widths: tuple[int, ...], dense: bool, shared_limit: int, num_warps: int = _WARPS[0]) -> Tiling:
    """Return the tiling for the widths that occur: as many units on their way as fit beside the other programs."""
    units = [_unit_bytes(bits, head_dim) for bits in widths]
    if dense or not units:
        units.append(_unit_bytes(16, head_dim))
    room = shared_limit // (_RESIDENT_WARPS // num_warps) - 1024 - _other_bytes(head_dim, num_warps)
    num_stages = min(max(room // (num_warps * max(units)), 1), 6)
    return Tiling(head_dim, num_warps, num_stages, max(units))


def _other_bytes(head_dim: int, num_warps: int) -> int:
    """Return the shared memory for a program's turn among the splits, each warp's share of the units, and the query."""
    return 16 + 32 * num_warps + _ROWS * 2 * head_dim


def _unit_bytes(num_bits: int, head_dim: int) -> int:
    return 4 * _DENSE_UNIT * head_dim if num_bits == 16 else fragments.code_bytes(num_bits, head_dim) + 8 * head_dim


def source(tiling: Tiling) -> str:
    """Return the CUDA C++ of a tiling."""
    return codegen.render("mixed_decode", **tiling._asdict())


def why_not_here(device: torch.device, by_name: bool, tested: frozenset[tuple[int, int]] = TESTED) -> str | None:
    """Return why a device cannot, or without being asked should not, run a kernel whose tests passed on `tested`; or None."""
    if device.type != "cuda":
        return f"the query lies on {device}, and the kernel needs a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, and the kernel needs 8.0"
    if capability not in tested and not by_name:
        return f"it was not tested on compute capability {'.'.join(map(str, capability))} yet; backend='cuda' runs it"
    if importlib.util.find_spec("cuda") is None:
        return "the package cuda-core is not installed; pip install 'wqlab[gpu]'"
    return None


@functools.cache
def _kernel(tiling: Tiling, arch: str, device: torch.device) -> Any:
    return codegen.load(codegen.compile_cubin(source(tiling), arch=arch), "mixed_decode", device)


def _plan(tasks: int, units: int, num_bytes: int, multiprocessors: int) -> tuple[int, int]:
    """Return the warps of a program and into how many of them each of `tasks` is cut.

    Parameters
    ----------
    tasks : int
        KV heads of all rows, times the tiles of query rows.
    units, num_bytes : int
        What one task reads.
    multiprocessors : int
        Of the device.
    """

    def time(choice: tuple[int, int]) -> float:
        num_warps, splits = choice
        places = multiprocessors * (_RESIDENT_WARPS // num_warps)
        waves = math.ceil(tasks * splits / places)
        each = units / (splits * num_warps)
        uneven = math.ceil(each) / each if each else 1.0
        return waves * (_START_US + uneven * num_bytes / splits * places / _RATE) + _SPLIT_US * splits

    choices = []
    for num_warps in _WARPS:
        most = -(-2 * multiprocessors * (_RESIDENT_WARPS // num_warps) // max(tasks, 1))
        most = max(min(most, units // num_warps, _MOST_SPLITS), 1)
        choices += [(num_warps, splits) for splits in range(1, most + 1)]
    return min(choices, key=time)
