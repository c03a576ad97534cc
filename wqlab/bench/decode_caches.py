"""Caches for decode benches: random content at a serving shape, the widths mixed as a window search would, and what they take."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab.errors import ParameterError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wqlab.ops.mixed_decode import FragmentSegment, MixedKV, Segment

#: Name -> shares of the windows in 16, 4 and 2 bits.
MIXES = {"fp16": (1.0, 0.0, 0.0), "int4": (0.0, 1.0, 0.0), "int2": (0.0, 0.0, 1.0), "10/30/60": (0.1, 0.3, 0.6)}
WINDOW_SIZE = 32


class Shape(NamedTuple):
    """A decode step: one query token per row."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def elements(self) -> int:
        """Keys, or values."""
        return self.batch * self.num_kv_heads * self.seq_len * self.head_dim

    @property
    def fp16_bytes(self) -> int:
        """Keys and values in 16 bits."""
        return 4 * self.elements


class Tokens(NamedTuple):
    """How many tokens of a row are held in 16, in 4 and in 2 bits."""

    dense: int
    four: int
    two: int


class Bytes(NamedTuple):
    """What a cache takes."""

    dense: int
    codes: int
    metadata: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def split_tokens(seq_len: int, mix: str | Tokens) -> Tokens:
    """Return the tokens per width: whole windows of 32, those of 2 bits take what rounding leaves.

    Parameters
    ----------
    seq_len : int
        Tokens of a row.
    mix : str or Tokens
        One of `MIXES`, or the tokens themselves.

    Raises
    ------
    ParameterError
        For a length that is not whole windows, a mix that is none of `MIXES`, or tokens that are not those of a row.
    """
    if seq_len % WINDOW_SIZE or seq_len < WINDOW_SIZE:
        raise ParameterError(
            f"seq_len = {seq_len} is not whole windows of {WINDOW_SIZE} tokens; choose a multiple of {WINDOW_SIZE}"
        )
    if isinstance(mix, Tokens):
        if sum(mix) != seq_len or any(n < 0 or n % WINDOW_SIZE for n in mix):
            raise ParameterError(f"{mix} are not whole windows of {WINDOW_SIZE} tokens that make {seq_len} together")
        return mix
    if mix not in MIXES:
        raise ParameterError(f"mix = {mix!r} is not one of {', '.join(MIXES)}")
    windows = seq_len // WINDOW_SIZE
    dense, four = (round(share * windows) for share in MIXES[mix][:2])
    return Tokens(*(WINDOW_SIZE * n for n in (dense, four, windows - dense - four)))


def cache_bytes(shape: Shape, mix: str | Tokens) -> Bytes:
    """Return the bytes of keys and values: halfs, codes, and a half of scale and of minimum per window and channel."""
    tokens = split_tokens(shape.seq_len, mix)
    row = 2 * shape.batch * shape.num_kv_heads * shape.head_dim  # one token's elements, keys and values
    codes = row * tokens.four // 2 + row * tokens.two // 4
    return Bytes(2 * row * tokens.dense, codes, 4 * row * (tokens.four + tokens.two) // WINDOW_SIZE)


def random_cache(shape: Shape, mix: str | Tokens, generator: torch.Generator, fragments: bool = True) -> MixedKV:
    """Return a cache of random bytes, made where `generator` lives; values lie within about +-2, so scores are as in a model.

    A cache sorts its windows by width, so the order in which the widths arrived reaches no kernel; what is random is the content.

    Parameters
    ----------
    shape : Shape
        Of the decode step.
    mix : str or Tokens
        One of `MIXES`, or how many tokens a row holds in each width.
    generator : torch.Generator
        Its device is the cache's.
    fragments : bool
        Whether windows lie in fragment order, for the CUDA kernel, or row by row, for Triton.
    """
    import torch

    from wqlab.layouts.fragments import BLOCK, code_bytes
    from wqlab.ops.mixed_decode import FragmentSegment, MixedKV, PackedTensor, Segment

    heads, dim, device = (shape.batch, shape.num_kv_heads), shape.head_dim, generator.device
    tokens = split_tokens(shape.seq_len, mix)

    def codes(*size: int) -> Tensor:
        return torch.randint(0, 256, (*heads, *size), dtype=torch.uint8, device=device, generator=generator)

    def metadata(bits: int, windows: int) -> tuple[Tensor, Tensor]:
        spread, shift = (torch.rand((*heads, windows, dim), device=device, generator=generator) for _ in range(2))
        scale = (0.75 + 3 * spread) / (2**bits - 1)
        return scale.half(), (0.4 * shift - 0.2 - (2**bits - 1) / 2 * scale).half()

    segments: list[Segment | FragmentSegment] = []
    if tokens.dense:
        size = (*heads, tokens.dense, dim)
        segments.append(Segment(*(torch.randn(size, device=device, generator=generator).half() for _ in range(2))))
    for bits, count in ((4, tokens.four), (2, tokens.two)):
        if not count:
            continue
        windows = count // WINDOW_SIZE
        if fragments:
            # Keys and values each permute their channels, scale and minimum alike, so random parts stay pairs.
            meta = torch.cat([*metadata(bits, windows), *metadata(bits, windows)], dim=-1)
            blocks = codes(count // BLOCK, code_bytes(bits, dim))
            segments.append(FragmentSegment(blocks, meta, bits, WINDOW_SIZE, dim))
        else:
            sides = [
                PackedTensor(codes(count, dim * bits // 8), *metadata(bits, windows), bits, WINDOW_SIZE, dim) for _ in range(2)
            ]
            segments.append(Segment(sides[0], sides[1]))
    return MixedKV(tuple(segments))


def relative_error(output: Tensor, query: Tensor, cache: MixedKV) -> float:
    """Return the error of the first row's first and the last row's last KV head against the reference in float32; inf for NaN.

    The whole of a large cache in float32 would not fit beside it. All of `output` must be finite.
    """
    import torch

    from wqlab.ops.mixed_decode import reference

    group = query.shape[1] // cache.num_kv_heads
    got, want = [], []
    for row, head in {(0, 0), (cache.batch - 1, cache.num_kv_heads - 1)}:
        part = (slice(row, row + 1), slice(head * group, (head + 1) * group))
        want.append(reference.attend(query[part].float(), _one_head(cache, row, head), query.shape[-1] ** -0.5).flatten())
        got.append(output[part].float().flatten())
    truth = torch.cat(want)
    error = float(torch.linalg.vector_norm(torch.cat(got) - truth) / torch.linalg.vector_norm(truth))
    return error if math.isfinite(error) and bool(output.isfinite().all()) else math.inf


def _one_head(cache: MixedKV, row: int, head: int) -> MixedKV:
    from wqlab.ops.mixed_decode import MixedKV

    def cut(entry: Any) -> Any:
        """Keep one row and head of a segment, or of one of its sides."""
        cuts = {}
        for name, value in vars(entry).items():
            if dataclasses.is_dataclass(value):
                cuts[name] = cut(value)
            elif hasattr(value, "contiguous"):
                cuts[name] = value[row : row + 1, head : head + 1].contiguous()
        return dataclasses.replace(entry, **cuts)

    return MixedKV(tuple(cut(segment) for segment in cache.segments))
