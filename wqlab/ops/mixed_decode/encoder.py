"""Tokens of a layer to windows in fragment order: quantize, reorder and pack (WindowQuant, Eq. 14-16 and section 3.3).

`encode_windows` runs ``kernels/encode_windows.cu.j2`` where it can, one pass over the tokens; elsewhere the RTN quantizer and
`FragmentSegment.pack`, which are its twin: codes and metadata are equal to the bit, but for the sign of a minimum of zero.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wqlab import codegen, quantizers
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.layouts import fragments
from wqlab.ops.mixed_decode import cuda_kernel
from wqlab.ops.mixed_decode.operands import FragmentSegment

_log = logging.getLogger(__name__)
#: Architectures on which the tests of this version of the kernel have passed. On others it runs when it is asked for by name.
TESTED: frozenset[tuple[int, int]] = frozenset({(9, 0)})
_THREADS = 128
#: Shared memory that a program may take without keeping a second one from its multiprocessor.
_ROOM = 96 << 10
_Pointer, _Long, _Int = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the kernel; strides in bytes."""

    _fields_ = (
        ("key", _Pointer), ("value", _Pointer), ("key_batch", _Long), ("key_head", _Long), ("value_batch", _Long),
        ("value_head", _Long), ("positions", _Pointer), ("codes", _Pointer), ("meta", _Pointer), ("spoiled", _Pointer),
        ("kv_heads", _Int), ("windows", _Int), ("key_token", _Int), ("value_token", _Int),
    )  # fmt: skip


class Call(NamedTuple):
    """One launch: arguments, grid, shared memory, what it makes, and all tensors that must outlive it."""

    arguments: Arguments
    grid: tuple[int, int]
    shared_bytes: int
    segment: FragmentSegment
    spoiled: Tensor
    kept: tuple[Tensor, ...]


def encode_windows(
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    num_bits: int,
    window_size: int = 32,
    backend: Literal["auto", "cuda", "reference"] = "auto",
) -> FragmentSegment:
    """Return windows of keys and values, round to nearest per window and channel, in fragment order.

    Parameters
    ----------
    key, value : Tensor
        float16 [batch, kv_heads, tokens, head_dim], head_dim 64 or 128.
    positions : Tensor
        int32 [batch, windows * window_size]: the column of each token of each window; negative where a row lacks it, zeros are
        encoded there.
    num_bits : {4, 2}
        Bits per code.
    window_size : int
        A multiple of 32.
    backend : {"auto", "cuda", "reference"}
        ``auto`` takes the kernel for CUDA tensors on architectures where its tests have passed.

    Raises
    ------
    NonFiniteError
        When a token of a window holds NaN or infinity.
    ParameterError, UnsupportedError
        For other shapes or dtypes, or when the backend that was asked for cannot serve the call.
    """
    _check(key, value, positions, num_bits, window_size)
    if backend not in ("auto", "cuda", "reference"):
        raise ParameterError(f"backend = {backend!r} is not one of auto, cuda, reference")
    refusal = _strides(key, value) or cuda_kernel.why_not_here(key.device, by_name=backend == "cuda", tested=TESTED)
    refusal = refusal or _too_large(key, window_size)
    if backend == "cuda" and refusal is not None:
        raise UnsupportedError(f"backend 'cuda' cannot encode these windows: {refusal}; use backend='reference' or 'auto'")
    if backend == "auto" and refusal is not None and key.is_cuda:
        _log.warning("encode_windows runs the slow reference: %s", refusal)
    if backend == "reference" or refusal is not None:
        return _reference(key, value, positions, num_bits, window_size)
    call = prepare(key, value, positions, num_bits, window_size)
    if call.segment.codes.numel():
        major, minor = torch.cuda.get_device_capability(key.device)
        kernel = _kernel(key.shape[3], num_bits, window_size, f"sm_{major}{minor}", key.device)
        kernel.launch(None, call.grid, (_THREADS,), call.shared_bytes, call.arguments)
        raise_if_spoiled(call.spoiled)
    return call.segment


def prepare(key: Tensor, value: Tensor, positions: Tensor, num_bits: int, window_size: int) -> Call:
    """Return the launch that encodes these windows; see `encode_windows`."""
    batch, kv_heads, _, head_dim = key.shape
    windows, device = positions.shape[1] // window_size, key.device
    blocks = windows * window_size // fragments.BLOCK
    shape = (batch, kv_heads, blocks, fragments.code_bytes(num_bits, head_dim))
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    meta = torch.empty((batch, kv_heads, windows, 4 * head_dim), dtype=torch.float16, device=device)
    spoiled = torch.zeros(1, dtype=torch.int32, device=device)
    positions = positions.contiguous()
    x = Arguments(
        key=key.data_ptr(), value=value.data_ptr(), positions=positions.data_ptr(), codes=codes.data_ptr(), meta=meta.data_ptr(),
        spoiled=spoiled.data_ptr(), kv_heads=kv_heads, windows=windows,
    )  # fmt: skip
    x.key_batch, x.key_head, x.key_token = (2 * stride for stride in key.stride()[:3])
    x.value_batch, x.value_head, x.value_token = (2 * stride for stride in value.stride()[:3])
    shared = _shared_bytes(head_dim, window_size)
    segment = FragmentSegment(codes, meta, num_bits, window_size, head_dim)
    return Call(x, (batch * kv_heads, windows), shared, segment, spoiled, (key, value, positions, codes, meta, spoiled))


