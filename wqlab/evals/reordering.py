"""What the order of windows in a cache does to attention: errors against float64 in the original order (WindowQuant, 3.3.2, 3.3.4).

Errors are given as sums of squares, so that those of several videos can be added before a relative error is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wqlab import quantizers
from wqlab.cache.mixed import MixedSegments
from wqlab.ops.mixed_decode import MixedKV, PackedTensor, Segment, mixed_decode

#: Dtypes in which a cache may hold its dense tokens and metadata.
STORAGE = ("float32", "float16", "bfloat16")


class LayerStates(NamedTuple):
    """What one layer's attention reads in a prefill of one row, rotary positions applied, tokens in their original order.

    Parameters
    ----------
    query : Tensor
        float32 [1, heads, seq, head_dim].
    key, value : Tensor
        float32 [1, kv_heads, seq, head_dim].
    """

    query: Tensor
    key: Tensor
    value: Tensor


class VisualSpan(NamedTuple):
    """Where the visual tokens lie in a prompt, and how they are cut into windows.

    Parameters
    ----------
    start, stop, seq_len : int
        Visual tokens are `start` to `stop` of the prompt's `seq_len` tokens; the question follows.
    window_size : int
        Tokens per window; what is left over behind the last one is never moved.
    """

    start: int
    stop: int
    seq_len: int
    window_size: int

    def windows(self) -> Tensor:
        """Return int64 [windows, window_size]: the positions of each window's tokens."""
        count = (self.stop - self.start) // self.window_size
        return torch.arange(self.start, self.start + count * self.window_size).reshape(count, self.window_size)


def by_width(bit_widths: Sequence[int]) -> list[int]:
    """Return the windows with those of one width together, widest first, else in their order: the paper's reordering."""
    return sorted(range(len(bit_widths)), key=lambda window: -bit_widths[window])


def displacement(order: Sequence[int]) -> float:
    """Return how far `order` moves a window, mean over them, as a share of their number: 0 (not at all) to 0.5 (reversed)."""
    return sum(abs(place - window) for place, window in enumerate(order)) / len(order) ** 2


def token_order(span: VisualSpan, order: Sequence[int]) -> Tensor:
    """Return int64 [seq_len]: which token lies in each column when the windows lie in `order` and text stays where it is."""
    tokens, windows = torch.arange(span.seq_len), span.windows()
    tokens[windows.flatten()] = windows[list(order)].flatten()
    return tokens


def causal(queries: Tensor, columns: Tensor) -> Tensor:
    """Return bool [queries, columns], true where a query sees a column: by position or by place in storage, as given."""
    return columns[None, :] <= queries[:, None]


def attend(
    states: LayerStates, queries: Tensor, seen: Tensor, dtype: torch.dtype = torch.float32, order: Tensor | None = None
) -> Tensor:
    """Return attention [heads, queries, head_dim] of the queries at some positions over keys and values that lie in `order`."""
    query, key, value = (x.to(dtype) for x in (states.query[:, :, queries], states.key, states.value))
    if order is not None:
        key, value = key[:, :, order], value[:, :, order]
    result: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return result[0]


def squares(out: Tensor, reference: Tensor) -> dict[str, float]:
    """Return ``squared_error``, |out - reference|^2, and ``squared_reference``, |reference|^2, both summed in float64."""
    out, reference = out.double(), reference.double()
    return {"squared_error": float((out - reference).square().sum()), "squared_reference": float(reference.square().sum())}


