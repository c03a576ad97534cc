"""`mixed_decode` in Triton: one launch over all segments, split along the sequence, and a small one that combines the splits.

A program owns one (batch row, KV head), a tile of the rows that share it (the query heads of the group times the query tokens) and
a run of token blocks, counted through all segments. It reads each block once, in as few bits as it is stored, decodes it in
registers and keeps a running softmax in float32. Its maximum, sum and weighted values go to a workspace. Nothing is added
atomically, so repeats are bit-identical.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wqlab.ops.mixed_decode.operands import FragmentSegment, MixedKV, PackedTensor, Segment

#: The accumulator of a program is [rows, head_dim] in registers; past this, it no longer fits.
MAX_HEAD_DIM = 256
#: Programs per multiprocessor to aim at: several, so that loads of one hide behind the arithmetic of another.
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 128
#: Terms (channels of a score, tokens of a step) that a product of half precision needs where an operand is packed. A lane holds 8
#: neighbours then, and four lanes 32; of 16, triton 3.6 and 3.7 leave half out (see its pull request 11691).
_LEAST_TERMS = 32
_LOG2E = 1.4426950408889634


@triton.jit
def _dense_tile(tensor, batch, head, first, seen, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_N: tl.constexpr):
    data, batch_stride, head_stride, token_stride = tensor
    token = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, HEAD_PAD)
    start = data + batch * batch_stride + head * head_stride + first * token_stride
    here = seen[:, None] & (channel < HEAD_DIM)[None, :]
    return tl.load(start + token[:, None] * token_stride + channel[None, :], mask=here, other=0.0)


@triton.jit
def _packed_tile(
    tensor, batch, head, first, seen, BITS: tl.constexpr, WINDOW: tl.constexpr, LIMIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    codes, code_strides, scale, scale_strides, minimum, minimum_strides = tensor
    token = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, HEAD_PAD)

    PER_BYTE: tl.constexpr = 8 // BITS
    ROW_BYTES: tl.constexpr = (HEAD_DIM + PER_BYTE - 1) // PER_BYTE
    byte = tl.arange(0, HEAD_PAD // PER_BYTE)
    start = codes + batch * code_strides[0] + head * code_strides[1] + first * code_strides[2]
    here = seen[:, None] & (byte < ROW_BYTES)[None, :]
    rows = tl.load(start + token[:, None] * code_strides[2] + byte[None, :], mask=here, other=0)
    # Interleaving puts the codes of a byte beside each other, the order they were packed in; no value changes its thread.
    if BITS == 4:
        rows = tl.interleave(rows & 15, rows >> 4)
    if BITS == 2:
        rows = tl.interleave(tl.interleave(rows & 3, (rows >> 4) & 3), tl.interleave((rows >> 2) & 3, rows >> 6))

    scale += batch * scale_strides[0] + head * scale_strides[1]
    minimum += batch * minimum_strides[0] + head * minimum_strides[1]
    # Masked lanes read code, scale and minimum 0: they add nothing to a score, and the values of their channels are not stored.
    if WINDOW % BLOCK_N == 0:  # the block lies inside one window
        window = first // WINDOW
        inside = channel < HEAD_DIM
        step = tl.load(scale + window * scale_strides[2] + channel * scale_strides[3], mask=inside, other=0.0)[None, :]
        low = tl.load(minimum + window * minimum_strides[2] + channel * minimum_strides[3], mask=inside, other=0.0)[None, :]
    else:
        window = ((first + token) // WINDOW)[:, None]
        inside = seen[:, None] & (channel < HEAD_DIM)[None, :]
        step = tl.load(scale + window * scale_strides[2] + channel[None, :] * scale_strides[3], mask=inside, other=0.0)
        low = tl.load(minimum + window * minimum_strides[2] + channel[None, :] * minimum_strides[3], mask=inside, other=0.0)
    values = rows.to(tl.float32) * step.to(tl.float32) + low.to(tl.float32)
    # The scale is rounded up: the top code may lie a little past the last finite number of the dtype it is rounded to.
    return tl.minimum(values, LIMIT).to(step.dtype)


@triton.jit
def _walk(
    state, query, query_token, segment, tokens, q_len, batch, head, begin, end, scaling,
    KINDS: tl.constexpr, INDEX: tl.constexpr, CAUSAL: tl.constexpr, DOT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return `state` after the blocks of one segment that lie in [begin, end), counted from the segment's first block."""
    top, total, weighted = state
    key, value, lengths, mask, mask_stride = segment
    valid = tokens
    if lengths is not None:
        valid = tl.minimum(tokens, tl.load(lengths + batch).to(tl.int32))
    for block in range(tl.maximum(begin, 0), tl.minimum(end, tl.cdiv(valid, BLOCK_N))):
        # 64 bits: a long cache has more elements than 32 can count.
        first = tl.cast(block, tl.int64) * BLOCK_N
        position = block * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = position < valid
        if mask is not None:
            seen = seen & (tl.load(mask + batch * mask_stride + position, mask=seen, other=0) != 0)

        if KINDS[INDEX][0] == 16:
            keys = _dense_tile(key, batch, head, first, seen, HEAD_DIM, HEAD_PAD, BLOCK_N)
        else:
            keys = _packed_tile(
                key, batch, head, first, seen, KINDS[INDEX][0], KINDS[INDEX][1], KINDS[INDEX][2], HEAD_DIM, HEAD_PAD, BLOCK_N
            )
        scores = tl.dot(query, tl.trans(keys.to(DOT)), input_precision="ieee") * scaling
        allowed = seen[None, :]
        if CAUSAL:
            allowed = allowed & (position[None, :] <= valid - q_len + query_token[:, None])
        scores = tl.where(allowed, scores, float("-inf"))

        higher = tl.maximum(top, tl.max(scores, 1))
        # While a row has seen nothing its maximum is -inf, and -inf - -inf would be NaN.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 1)

        if KINDS[INDEX][3] == 16:
            values = _dense_tile(value, batch, head, first, seen, HEAD_DIM, HEAD_PAD, BLOCK_N)
        else:
            values = _packed_tile(
                value, batch, head, first, seen, KINDS[INDEX][3], KINDS[INDEX][4], KINDS[INDEX][5], HEAD_DIM, HEAD_PAD, BLOCK_N
            )
            # A step that `lengths` lets in has a token of its window. One that `mask` empties may have NaN for metadata, and
            # 0 * NaN is NaN.
            if mask is not None:
                values = tl.where(seen[:, None], values, 0.0)
        values = values.to(DOT)
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(DOT), values, input_precision="ieee")
        top = higher
    return top, total, weighted


