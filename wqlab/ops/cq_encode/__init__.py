"""Codes of keys and values in the codebooks of coupled quantization: the nearest entry of every group of channels.

CQ couples `vector_size` neighbouring channels of one head: 2 for 4 bits per channel (CQ-4), 4 for 2 bits (CQ-2). Each (head, group)
has a book of at most 256 entries, and a code is an index of 8 bits. `reference` is the truth, `triton_kernel` the fast path.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops.cq_encode import reference

if TYPE_CHECKING:
    from wqlab.ops.cq_encode.triton_kernel import PreparedEntries

__all__ = ["Backend", "Choice", "encode", "explain", "prepare"]

Backend = Literal["auto", "triton", "reference"]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_ENTRIES = 256
_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The backend that runs, and why this one."""

    backend: Literal["triton", "reference"]
    reason: str


def encode(x: Tensor, entries: Tensor | PreparedEntries, backend: Backend = "auto") -> Tensor:
    """Return the index of the nearest entry for every group of channels.

    Parameters
    ----------
    x : Tensor
        Keys or values [batch, heads, seq, head_dim] in float16, bfloat16 or float32. Finite, which is not checked: a vector that
        holds NaN gets some code that names an entry.
    entries : Tensor or PreparedEntries
        float32 [heads, groups, num_entries, vector_size], finite, at most 256 entries, ``head_dim = groups * vector_size``; or
        what `prepare` makes of them for the dtype of `x`, which spares the kernel that work at each call.
    backend : {"auto", "triton", "reference"}
        ``auto`` takes the kernel for CUDA tensors that it can serve, else the reference, and on CUDA it then logs a warning.
        `explain` says why.

    Returns
    -------
    Tensor
        uint8 [batch, heads, seq, groups]. Of equally near entries the reference takes the lowest index. The kernel may take
        another where distances agree within `reference.bound`; for float32 it has no tensor cores, and only roundings of
        float32 tell the two apart.

    Raises
    ------
    ParameterError
        For shapes or devices that contradict each other, or an unknown backend.
    UnsupportedError
        For a dtype that is not served, or when the backend that was asked for cannot serve this call; the message says why.
    """
    chosen = explain(x, entries, backend)
    if chosen.backend == "reference":
        if backend == "auto" and x.is_cuda:
            _log.warning("cq_encode runs the slow reference: %s", chosen.reason)
        return reference.encode(x, entries if isinstance(entries, Tensor) else entries.entries)
    from wqlab.ops.cq_encode import triton_kernel

    if x.dtype != torch.float32:
        return triton_kernel.encode(x, triton_kernel.prepare(entries, x.dtype) if isinstance(entries, Tensor) else entries)
    known = entries if isinstance(entries, Tensor) else entries.entries
    codes = torch.empty((*x.shape[:3], known.shape[1]), dtype=torch.uint8, device=x.device)
    triton_kernel.encode_plainly(codes, x, known.contiguous())
    return codes


def prepare(entries: Tensor, dtype: torch.dtype = torch.float16) -> PreparedEntries:
    """Return codebooks as the kernel reads them, on the device of `entries`; 10 or 12 KiB per (head, group).

    Parameters
    ----------
    entries : Tensor
        As of `encode`.
    dtype : torch.dtype
        Of the vectors that will be encoded: float16 or bfloat16.

    Raises
    ------
    ParameterError, UnsupportedError
        As `encode`, and where triton is not installed.
    """
    _check_entries(entries)
    if dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"codebooks are prepared for vectors of float16 or bfloat16, not {dtype}; pass them as they are")
    if (refusal := _why_not_triton(entries)) is not None:
        raise UnsupportedError(f"codebooks cannot be prepared for the kernel: {refusal}; pass the entries as they are")
    from wqlab.ops.cq_encode import triton_kernel

    return triton_kernel.prepare(entries)


def explain(x: Tensor, entries: Tensor | PreparedEntries, backend: Backend = "auto") -> Choice:
    """Return which backend `encode` would take for these arguments, and why; raises what it would raise."""
    known = entries if isinstance(entries, Tensor) else entries.entries
    _check_entries(known)
    _check(x, known)
    if backend not in get_args(Backend):
        raise ParameterError(f"backend = {backend!r} is not one of {', '.join(get_args(Backend))}")
    if backend == "reference":
        return Choice("reference", "asked for by name")
    if backend == "auto" and not x.is_cuda:
        return Choice("reference", f"x lies on {x.device}, and the kernel needs a CUDA device")
    refusal = _why_not_triton(known)
    if refusal is None:
        return Choice("triton", "asked for by name" if backend == "triton" else f"x lies on {x.device}")
    if backend == "triton":
        raise UnsupportedError(f"backend 'triton' cannot serve this call: {refusal}; use backend='reference' or 'auto'")
    return Choice("reference", f"not triton: {refusal}")


def _why_not_triton(entries: Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (it exists for Linux)"
    from wqlab.ops.cq_encode import triton_kernel

    if not entries.is_cuda and not triton_kernel.INTERPRETED:
        return f"the tensors lie on {entries.device}, and the kernel needs a CUDA device (or TRITON_INTERPRET=1, very slow)"
    if entries.shape[3] not in triton_kernel.VECTOR_SIZES:
        return f"vector_size = {entries.shape[3]} is none of {', '.join(map(str, triton_kernel.VECTOR_SIZES))}"
    return None


def _check_entries(entries: Tensor) -> None:
    if entries.dim() != 4 or 0 in entries.shape or entries.shape[2] > _MOST_ENTRIES:
        raise ParameterError(
            f"entries {list(entries.shape)} are not [heads, groups, num_entries, vector_size] of 1 or more each with at most "
            f"{_MOST_ENTRIES} entries, which 8 bits can name"
        )
    if entries.dtype != torch.float32:
        raise UnsupportedError(f"entries of {entries.dtype} are not torch.float32; convert them with .float()")


def _check(x: Tensor, entries: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise UnsupportedError(f"x of {x.dtype} is not one of {', '.join(map(str, _DTYPES))}; convert it")
    heads, groups, _, size = entries.shape
    if x.dim() != 4 or (x.shape[1], x.shape[3]) != (heads, groups * size):
        raise ParameterError(
            f"x {list(x.shape)} does not fit codebooks of {heads} heads and {groups} groups of {size} channels: it must be "
            f"[batch, {heads}, seq, {groups * size}]"
        )
    if x.device != entries.device:
        raise ParameterError(f"x lies on {x.device}, the codebooks on {entries.device}; move one of them")
