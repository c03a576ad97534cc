"""Attention of a few query tokens over one layer's cache, whose windows lie in 16, 4 and 2 bits (WindowQuant, section 3.3.4).

The packed codes are decoded where they are used; no full-precision copy of the cache is made. `operands` describes a cache,
`reference` is the truth, `triton_kernel` the portable kernel, `cuda_kernel` the fast one. The first two round a decoded value to
the dtype of its scale, as a decoded copy would be; the fast one does not.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops.mixed_decode import reference
from wqlab.ops.mixed_decode.operands import DTYPES, FragmentSegment, MixedKV, PackedTensor, Segment
from wqlab.types import QuantSpec

__all__ = [
    "Backend", "Choice", "FragmentSegment", "Layout", "MixedKV", "PackedTensor", "Segment", "explain", "mixed_decode",
    "preferred_layout",
]  # fmt: skip

Backend = Literal["auto", "cuda", "triton", "reference"]
Layout = Literal["bitpack-v1", "fragments-v1"]
_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The backend that runs, and why this one."""

    backend: Literal["cuda", "triton", "reference"]
    reason: str


def mixed_decode(query: Tensor, packed: MixedKV, scaling: float | None = None, backend: Backend = "auto") -> Tensor:
    """Return softmax attention of `query` over the cache `packed`.

    Parameters
    ----------
    query : Tensor
        [batch, num_heads, q_len, head_dim] in float16, bfloat16 or float32, rotary positions applied. ``num_heads`` is a multiple
        of the cache's ``num_kv_heads``, and head `h` reads KV head ``h // (num_heads / num_kv_heads)``. The kernel is made for a
        few query tokens, up to about 64.
    packed : MixedKV
        Keys and values. Where several tokens ask, their own keys and values are the last ones of its tail.
    scaling : float, optional
        Factor of the scores before softmax; default ``head_dim ** -0.5``.
    backend : {"auto", "cuda", "triton", "reference"}
        ``auto`` takes the first that can serve the call: ``cuda`` for windows in fragment order (`FragmentSegment`) or dense
        tokens alone, in float16; ``triton`` for what else lies on a CUDA device; else the reference, and on CUDA it then logs a
        warning. `explain` says why.

    Returns
    -------
    Tensor
        [batch, num_heads, q_len, head_dim] in the dtype of `query`. A query that sees no token (a padded one) gives 0.

    Raises
    ------
    ParameterError
        For shapes or devices that contradict each other, a tail without the query tokens, or an unknown backend.
    UnsupportedError
        For a dtype that is not served, or when the backend that was asked for cannot serve this call; the message says why.
    """
    chosen = explain(query, packed, backend)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not math.isfinite(factor):
        raise ParameterError(f"scaling = {scaling!r} is not finite; leave it out for head_dim ** -0.5")
    if chosen.backend == "reference":
        if backend == "auto" and query.is_cuda:
            _log.warning("mixed_decode runs the slow reference: %s", chosen.reason)
        return reference.attend(query, packed, factor)
    if chosen.backend == "cuda":
        from wqlab.ops.mixed_decode import cuda_kernel

        return cuda_kernel.attend(query, packed, factor)
    from wqlab.ops.mixed_decode import triton_kernel

    return triton_kernel.attend(query, packed, factor)


def preferred_layout(spec: QuantSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> Layout:
    """Return how to pack windows of this kind so that the fastest backend on `device` can read them.

    Parameters
    ----------
    spec : QuantSpec
        Of keys and values.
    head_dim : int
        Channels per head.
    dtype : torch.dtype
        Of tokens and metadata.
    device : torch.device
        Where they lie.
    """
    from wqlab.ops.mixed_decode import cuda_kernel

    taken = cuda_kernel.takes(spec, head_dim, dtype) and cuda_kernel.why_not_here(device, by_name=False) is None
    return "fragments-v1" if taken else "bitpack-v1"


def explain(query: Tensor, packed: MixedKV, backend: Backend = "auto") -> Choice:
    """Return which backend `mixed_decode` would take for these arguments, and why; raises what it would raise."""
    _check(query, packed)
    if backend not in get_args(Backend):
        raise ParameterError(f"backend = {backend!r} is not one of {', '.join(get_args(Backend))}")
    if backend == "reference":
        return Choice("reference", "asked for by name")
    if backend == "auto" and not query.is_cuda:
        return Choice("reference", f"the query lies on {query.device}, and the kernels need a CUDA device")
    refusals: list[str] = []
    names: tuple[Literal["cuda", "triton"], ...] = ("cuda", "triton")
    for name in names:
        if backend not in ("auto", name):
            continue
        refusal = _why_not_cuda(query, packed, backend == name) if name == "cuda" else _why_not_triton(query)
        if refusal is None:
            reason = "asked for by name" if backend == name else "; ".join([f"the query lies on {query.device}", *refusals])
            return Choice(name, reason)
        if backend == name:
            raise UnsupportedError(f"backend {name!r} cannot serve this call: {refusal}; use backend='reference' or 'auto'")
        refusals.append(f"not {name}: {refusal}")
    return Choice("reference", "; ".join(refusals))


def _why_not_cuda(query: Tensor, packed: MixedKV, by_name: bool) -> str | None:
    from wqlab.ops.mixed_decode import cuda_kernel

    return cuda_kernel.refusal(query, packed) or cuda_kernel.why_not_here(query.device, by_name)


def _why_not_triton(query: Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (it exists for Linux)"
    from wqlab.ops.mixed_decode import triton_kernel

    if not query.is_cuda and not triton_kernel.INTERPRETED:
        return f"the query lies on {query.device}, and the kernel needs a CUDA device (or TRITON_INTERPRET=1, very slow)"
    if query.shape[-1] > triton_kernel.MAX_HEAD_DIM:
        return f"head_dim = {query.shape[-1]} is larger than {triton_kernel.MAX_HEAD_DIM}, the most that its registers hold"
    return None


def _check(query: Tensor, packed: MixedKV) -> None:
    if query.dim() != 4 or 0 in query.shape[1:]:
        raise ParameterError(f"query {list(query.shape)} is not [batch, num_heads, q_len, head_dim] of 1 or more each")
    if query.dtype not in DTYPES:
        raise UnsupportedError(f"a query of {query.dtype} is not one of {', '.join(map(str, DTYPES))}; convert it")
    batch, num_heads, q_len, head_dim = query.shape
    if (batch, head_dim) != (packed.batch, packed.head_dim) or num_heads % packed.num_kv_heads:
        raise ParameterError(
            f"query {list(query.shape)} does not fit a cache of batch {packed.batch}, {packed.num_kv_heads} KV heads and head_dim "
            f"{packed.head_dim}: batch and head_dim must agree and num_heads be a multiple of the KV heads"
        )
    tail = 0 if packed.tail is None else packed.tail.tokens
    if q_len > 1 and tail < q_len:
        raise ParameterError(
            f"{q_len} query tokens, but the tail holds {tail}: put keys and values of the query tokens at its end first, so "
            "that it is known which of them each query may see"
        )
    elsewhere = sorted({str(t.device) for t in packed.tensors()} - {str(query.device)})
    if elsewhere:
        raise ParameterError(f"the query lies on {query.device}, parts of the cache on {', '.join(elsewhere)}; move one of them")