@triton.jit(do_not_specialize=["q_len", "tail_tokens", "blocks_per_split"])
def _partial_kernel(
    query, query_strides, tops, totals, weighteds, segments, tail, tail_tokens, q_len, blocks_per_split, scaling,
    KINDS: tl.constexpr, HAS_TAIL: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    split = tl.program_id(1)
    batch = (pair // KV_HEADS).to(tl.int64)
    head = pair % KV_HEADS
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, HEAD_PAD)
    rows = GROUP * q_len
    query_head = head * GROUP + row // q_len
    query_token = row % q_len
    here = (row < rows)[:, None] & (channel < HEAD_DIM)[None, :]
    query_row = query_head.to(tl.int64) * query_strides[1] + query_token * query_strides[2]
    tile = tl.load(query + batch * query_strides[0] + query_row[:, None] + channel[None, :], mask=here, other=0.0).to(DOT)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    begin = split * blocks_per_split
    for index in tl.static_range(len(KINDS) - HAS_TAIL):
        segment, tokens = segments[index]
        top, total, weighted = _walk(
            (top, total, weighted), tile, query_token, segment, tokens, q_len, batch, head, begin, begin + blocks_per_split,
            scaling, KINDS, index, False, DOT, HEAD_DIM, HEAD_PAD, BLOCK_N,
        )  # fmt: skip
        begin -= tl.cdiv(tokens, BLOCK_N)
    if HAS_TAIL:
        top, total, weighted = _walk(
            (top, total, weighted), tile, query_token, tail, tail_tokens, q_len, batch, head, begin, begin + blocks_per_split,
            scaling, KINDS, len(KINDS) - 1, True, DOT, HEAD_DIM, HEAD_PAD, BLOCK_N,
        )  # fmt: skip

    # Written whether or not this program had a token, so that the workspace needs no initial values.
    out = (pair.to(tl.int64) * tl.num_programs(1) + split) * rows + row
    tl.store(tops + out, top, mask=row < rows)
    tl.store(totals + out, total, mask=row < rows)
    tl.store(weighteds + out[:, None] * HEAD_DIM + channel[None, :], weighted, mask=here)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    tops, totals, weighteds, output, splits, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Weigh the splits of one query row by their maxima; they are read in order, so the sum has one order."""
    pair, row, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    channel = tl.arange(0, HEAD_PAD)
    top = float("-inf")
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        top = tl.maximum(top, tl.max(tl.load(tops + (pair * splits + split) * rows + row, split < splits, float("-inf")), 0))
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    weighted = tl.zeros([HEAD_PAD], tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        place = (pair * splits + split) * rows + row
        share = tl.exp2(tl.load(tops + place, split < splits, float("-inf")) - anchor)
        total += tl.sum(share * tl.load(totals + place, split < splits, 0.0), 0)
        here = (split < splits)[:, None] & (channel < HEAD_DIM)[None, :]
        part = tl.load(weighteds + place[:, None] * HEAD_DIM + channel[None, :], mask=here, other=0.0)
        weighted += tl.sum(share[:, None] * part, 0)
    result = weighted / tl.where(total == 0.0, 1.0, total)  # a query that saw nothing gives 0
    tl.store(output + (pair * rows + row) * HEAD_DIM + channel, result.to(output.dtype.element_ty), mask=channel < HEAD_DIM)


#: Whether TRITON_INTERPRET was set when this module was imported: the kernels then run on the CPU, slowly.
INTERPRETED = not isinstance(_partial_kernel, triton.runtime.JITFunction)
_DOT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def attend(query: Tensor, cache: MixedKV, scaling: float, num_splits: int | None = None) -> Tensor:
    """Return attention of `query` over `cache`; see `wqlab.ops.mixed_decode.mixed_decode`, which also checks the arguments.

    Parameters
    ----------
    query : Tensor
        [batch, num_heads, q_len, head_dim] on a CUDA device (or anywhere in the interpreter), head_dim at most `MAX_HEAD_DIM`.
    cache : MixedKV
        Keys and values on the same device.
    scaling : float
        Factor of the scores before softmax.
    num_splits : int, optional
        Runs that the sequence is cut into; default: enough to fill the device.

    Returns
    -------
    Tensor
        [batch, num_heads, q_len, head_dim], contiguous, in the dtype of `query`.
    """
    query = _rows_contiguous(query)
    batch, num_heads, q_len, head_dim = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not output.numel():
        return output
    pairs, rows = batch * cache.num_kv_heads, num_heads // cache.num_kv_heads * q_len
    block_m, block_n, num_warps, num_stages = _blocks(query, cache)
    row_tiles = triton.cdiv(rows, block_m)
    total_blocks = sum(triton.cdiv(s.tokens, block_n) for s in cache.all())
    wanted = num_splits or triton.cdiv(_PROGRAMS_PER_SM * _multiprocessors(query.device), pairs * row_tiles)
    blocks_per_split = max(triton.cdiv(total_blocks, min(wanted, _MAX_SPLITS)), 1)
    splits = max(triton.cdiv(total_blocks, blocks_per_split), 1)

    tops, totals = (torch.empty((pairs, splits, rows), dtype=torch.float32, device=query.device) for _ in range(2))
    weighteds = torch.empty((pairs, splits, rows, head_dim), dtype=torch.float32, device=query.device)
    # bf16 products are wrong in the interpreter; float32 ones are exact there.
    dot = tl.float32 if INTERPRETED and query.dtype == torch.bfloat16 else _DOT[query.dtype]
    padded = max(triton.next_power_of_2(head_dim), _LEAST_TERMS)
    with torch.cuda.device(query.device if query.is_cuda else -1):
        _partial_kernel[(pairs, splits, row_tiles)](
            query, query.stride()[:3], tops, totals, weighteds,
            tuple((_operands(s), s.tokens) for s in cache.segments),
            None if cache.tail is None else _operands(cache.tail), 0 if cache.tail is None else cache.tail.tokens,
            q_len, blocks_per_split, scaling * _LOG2E,
            KINDS=tuple(_kind(s) for s in cache.all()), HAS_TAIL=cache.tail is not None, KV_HEADS=cache.num_kv_heads,
            GROUP=num_heads // cache.num_kv_heads, DOT=dot, HEAD_DIM=head_dim, HEAD_PAD=padded,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        _combine_kernel[(pairs, rows)](
            tops, totals, weighteds, output, splits, HEAD_DIM=head_dim, HEAD_PAD=padded, STEP=16, num_warps=4
        )
    return output


def _blocks(query: Tensor, cache: MixedKV) -> tuple[int, int, int, int]:
    """Return (query rows per program, tokens per step, warps, steps in flight).

    Tensor cores want 16 rows. A step stays inside one window where the windows allow it, so that metadata is read once per step.
    The sizes are those that compile without spilling registers; float32, which has no tensor cores, needs the most of them,
    and with heads past 128 it does spill.
    Steps of 16 tokens are for float32 only, see `_LEAST_TERMS`.
    Other windows take two steps at a time: their metadata, a row per token, waits in shared memory, and small GPUs have 99 KiB.
    Heads past 128 have no room there for a second step.
    """
    rows = query.shape[1] // cache.num_kv_heads * query.shape[2]
    full, wide = query.dtype == torch.float32, cache.head_dim > 128
    block_m = min(max(triton.next_power_of_2(rows), 16), 16 if full else 32 if wide else 64)
    largest = 16 if full else 32 if wide or block_m > 16 else 64
    windows = [side.window_size for s in cache.segments for side in (s.key, s.value) if isinstance(side, PackedTensor)]
    sizes = (16,) if full else (64, _LEAST_TERMS)
    whole = [size for size in sizes if size <= largest and all(window % size == 0 for window in windows)]
    num_warps = 8 if full or block_m * cache.head_dim > 4096 else 4
    if whole:
        return block_m, whole[0], num_warps, 3
    return (block_m, sizes[-1], 8, 1) if wide else (block_m, sizes[-1], num_warps, 2)


def _kind(segment: Segment | FragmentSegment) -> tuple[int, int, float, int, int, float]:
    """Return what a kernel is compiled for: (bits, window size, last finite number) of the key and of the value; 16 bits: dense."""
    return *_side_kind(segment.key), *_side_kind(segment.value)


def _side_kind(side: Tensor | PackedTensor) -> tuple[int, int, float]:
    if isinstance(side, Tensor):
        return 16, 1, 0.0
    return side.num_bits, side.window_size, torch.finfo(side.scale.dtype).max


def _operands(segment: Segment | FragmentSegment) -> tuple[Any, ...]:
    mask = segment.mask if segment.mask is None else _rows_contiguous(segment.mask)
    return (
        _side_operands(segment.key), _side_operands(segment.value), segment.lengths,
        None if mask is None else mask.view(torch.uint8), 0 if mask is None else mask.stride(0),
    )  # fmt: skip


def _side_operands(side: Tensor | PackedTensor) -> tuple[Any, ...]:
    if isinstance(side, Tensor):
        side = _rows_contiguous(side)
        return (side, *side.stride()[:3])
    codes = _rows_contiguous(side.codes)
    batch, heads, tokens, head_dim = side.shape
    # A shared axis gets stride 0, so that one kernel serves every granularity.
    shape = (batch, heads, tokens // side.window_size, head_dim)
    scale, minimum = side.scale.expand(shape), side.minimum.expand(shape)
    return codes, codes.stride()[:3], scale, scale.stride(), minimum, minimum.stride()


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return `x`, copied only when the elements of a row are not neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