def decode_errors(
    states: LayerStates, span: VisualSpan, bit_widths: Sequence[int], orders: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, Any]]:
    """Yield the errors of `mixed_decode` over this layer's cache, for the tokens behind the video, which see all of it.

    The reference is float64 attention over the same dequantized tokens in their original order, so quantization errors are in both.

    Parameters
    ----------
    states : LayerStates
        Of a full-precision prefill.
    span : VisualSpan
        Of the prompt.
    bit_widths : sequence of int
        [windows]: 16, 4 or 2.
    orders : mapping of str to sequence of int
        Names and orders of the windows. ``"plan"`` stands for the cache as `MixedSegments.parts` hands it over, whatever its value.

    Yields
    ------
    dict
        ``storage`` (dtype of query, dense tokens and metadata), ``order``, ``displacement``, and what `squares` returns.
    """
    positions = torch.arange(span.seq_len)
    asked, windows = positions[span.stop :], span.windows()
    pairs: dict[int, Any] = {
        bits: tuple(quantizers.create("rtn", bits, span.window_size, "window_channel", role) for role in ("key", "value"))
        for bits in sorted(set(bit_widths) - {16}, reverse=True)
    }
    for storage in STORAGE:
        dtype = getattr(torch, storage)
        query, key, value = (x.to(dtype) for x in (states.query, states.key, states.value))
        cache = MixedSegments(pairs)
        cache.append(key, value)
        cache.encode(windows[None], bit_widths)
        decoded = LayerStates(query, *cache.dequantize(torch.float64))
        reference = attend(decoded, asked, causal(asked, positions), torch.float64)
        pieces, tail = _pieces(cache, key, value, windows, bit_widths)
        for name, order in orders.items():
            held = cache.parts() if name == "plan" else MixedKV(tuple(pieces[window] for window in order), tail)
            out = mixed_decode(query[:, :, asked], held)
            yield {"storage": storage, "order": name, "displacement": displacement(order), **squares(out[0], reference)}


def prefill_errors(
    states: LayerStates, span: VisualSpan, orders: Mapping[str, Sequence[int]], stride: int = 16
) -> Iterator[dict[str, Any]]:
    """Yield the errors of one layer's prefill attention over reordered keys and values, query by query, float32 against float64.

    Parameters
    ----------
    states, span, orders
        As `decode_errors`.
    stride : int
        Of the visual tokens every so many-th asks; all tokens behind them do.

    Yields
    ------
    dict
        ``order``; ``mask``: what the causal mask goes by, ``storage`` (the mask of the original order, left where it was) or
        ``position`` (its columns moved with the keys); ``queries`` (video or question); ``position`` from the first visual token;
        and what `squares` returns.
    """
    positions = torch.arange(span.seq_len)
    asking = torch.cat([positions[span.start : span.stop][stride - 1 :: stride], positions[span.stop :]])
    reference = attend(states, asking, causal(asking, positions), torch.float64)
    for name, windows in orders.items():
        order = token_order(span, windows)
        for mask, columns in (("storage", positions), ("position", order)):
            out = attend(states, asking, causal(asking, columns), order=order)
            for i, position in enumerate(asking.tolist()):
                where = {"queries": "video" if position < span.stop else "question", "position": position - span.start}
                yield {"order": name, "mask": mask, **where, **squares(out[:, i], reference[:, i])}


def _pieces(
    cache: MixedSegments, key: Tensor, value: Tensor, windows: Tensor, bit_widths: Sequence[int]
) -> tuple[list[Segment], Segment]:
    """Return the windows of a cache as they are stored, a segment each, and the tokens outside of them."""
    met = dict.fromkeys(bit_widths, 0)
    pieces = []
    for at, bits in zip(windows, bit_widths, strict=True):
        if bits == 16:
            pieces.append(Segment(key[:, :, at], value[:, :, at]))
        else:
            packed = cache.packed[bits].segment
            pieces.append(Segment(_window(packed.key, met[bits]), _window(packed.value, met[bits])))
        met[bits] += 1
    outside = torch.ones(key.shape[2], dtype=torch.bool)
    outside[windows.flatten()] = False
    return pieces, Segment(key[:, :, outside], value[:, :, outside])


def _window(side: Tensor | PackedTensor, n: int) -> PackedTensor:
    """Return the n-th window of packed keys or values."""
    assert isinstance(side, PackedTensor)
    codes = side.codes[:, :, n * side.window_size : (n + 1) * side.window_size]
    scale, minimum = side.scale[:, :, n : n + 1], side.minimum[:, :, n : n + 1]
    return PackedTensor(codes, scale, minimum, side.num_bits, side.window_size, side.head_dim)
