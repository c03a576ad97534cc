"""`mixed_decode` in plain torch: what every kernel is held to. Slow and generous with memory, but for any head size and device."""

from __future__ import annotations

import torch
from torch import Tensor

from wqlab.layouts import bitpack
from wqlab.ops.mixed_decode.operands import FragmentSegment, MixedKV, PackedTensor, Segment


def attend(query: Tensor, cache: MixedKV, scaling: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return attention of `query` over `cache`, computed in `dtype`.

    Parameters
    ----------
    query : Tensor
        [batch, num_heads, q_len, head_dim]
    cache : MixedKV
        Keys and values.
    scaling : float
        Factor of the scores before softmax.
    dtype : torch.dtype
        Of the whole computation; float64 for a tighter truth.

    Returns
    -------
    Tensor
        [batch, num_heads, q_len, head_dim] in the dtype of `query`, or in float64 when that was asked for. A query that sees no
        token at all gives 0.
    """
    batch, _, q_len, head_dim = query.shape
    seen = torch.cat([_visible(s, q_len, causal=s is cache.tail) for s in cache.all()], dim=-1)[:, None, None]
    present = seen.any(dim=3).transpose(-1, -2)  # [batch, 1, tokens, 1]: what no query sees may hold NaN
    key = torch.cat([_dense(s.key, dtype) for s in cache.all()], dim=2).masked_fill(~present, 0)
    value = torch.cat([_dense(s.value, dtype) for s in cache.all()], dim=2).masked_fill(~present, 0)
    grouped = query.to(dtype).reshape(batch, cache.num_kv_heads, -1, q_len, head_dim)
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(dim=-1).masked_fill(~seen, 0)  # where nothing is seen, softmax gives 0/0
    result = (weights @ value.unsqueeze(2)).reshape(query.shape)
    return result if dtype == torch.float64 else result.to(query.dtype)


def dequantize(packed: PackedTensor, dtype: torch.dtype) -> Tensor:
    """Return ``code * scale + minimum`` [batch, kv_heads, tokens, head_dim], rounded to the metadata's dtype, as `dtype`."""
    batch, heads, tokens, head_dim = packed.shape
    stored = packed.scale.dtype
    work = torch.float32 if stored == torch.float16 else torch.float64
    codes = bitpack.unpack(packed.codes, packed.num_bits, head_dim)
    grouped = codes.reshape(batch, heads, tokens // packed.window_size, packed.window_size, head_dim).to(work)
    values = grouped * packed.scale.unsqueeze(3).to(work) + packed.minimum.unsqueeze(3).to(work)
    # The scale is rounded up, so the top code may lie a little past the dtype's last finite number.
    limit = torch.finfo(stored).max
    return values.clamp(-limit, limit).to(stored).to(dtype).reshape(packed.shape)


def _dense(side: Tensor | PackedTensor, dtype: torch.dtype) -> Tensor:
    return side.to(dtype) if isinstance(side, Tensor) else dequantize(side, dtype)


def _visible(segment: Segment | FragmentSegment, q_len: int, causal: bool) -> Tensor:
    """Return bool [batch, q_len, tokens]: true where a query sees a token."""
    (batch, _, tokens, _), device = segment.shape, next(segment.tensors()).device
    position = torch.arange(tokens, device=device)
    end = torch.full((batch,), tokens, device=device) if segment.lengths is None else segment.lengths
    seen = (position < end[:, None])[:, None].expand(batch, q_len, tokens)
    if causal:
        last = end[:, None] - q_len + torch.arange(q_len, device=device)
        seen = seen & (position <= last[:, :, None])
    return seen if segment.mask is None else seen & segment.mask[:, None]
