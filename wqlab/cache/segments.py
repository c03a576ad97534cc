"""Packed segments of one layer: K and V, each as a full-precision head, packed windows and a full-precision tail.

Every tensor held here is exactly as large as its content and a view of nothing, so that `nbytes` is the memory that the cache
really costs. Growing therefore copies (as transformers' own dynamic cache does); codes are copied, never computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from wqlab.cache.policies import CachePolicy
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitpack
from wqlab.quantizers import Quantized, Quantizer, check_finite


class TensorSegments:
    """One tensor [batch, heads, seq, head_dim] that grows along `seq`.

    Parameters
    ----------
    quantizer : Quantizer
        Encodes windows; shared, stateless.
    policy : CachePolicy
        Says how the tokens lie.
    storage_dtype : torch.dtype, optional
        Of head, tail and metadata; default: that of the first tensor appended.
    """

    def __init__(self, quantizer: Quantizer, policy: CachePolicy, storage_dtype: torch.dtype | None = None) -> None:
        self.quantizer = quantizer
        self.policy = policy
        self.storage_dtype = storage_dtype
        self.head: Tensor | None = None  # [batch, heads, head, head_dim]
        self.packed: Tensor | None = None  # uint8 [batch, heads, encoded, bytes per row]
        self.scale: Tensor | None = None  # sequence on axis 2, as in Quantized
        self.minimum: Tensor | None = None
        self.tail: Tensor | None = None  # [batch, heads, tail, head_dim]
        self._head_dim = 0

    def __len__(self) -> int:
        return _seq(self.head) + _seq(self.packed) + _seq(self.tail)

    @property
    def tokens_per_width(self) -> dict[int, int]:
        """Bits -> tokens held at that width; full precision counts by its dtype."""
        full = _seq(self.head) + _seq(self.tail)
        kept = self.tail if self.tail is not None else self.head
        widths = {8 * kept.dtype.itemsize: full} if kept is not None and full else {}
        return widths | ({self.quantizer.spec.num_bits: _seq(self.packed)} if self.packed is not None else {})

    def prepare(self, x: Tensor) -> Tensor:
        """Return `x` [batch, heads, new, head_dim] in the storage dtype, proven fit for `append`; changes nothing.

        Raises
        ------
        NonFiniteError
            When `x`, or `x` in the storage dtype, holds NaN or infinity.
        UnsupportedError
            When batch, heads or head_dim differ from what is held.
        """
        role = self.quantizer.role
        check_finite(x, role)
        stored = x.detach().to(self.storage_dtype or x.dtype)
        if stored.dtype != x.dtype:
            check_finite(stored, f"{role} stored as {stored.dtype}")
        held = next(self.tensors(), None)
        if held is not None and (held.shape[:2] != x.shape[:2] or self._head_dim != x.shape[-1]):
            raise UnsupportedError(
                f"{role} of [batch, heads, head_dim] = {[*x.shape[:2], x.shape[-1]]} cannot be appended to a cache of "
                f"{[*held.shape[:2], self._head_dim]}; use a new cache, or reset this one"
            )
        return stored

    def append(self, prepared: Tensor) -> None:
        """Add tokens that `prepare` returned, and encode the windows that the policy now releases."""
        self.storage_dtype, self._head_dim = prepared.dtype, prepared.shape[-1]
        target = self.policy.split(len(self) + prepared.shape[2])
        tail = _append(self.tail, prepared)
        to_head = min(max(target.head - _seq(self.head), 0), _seq(tail))
        to_encode = max(target.encoded - _seq(self.packed), 0)
        if to_encode:
            self._encode(tail[:, :, to_head : to_head + to_encode])
        if to_head:
            self.head = _append(self.head, tail[:, :, :to_head])
        self.tail = _owned(tail[:, :, to_head + to_encode :])

    def parts(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return head, decoded windows and tail as far as they exist, in original order and in `dtype` (default: as stored)."""
        found = (self.head, self._decoded(), self.tail)
        return [part.to(dtype or part.dtype) for part in found if part is not None]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return all tokens in their original order [batch, heads, seq, head_dim], in `dtype` (default: the storage dtype).

        Raises
        ------
        ParameterError
            When nothing was appended yet.
        """
        parts = self.parts(dtype)
        if not parts:
            raise ParameterError("nothing was appended to this cache yet, so it has no tensor to return")
        return torch.cat(parts, dim=2)

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. A window that is cut goes back to full precision, at its decoded values."""
        if num_tokens >= len(self):
            return
        head, encoded = _seq(self.head), _seq(self.packed)
        inside = num_tokens - head - encoded
        if inside < 0 and encoded:
            kept = max(num_tokens - head, 0) // self.policy.window_size * self.policy.window_size
            decoded = self._decoded()
            assert decoded is not None
            self.tail = _owned(decoded[:, :, kept : max(num_tokens - head, 0)])
            self._select(lambda t: _owned(t[:, :, : t.shape[2] * kept // encoded]), ("packed", "scale", "minimum"))
        elif self.tail is not None:
            self.tail = _owned(self.tail[:, :, : max(inside, 0)])
        if self.head is not None and num_tokens < head:
            self.head = _owned(self.head[:, :, :num_tokens])

    def select_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Replace every held tensor by `choose(tensor)`, which picks or repeats rows of axis 0."""
        self._select(lambda t: _owned(choose(t)), ("head", "packed", "scale", "minimum", "tail"))

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from (t for t in (self.head, self.packed, self.scale, self.minimum, self.tail) if t is not None)

    def numel(self) -> int:
        """Return the number of elements represented: batch * heads * seq * head_dim."""
        held = next(self.tensors(), None)
        return 0 if held is None else held.shape[0] * held.shape[1] * len(self) * self._head_dim

    def nbytes(self) -> int:
        """Return the bytes of the storages behind the held tensors, metadata and padding included."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def _encode(self, x: Tensor) -> None:
        encoded = self.quantizer.quantize(x)
        self.packed = _append(self.packed, bitpack.pack(encoded.codes, self.quantizer.code_bits))
        self.scale, self.minimum = _append(self.scale, encoded.scale), _append(self.minimum, encoded.minimum)

    def _decoded(self) -> Tensor | None:
        if self.packed is None or self.scale is None or self.minimum is None or self.storage_dtype is None:
            return None
        codes = bitpack.unpack(self.packed, self.quantizer.code_bits, self.quantizer.codes_per_token(self._head_dim))
        return self.quantizer.dequantize(Quantized(codes, self.scale, self.minimum, self.quantizer.spec, self.storage_dtype))

    def _select(self, choose: Callable[[Tensor], Tensor], names: tuple[str, ...]) -> None:
        for name in names:
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, choose(held))


class LayerSegments:
    """Keys and values of one layer, appended together: an error leaves both as they were.

    Parameters
    ----------
    key, value : TensorSegments
        Empty segments.
    """

    def __init__(self, key: TensorSegments, value: TensorSegments) -> None:
        self.key, self.value = key, value

    def __len__(self) -> int:
        return len(self.key)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add K and V [batch, heads, new, head_dim]; raises what `TensorSegments.prepare` raises."""
        prepared = self.key.prepare(key), self.value.prepare(value)
        self.key.append(prepared[0])
        self.value.append(prepared[1])

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of both."""
        self.key.crop(num_tokens)
        self.value.crop(num_tokens)

    def select_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Pick or repeat batch rows of every tensor of both, packed ones included."""
        self.key.select_rows(choose)
        self.value.select_rows(choose)

    def tokens_per_width(self) -> dict[int, int]:
        """Return bits -> tokens held at that width, K and V together."""
        widths = dict(self.key.tokens_per_width)
        for bits, tokens in self.value.tokens_per_width.items():
            widths[bits] = widths.get(bits, 0) + tokens
        return widths

    def numel(self) -> int:
        """Return the number of elements represented, K and V."""
        return self.key.numel() + self.value.numel()

    def nbytes(self) -> int:
        """Return the bytes held for both."""
        return self.key.nbytes() + self.value.nbytes()


def _seq(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[2]


def _owned(x: Tensor) -> Tensor:
    """Return `x` in storage of its own and of its exact size."""
    exact = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if exact else x.clone(memory_format=torch.contiguous_format)


def _append(held: Tensor | None, new: Tensor) -> Tensor:
    return new.clone(memory_format=torch.contiguous_format) if held is None else torch.cat([held, new], dim=2)
