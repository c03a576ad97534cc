"""Packed windows back to halfs in memory: the first half of an unfused decode step (WindowQuant, Table 9).

`prepared` is one launch of ``kernels/dequantize.cu.j2`` over the widths of a layer; `decode_into` does the same in plain torch,
equal to the bit. `mixed_decode` needs neither: it decodes where it computes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wqlab import codegen
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitpack, fragments
from wqlab.ops.mixed_decode import cuda_kernel, reference
from wqlab.ops.mixed_decode.operands import FragmentSegment, MixedKV, Segment

#: Threads that a multiprocessor holds at once, with 64 registers each.
_RESIDENT_THREADS = 1024
#: Bytes of a block that keep their banks in shared memory, and those that follow them there as padding.
_RUN, _PADDING = 512, 16
_Pointer, _Long, _Int = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class Packed(ctypes.Structure):
    """``struct Packed`` of the kernel."""

    _fields_ = (
        ("codes", _Pointer), ("meta", _Pointer), ("places", _Pointer), ("meta_places", _Pointer), ("num_windows", _Int),
        ("blocks_per_window", _Int), ("first_token", _Int),
    )  # fmt: skip


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the kernel; strides in bytes."""

    _fields_ = (
        ("four", Packed), ("two", Packed), ("key", _Pointer), ("value", _Pointer), ("key_batch", _Long), ("key_head", _Long),
        ("key_token", _Long), ("value_batch", _Long), ("value_head", _Long), ("value_token", _Long), ("key_out", _Pointer),
        ("value_out", _Pointer), ("out_batch", _Long), ("out_head", _Long), ("batch", _Int), ("kv_heads", _Int),
        ("dense_tokens", _Int), ("dense_first", _Int),
    )  # fmt: skip


class Call(NamedTuple):
    """One launch: arguments, grid, shared memory, and all tensors that must outlive it."""

    arguments: Arguments
    grid: tuple[int]
    threads: int
    shared_bytes: int
    kept: tuple[Tensor, ...]


class Prepared(NamedTuple):
    """A launch whose arguments are ready; made by `prepared`."""

    call: Call
    kernel: Any

    def launch(self, stream: torch.cuda.Stream | int | None = None) -> None:
        """Queue the kernel on a stream, by default torch's current one."""
        self.kernel.launch(stream, self.call.grid, (self.call.threads,), self.call.shared_bytes, self.call.arguments)


def decode_into(cache: MixedKV, key: Tensor, value: Tensor, copy_dense: bool = True) -> None:
    """Write all tokens of a cache, segment by segment in its order, as they decode; in plain torch.

    Parameters
    ----------
    cache : MixedKV
        What it lacks (`lengths`, `mask`) is written like all else.
    key, value : Tensor
        float16 [batch, kv_heads, tokens, head_dim], of as many tokens as the cache holds.
    copy_dense : bool
        Whether tokens that are not packed are written too; where they already lie in `key` and `value`, they need not be.
    """
    _check(cache, key, value)
    first = 0
    for segment in cache.all():
        for side, out in ((segment.key, key), (segment.value, value)):
            into = out[:, :, first : first + segment.tokens]
            if not isinstance(side, Tensor):
                into.copy_(reference.dequantize(side, torch.float16))
            elif copy_dense:
                into.copy_(side)
        first += segment.tokens


def prepared(cache: MixedKV, key: Tensor, value: Tensor, copy_dense: bool = True) -> Prepared:
    """Return what `decode_into` does as one launch that can be repeated and recorded.

    Parameters
    ----------
    cache : MixedKV
        Windows in fragment order, one segment per width, and at most one dense segment.
    key, value : Tensor
        As of `decode_into`, contiguous, on the cache's CUDA device.
    copy_dense : bool
        As of `decode_into`.

    Raises
    ------
    ParameterError, UnsupportedError
        For a cache or tensors that the kernel cannot serve.
    """
    properties = torch.cuda.get_device_properties(key.device)
    call = prepare(cache, key, value, properties.multi_processor_count, copy_dense)
    return Prepared(call, _kernel(cache.head_dim, f"sm_{properties.major}{properties.minor}", key.device))