def source(head_dim: int, num_bits: int, window_size: int) -> str:
    """Return the CUDA C++ for windows of this kind."""
    together = str(_together(head_dim, window_size)).lower()
    return codegen.render("encode_windows", head_dim=head_dim, num_bits=num_bits, window_size=window_size, together=together)


def _together(head_dim: int, window_size: int) -> bool:
    """Return whether a program holds a window's keys and values at once: where that leaves room for a second program."""
    return 4 * window_size * head_dim <= _ROOM


def _shared_bytes(head_dim: int, window_size: int) -> int:
    return (4 if _together(head_dim, window_size) else 2) * window_size * head_dim


def _too_large(key: Tensor, window_size: int) -> str | None:
    if not key.is_cuda:
        return None
    # The driver keeps a KiB of every program's.
    limit = torch.cuda.get_device_properties(key.device).shared_memory_per_multiprocessor - 1024
    needed = _shared_bytes(key.shape[3], window_size)
    if needed > limit:
        return f"a window of {window_size} tokens takes {needed} bytes of shared memory, and the GPU has {limit}"
    return None


def raise_if_spoiled(spoiled: Tensor) -> None:
    """Raise when the kernel met NaN or infinity; waits for it."""
    role = int(spoiled)
    if role:
        raise NonFiniteError(
            f"a window's {('keys', 'values')[role - 1]} hold NaN or infinity, which no code can stand for; look for an overflow in "
            "the model's layers, or keep this layer in full precision"
        )


@functools.cache
def _kernel(head_dim: int, num_bits: int, window_size: int, arch: str, device: torch.device) -> Any:
    return codegen.load(codegen.compile_cubin(source(head_dim, num_bits, window_size), arch=arch), "encode_windows", device)


def _reference(key: Tensor, value: Tensor, positions: Tensor, num_bits: int, window_size: int) -> FragmentSegment:
    sides = []
    roles: tuple[tuple[Literal["key", "value"], Tensor], ...] = (("key", key), ("value", value))
    for role, x in roles:
        columns = positions.clamp_min(0).long()[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        chosen = x.gather(2, columns).masked_fill((positions < 0)[:, None, :, None], 0)
        quantizers.check_finite(chosen, role)
        sides.append(quantizers.create("rtn", num_bits, window_size, "window_channel", role).quantize(chosen))
    return FragmentSegment.pack(sides[0], sides[1])


def _strides(key: Tensor, value: Tensor) -> str | None:
    for name, x in (("keys", key), ("values", value)):
        if x.stride(3) != 1 or any(stride % 8 for stride in x.stride()[:3]) or x.data_ptr() % 16:
            return f"{name} have strides {x.stride()}; rows must be contiguous and start at multiples of 16 bytes"
        if 2 * x.stride(2) >= 2**31:
            return f"{name} have strides {x.stride()}; tokens must be less than 2 GiB apart"
    return None


def _check(key: Tensor, value: Tensor, positions: Tensor, num_bits: int, window_size: int) -> None:
    if key.dim() != 4 or key.shape != value.shape or key.device != value.device or key.device != positions.device:
        raise ParameterError(
            f"keys {list(key.shape)} on {key.device}, values {list(value.shape)} on {value.device} and positions on "
            f"{positions.device} must be of one shape [batch, kv_heads, tokens, head_dim] and on one device"
        )
    if key.dtype != torch.float16 or value.dtype != torch.float16 or key.shape[3] not in fragments.HEAD_DIMS:
        raise UnsupportedError(
            f"keys {key.dtype} and values {value.dtype} with head_dim {key.shape[3]}; {fragments.LAYOUT} takes float16 and "
            f"head_dim {' or '.join(map(str, fragments.HEAD_DIMS))}"
        )
    if num_bits not in fragments.BITS or window_size < 1 or window_size % fragments.BLOCK:
        raise ParameterError(
            f"num_bits = {num_bits} and window_size = {window_size}: {fragments.LAYOUT} takes "
            f"{' or '.join(map(str, fragments.BITS))} bits and multiples of {fragments.BLOCK} tokens"
        )
    fits = positions.dim() == 2 and positions.shape[0] == key.shape[0] and positions.shape[1] % window_size == 0
    if positions.dtype != torch.int32 or not fits:
        raise ParameterError(
            f"positions {list(positions.shape)} of {positions.dtype} must be int32 [{key.shape[0]}, windows * {window_size}]"
        )
