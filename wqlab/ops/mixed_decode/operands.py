"""What `mixed_decode` reads: the keys and values of one layer, in segments along the sequence.

Keys carry their rotary positions already, so softmax does not care in which order segments and tokens lie. That is why a cache
may sort its windows by width, and why one list of segments is enough to describe it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitpack, fragments
from wqlab.quantizers import Quantized

#: The dtypes of queries, dense segments and metadata.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Keys or values of some windows, in few bits: ``x ~ code * scale + minimum``.

    Parameters
    ----------
    codes : Tensor
        uint8 [batch, kv_heads, tokens, bytes per row], rows in the layout of `wqlab.layouts.bitpack`.
    scale, minimum : Tensor
        One dtype for both, [batch, kv_heads or 1, tokens / window_size, head_dim or 1]; an axis of 1 is shared (granularity
        ``window_head`` shares the channels of a window, ``window`` its heads too).
    num_bits : {2, 4, 8}
        Bits per code.
    window_size : int
        Consecutive tokens that share one row of metadata.
    head_dim : int
        Codes per row.

    Raises
    ------
    ParameterError, UnsupportedError
        When shapes or dtypes contradict each other.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    num_bits: int
    window_size: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.window_size < 1 or self.codes.dim() != 4 or self.codes.shape[2] % self.window_size:
            raise ParameterError(
                f"codes {list(self.codes.shape)} are not [batch, kv_heads, whole windows of {self.window_size} tokens, bytes]; "
                "keep the tokens of a cut window in the tail"
            )
        if self.codes.dtype != torch.uint8 or self.scale.dtype not in DTYPES or self.scale.dtype != self.minimum.dtype:
            raise UnsupportedError(
                f"codes, scale and minimum are {self.codes.dtype}, {self.scale.dtype}, {self.minimum.dtype}; they must be uint8 "
                f"and twice the same of {', '.join(map(str, DTYPES))}"
            )
        row = bitpack.packed_size(self.head_dim, self.num_bits)
        if self.codes.shape[3] != row:
            raise ParameterError(
                f"{self.head_dim} codes of {self.num_bits} bits take {row} bytes per row, but codes is {list(self.codes.shape)}; "
                "pass what bitpack.pack returned for this head_dim"
            )
        batch, heads, tokens, _ = self.codes.shape
        limits = (batch, heads, tokens // self.window_size, self.head_dim)
        shape = tuple(self.scale.shape)
        alike = len(shape) == 4 and shape[0] == batch and shape[2] == limits[2] and shape[1] in (1, heads)
        if not alike or shape[3] not in (1, self.head_dim) or shape != tuple(self.minimum.shape):
            raise ParameterError(
                f"scale {list(shape)} and minimum {list(self.minimum.shape)} must both be {list(limits)}, heads and channels "
                f"possibly 1, for codes {list(self.codes.shape)} in windows of {self.window_size}"
            )

    @classmethod
    def pack(cls, quantized: Quantized) -> PackedTensor:
        """Return an encoded tensor with its codes packed."""
        spec, codes = quantized.spec, quantized.codes
        packed = bitpack.pack(codes, spec.num_bits)
        return cls(packed, quantized.scale, quantized.minimum, spec.num_bits, spec.window_size, codes.shape[3])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, kv_heads, tokens, head_dim] of the tensor that the codes stand for."""
        batch, heads, tokens, _ = self.codes.shape
        return batch, heads, tokens, self.head_dim

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from (self.codes, self.scale, self.minimum)