def prepare(cache: MixedKV, key: Tensor, value: Tensor, multiprocessors: int, copy_dense: bool = True) -> Call:
    """Return the launch for a device with so many multiprocessors; see `prepared`."""
    _check(cache, key, value)
    if not (key.is_contiguous() and value.is_contiguous()):
        raise ParameterError("key and value must be contiguous: the kernel writes whole rows; pass tensors of their own")
    probe = torch.empty(cache.batch, cache.num_kv_heads, 1, cache.head_dim, dtype=torch.float16, device=key.device)
    if (refusal := cuda_kernel.refusal(probe, cache)) is not None:
        raise UnsupportedError(f"the kernel cannot decode this cache: {refusal}; use decode_into")
    kept = [key, value, *cache.tensors()]
    x = Arguments(key_out=key.data_ptr(), value_out=value.data_ptr(), batch=cache.batch, kv_heads=cache.num_kv_heads)
    x.out_batch, x.out_head = (2 * stride for stride in key.stride()[:2])
    first = units = 0
    for segment in cache.all():
        blocks = -(-segment.tokens // fragments.BLOCK)
        if isinstance(segment, FragmentSegment) and segment.tokens:
            tables = _tables(segment.num_bits, cache.head_dim, key.device)
            at = (segment.codes.data_ptr(), segment.meta.data_ptr(), *(table.data_ptr() for table in tables))
            sizes = (segment.meta.shape[2], segment.window_size // fragments.BLOCK)
            setattr(x, "four" if segment.num_bits == 4 else "two", Packed(*at, *sizes, first))
            kept += tables
            units += blocks
        elif isinstance(segment, Segment) and segment.tokens and copy_dense:
            assert isinstance(segment.key, Tensor)
            assert isinstance(segment.value, Tensor)
            x.key, x.value, x.dense_tokens, x.dense_first = segment.key.data_ptr(), segment.value.data_ptr(), segment.tokens, first
            x.key_batch, x.key_head, x.key_token = (2 * stride for stride in segment.key.stride()[:3])
            x.value_batch, x.value_head, x.value_token = (2 * stride for stride in segment.value.stride()[:3])
            units += blocks
        first += segment.tokens
    most = fragments.code_bytes(4, cache.head_dim)
    shared = 2 * (most // _RUN * (_RUN + _PADDING) + 8 * cache.head_dim)
    threads = _threads(cache.head_dim)
    grid = max(min(units * cache.batch * cache.num_kv_heads, multiprocessors * _RESIDENT_THREADS // threads), 1)
    return Call(x, (grid,), threads, shared, tuple(kept))


def source(head_dim: int) -> str:
    """Return the CUDA C++ for heads of so many channels."""
    threads = _threads(head_dim)
    return codegen.render("dequantize", head_dim=head_dim, num_threads=threads, programs=_RESIDENT_THREADS // threads)


@functools.cache
def code_places(num_bits: int, head_dim: int) -> Tensor:
    """Return the bit of a block at which each code begins, int64 [2, 32, head_dim] (keys, values), by asking the layout."""
    count = 2 * fragments.BLOCK * head_dim
    numbers, found = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for bit in range((count - 1).bit_length()):  # the number of each field's code, one bit of it at a time
        marks = (numbers >> bit & 1).to(torch.uint8).view(2, fragments.BLOCK, head_dim)
        packed = fragments.pack(marks[0], marks[1], num_bits)[0]
        found |= bitpack.unpack(packed, num_bits, count).long() << bit
    places = torch.empty_like(found)
    places[found] = numbers * num_bits
    return places.view(2, fragments.BLOCK, head_dim)


@functools.cache
def meta_places(head_dim: int) -> Tensor:
    """Return where each channel of each part of the metadata lies, int64 [4, head_dim], by asking the layout."""
    numbers = torch.arange(4 * head_dim)
    parts = numbers.half().view(4, head_dim)  # integers up to 2048 are exact
    places = torch.empty_like(numbers)
    places[fragments.pack_meta(*parts.unbind()).long()] = numbers
    return places.view(4, head_dim)


@functools.cache
def _tables(num_bits: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where pairs of codes begin in a padded block, thread by thread, and `meta_places`: 16 bits, unsigned."""
    places = code_places(num_bits, head_dim)
    keys, values = places[0, :, ::2], places[1, ::2]
    if not (torch.equal(places[0, :, 1::2], keys + 16) and torch.equal(places[1, 1::2], values + 16)):
        raise UnsupportedError(f"{fragments.LAYOUT} no longer has a pair of codes in the halves of a word, which this kernel reads")
    threads = _threads(head_dim)
    # A thread's two runs of keys lie `threads` runs apart; its two of values are those of a pair of tokens.
    keys = keys.reshape(2, threads, 4).transpose(0, 1)
    rows = torch.arange(fragments.BLOCK // 2)
    values = values[(rows % 4 * 8 + rows // 4 * 2) // 2].reshape(threads, 8)
    firsts = torch.cat([keys.flatten(), values.flatten()])
    padded = firsts + firsts // (8 * _RUN) * (8 * _PADDING)
    # No uint16 in older versions of torch: the bits are the same.
    codes = torch.where(padded < 1 << 15, padded, padded - (1 << 16)).to(torch.int16)
    return codes.to(device), meta_places(head_dim).to(torch.int16).to(device)


def _threads(head_dim: int) -> int:
    """Return the threads of a program: each makes two of the runs of eight channels of a block's keys, and two of its values."""
    return fragments.BLOCK * head_dim // 8 // 2


@functools.cache
def _kernel(head_dim: int, arch: str, device: torch.device) -> Any:
    return codegen.load(codegen.compile_cubin(source(head_dim), arch=arch), "dequantize", device)


def _check(cache: MixedKV, key: Tensor, value: Tensor) -> None:
    tokens = sum(segment.tokens for segment in cache.all())
    wanted = [cache.batch, cache.num_kv_heads, tokens, cache.head_dim]
    for name, out in (("key", key), ("value", value)):
        if list(out.shape) != wanted or out.dtype != torch.float16:
            raise ParameterError(f"{name} is {out.dtype} {list(out.shape)}; this cache decodes to float16 {wanted}")