@dataclass(frozen=True, eq=False)
class Segment:
    """Keys and values of the same tokens, and which of these tokens a row of the batch has.

    Parameters
    ----------
    key, value : Tensor or PackedTensor
        [batch, kv_heads, tokens, head_dim], both packed or both dense; widths and windows of a packed pair may differ.
    lengths : Tensor, optional
        int32 or int64 [batch]: row `b` has the first ``lengths[b]`` tokens. Lengths beyond the tokens held are refused on the
        CPU; on a GPU, where reading them would stop the stream, they count as all tokens.
    mask : Tensor, optional
        bool [batch, tokens]: true where row `b` has the token (left padding, for example). With `lengths`, both must hold.
        What lies in tokens that no row has is never used; it may be NaN.

    Raises
    ------
    ParameterError, UnsupportedError
        When shapes or dtypes contradict each other.
    """

    key: Tensor | PackedTensor
    value: Tensor | PackedTensor
    lengths: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.key, Tensor) != isinstance(self.value, Tensor):
            raise ParameterError("a segment holds a packed key and a dense value, or the reverse; make two segments of it")
        if len(self.key.shape) != 4 or tuple(self.key.shape) != tuple(self.value.shape):
            raise ParameterError(
                f"key {list(self.key.shape)} and value {list(self.value.shape)} must both be [batch, kv_heads, tokens, head_dim]"
            )
        for side in (self.key, self.value):
            if isinstance(side, Tensor) and side.dtype not in DTYPES:
                raise UnsupportedError(f"a dense segment of {side.dtype} is not one of {', '.join(map(str, DTYPES))}; convert it")
        batch, tokens = self.key.shape[0], self.tokens
        lengths, mask = self.lengths, self.mask
        if lengths is not None:
            if tuple(lengths.shape) != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
                raise ParameterError(f"lengths {list(lengths.shape)} of {lengths.dtype} must be int32 or int64 [{batch}]")
            if lengths.device.type == "cpu" and bool(((lengths < 0) | (lengths > tokens)).any()):
                raise ParameterError(
                    f"lengths = {lengths.tolist()} must lie between 0 and the {tokens} tokens that the segment holds"
                )
        if mask is not None and (tuple(mask.shape) != (batch, tokens) or mask.dtype != torch.bool):
            raise ParameterError(f"mask {list(mask.shape)} of {mask.dtype} must be bool {[batch, tokens]}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, kv_heads, tokens, head_dim] of keys and of values."""
        batch, heads, tokens, head_dim = self.key.shape
        return batch, heads, tokens, head_dim

    @property
    def tokens(self) -> int:
        """Tokens held, valid or not."""
        return int(self.key.shape[2])

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        for side in (self.key, self.value):
            yield from [side] if isinstance(side, Tensor) else side.tensors()
        yield from (t for t in (self.lengths, self.mask) if t is not None)


@dataclass(frozen=True, eq=False)
class FragmentSegment:
    """Keys and values of some windows in the order in which the CUDA kernel's tensor cores take them.

    It reads like a `Segment`, for backends that know no fragments: `key` and `value` unpack each time they are asked for.

    Parameters
    ----------
    codes : Tensor
        uint8 [batch, kv_heads, blocks, bytes per block] of `wqlab.layouts.fragments.pack`, contiguous; a block is 32 tokens.
    meta : Tensor
        float16 [batch, kv_heads, windows, 4 * head_dim] of `wqlab.layouts.fragments.pack_meta`, contiguous.
    num_bits : {4, 2}
        Bits per code, keys and values.
    window_size : int
        A multiple of 32.
    head_dim : {64, 128}
        Channels per head.
    lengths : Tensor, optional
        int32 [batch]: row `b` has the first ``lengths[b]`` tokens, whole windows.
    mask : Tensor, optional
        bool [batch, tokens]: true where row `b` has the token. With `lengths`, both must hold. Scale and minimum of every window
        are finite, also where no row has it.

    Raises
    ------
    ParameterError, UnsupportedError
        When shapes or dtypes contradict each other.
    """

    codes: Tensor
    meta: Tensor
    num_bits: int
    window_size: int
    head_dim: int
    lengths: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        row = fragments.code_bytes(self.num_bits, self.head_dim)
        blocks, windows = self.codes.shape[2], self.meta.shape[2]
        held = (*self.meta.shape[:2], windows * self.window_size // fragments.BLOCK, row)
        if self.window_size % fragments.BLOCK or tuple(self.codes.shape) != held or self.meta.shape[3] != 4 * self.head_dim:
            raise ParameterError(
                f"codes {list(self.codes.shape)} and meta {list(self.meta.shape)} are not {blocks} blocks of {row} bytes in whole "
                f"windows of {self.window_size} tokens, a multiple of {fragments.BLOCK}, with 4 x {self.head_dim} halfs each"
            )
        if self.codes.dtype != torch.uint8 or self.meta.dtype != torch.float16:
            raise UnsupportedError(f"codes and meta are {self.codes.dtype} and {self.meta.dtype}; they must be uint8 and float16")
        if not (self.codes.is_contiguous() and self.meta.is_contiguous()):
            raise ParameterError("codes and meta must be contiguous: the kernel copies whole blocks; call .contiguous()")
        if self.lengths is not None and (tuple(self.lengths.shape) != (self.codes.shape[0],) or self.lengths.dtype != torch.int32):
            raise ParameterError(
                f"lengths {list(self.lengths.shape)} of {self.lengths.dtype} must be int32 [{self.codes.shape[0]}]"
            )

        if self.mask is not None and (
            tuple(self.mask.shape) != (self.codes.shape[0], self.tokens) or self.mask.dtype != torch.bool
        ):
            raise ParameterError(
                f"mask {list(self.mask.shape)} of {self.mask.dtype} must be bool {[self.codes.shape[0], self.tokens]}"
            )

    @classmethod
    def pack(cls, key: Quantized, value: Quantized, lengths: Tensor | None = None) -> FragmentSegment:
        """Return encoded keys and values of the same tokens in fragment order."""
        spec = key.spec
        codes = fragments.pack(key.codes, value.codes, spec.num_bits)
        meta = fragments.pack_meta(key.scale, key.minimum, value.scale, value.minimum)
        return cls(codes.contiguous(), meta.contiguous(), spec.num_bits, spec.window_size, key.codes.shape[3], lengths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, kv_heads, tokens, head_dim] of keys and of values."""
        return self.codes.shape[0], self.codes.shape[1], self.tokens, self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens held, valid or not."""
        return int(self.codes.shape[2]) * fragments.BLOCK

    @property
    def key(self) -> PackedTensor:
        """The keys, row by row."""
        return self._side(0)

    @property
    def value(self) -> PackedTensor:
        """The values, row by row."""
        return self._side(1)

    def _side(self, which: int) -> PackedTensor:
        codes = fragments.unpack(self.codes, self.num_bits, self.head_dim)[which]
        scale, minimum = fragments.unpack_meta(self.meta)[2 * which : 2 * which + 2]
        return PackedTensor(bitpack.pack(codes, self.num_bits), scale, minimum, self.num_bits, self.window_size, self.head_dim)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from (t for t in (self.codes, self.meta, self.lengths, self.mask) if t is not None)


@dataclass(frozen=True, eq=False)
class MixedKV:
    """The keys and values of one layer.

    Parameters
    ----------
    segments : tuple of Segment or FragmentSegment
        Tokens that every query sees: windows in full precision, in 4 bits, in 2 bits; in any number and order, empty ones too.
    tail : Segment, optional
        Dense. The last ``q_len`` valid tokens of each row are those of the queries, causal among themselves; all before them are
        seen by every query. With left padding the new tokens are the last columns, so `mask` alone describes it.

    Raises
    ------
    ParameterError
        When there is no segment at all, the tail is packed, or batch, heads or head_dim differ between segments.
    """

    segments: tuple[Segment | FragmentSegment, ...] = ()
    tail: Segment | None = None

    def __post_init__(self) -> None:
        if not self.all():
            raise ParameterError("a cache without segments and without a tail has nothing to attend to; append tokens first")
        if self.tail is not None and isinstance(self.tail.key, PackedTensor):
            raise ParameterError("the tail is packed, but it must be dense; pass packed windows in segments")
        shapes = {(s.shape[0], s.shape[1], s.shape[3]) for s in self.all()}
        if len(shapes) > 1:
            raise ParameterError(f"segments differ in (batch, kv_heads, head_dim): {sorted(shapes)}")

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.all()[0].shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.all()[0].shape[1]

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.all()[0].shape[3]

    def all(self) -> tuple[Segment | FragmentSegment, ...]:
        """Return the segments, the tail last."""
        return self.segments if self.tail is None else (*self.segments, self.tail)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        for segment in self.all():
            yield from segment.tensors()
