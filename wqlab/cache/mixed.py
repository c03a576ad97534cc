"""One layer's keys and values at mixed width: windows in 4 and 2 bits, each width contiguous, the rest dense (WindowQuant, 3.3).

The order in which tokens lie here is not the order in which they came: windows of one width are put together, so that a kernel
reads each width in one piece. `positions` remembers where every token belongs. Keys carry their rotary positions already, so
attention does not need it; `dequantize` uses it to give the original order back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitpack
from wqlab.ops.mixed_decode import Layout, preferred_layout
from wqlab.ops.mixed_decode.encoder import encode_windows
from wqlab.ops.mixed_decode.operands import FragmentSegment, MixedKV, PackedTensor, Segment
from wqlab.quantizers import Quantized, Quantizer, check_finite

#: A column that holds no token of a row: rows may have different numbers of windows.
NONE = -1


@dataclass
class _Packed:
    """Windows of one width. Rows with fewer windows have them first and columns of `NONE` behind.

    Parameters
    ----------
    segment : Segment or FragmentSegment
        [batch, heads, tokens, head_dim], packed, without lengths and mask.
    positions : Tensor
        int32 [batch, tokens].
    lengths : Tensor or None
        int32 [batch]: the columns that a row has; None for all, known here, so that no step has to ask the device.
    """

    segment: Segment | FragmentSegment
    positions: Tensor
    lengths: Tensor | None

    @classmethod
    def of(cls, segment: Segment | FragmentSegment, positions: Tensor) -> _Packed:
        """Return windows with the columns that their positions say."""
        lengths = (positions != NONE).sum(1, dtype=torch.int32)
        return cls(segment, positions, None if bool((lengths == positions.shape[1]).all()) else lengths)


class MixedSegments:
    """Keys and values of one layer.

    Parameters
    ----------
    quantizers : mapping of int to (Quantizer, Quantizer)
        Bits -> how keys and values of that width are encoded; all with one window size.
    layout : {"bitpack-v1", "fragments-v1"}, optional
        Of packed windows. Default: what `wqlab.ops.mixed_decode` reads fastest where the tokens lie.

    Attributes
    ----------
    key, value : Tensor or None
        Dense tokens [batch, heads, tokens, head_dim], in the order of their positions, the newest in the last column of every row.
    positions : Tensor or None
        int32 [batch, tokens] of the dense tokens, `NONE` in front where a row has fewer.
    packed : dict of int to _Packed
        Bits -> windows.
    seq_len : int
        Tokens per row, wherever they lie.
    """

    def __init__(self, quantizers: Mapping[int, tuple[Quantizer, Quantizer]], layout: Layout | None = None) -> None:
        self.quantizers, self.layout = dict(quantizers), layout
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.positions: Tensor | None = None
        self.packed: dict[int, _Packed] = {}
        self.seq_len = 0
        #: Whether no column of `positions` is `NONE`.
        self._full = True

    def __len__(self) -> int:
        return self.seq_len

    @property
    def batch(self) -> int:
        """Rows held; 0 before the first token."""
        return 0 if self.key is None else int(self.key.shape[0])

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add dense tokens [batch, heads, new, head_dim] behind all others.

        Raises
        ------
        UnsupportedError
            When batch, heads or head_dim differ from what is held; nothing was added.
        """
        if self.key is None or self.value is None or self.positions is None:
            self.key, self.value = key.detach().clone(), value.detach().clone()
            self.positions = torch.arange(key.shape[2], device=key.device, dtype=torch.int32).expand(key.shape[0], -1).clone()
            self.seq_len = key.shape[2]
            return
        held = self.key.shape[:2], self.key.shape[3]
        if held != (key.shape[:2], key.shape[3]):
            raise UnsupportedError(
                f"tokens of [batch, heads, head_dim] = {[*key.shape[:2], key.shape[3]]} cannot be appended to a cache of "
                f"{[*held[0], held[1]]}; use a new cache, or reset this one"
            )
        new = torch.arange(self.seq_len, self.seq_len + key.shape[2], device=key.device, dtype=torch.int32).expand(key.shape[0], -1)
        self.key, self.value = (
            torch.cat([self.key, key.to(self.key.dtype)], 2),
            torch.cat([self.value, value.to(self.value.dtype)], 2),
        )
        self.positions = torch.cat([self.positions, new], 1)
        self.seq_len += key.shape[2]

    def encode(self, windows: Tensor, bit_widths: Sequence[int]) -> None:
        """Encode windows of dense tokens, those of one width together; what is given 16 bits, and all other tokens, stay dense.

        Parameters
        ----------
        windows : Tensor
            int64 [batch, windows, window_size]: the positions of each window's tokens, ascending; a window that a row does not have
            is `NONE` throughout.
        bit_widths : sequence of int
            [windows]: 16, or a key of `quantizers`.

        Raises
        ------
        ParameterError
            For another number of widths, an unknown width, or when windows are encoded already.
        NonFiniteError
            When a window holds NaN or infinity; the cache is as before.
        """
        if self.packed:
            raise ParameterError("this layer's windows are encoded already: encode once, after the prefill")
        if self.key is None or self.value is None or self.positions is None:
            raise ParameterError("nothing was appended yet, so there is nothing to encode")
        if windows.dim() != 3 or len(bit_widths) != windows.shape[1]:
            raise ParameterError(
                f"windows {list(windows.shape)} and {len(bit_widths)} bit widths: need [batch, windows, size] and [windows]"
            )
        unknown = sorted(set(bit_widths) - {16, *self.quantizers})
        if unknown:
            raise ParameterError(f"bit width {unknown[0]} is neither 16 nor one of {', '.join(map(str, sorted(self.quantizers)))}")
        packed = {}
        for bits, pair in self.quantizers.items():
            chosen = [i for i, width in enumerate(bit_widths) if width == bits]
            if chosen:
                packed[bits] = self._encoded(windows[:, chosen], pair)
        taken = torch.zeros(self.positions.shape, dtype=torch.bool, device=self.positions.device)
        for part in packed.values():
            # Before any window is encoded, the dense token at position p lies in column p.
            rows, columns = (part.positions != NONE).nonzero(as_tuple=True)
            taken[rows, part.positions[rows, columns].long()] = True
        self.packed = packed
        self._keep_dense(self.positions.masked_fill(taken, NONE), self.key, self.value)

    def parts(self, visible: Tensor | None = None) -> MixedKV:
        """Return what the `mixed_decode` operation reads.

        Parameters
        ----------
        visible : Tensor, optional
            bool [batch, seq_len]: false for padding. Default: all tokens are seen.

        Raises
        ------
        ParameterError
            When nothing was appended yet.
        """
        if self.key is None or self.value is None or self.positions is None:
            raise ParameterError("nothing was appended to this cache yet, so it has nothing to attend to")
        segments = []
        for part in self.packed.values():
            mask = None if visible is None else _seen(part.positions, visible)
            segments.append(replace(part.segment, lengths=part.lengths, mask=mask))
        whole = self._full and visible is None
        return MixedKV(tuple(segments), Segment(self.key, self.value, mask=None if whole else _seen(self.positions, visible)))

    def dequantize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens in their original order, [batch, heads, seq_len, head_dim].

        Raises
        ------
        ParameterError
            When nothing was appended yet.
        """
        if self.key is None or self.value is None or self.positions is None:
            raise ParameterError("nothing was appended to this cache yet, so it has no tensor to return")
        both = []
        for name, dense in (("key", self.key), ("value", self.value)):
            shape = (*dense.shape[:2], self.seq_len, dense.shape[3])
            result = torch.empty(shape, dtype=dtype or dense.dtype, device=dense.device)
            _put(result, self.positions, dense)
            for bits, part in self.packed.items():
                _put(result, part.positions, self._decoded(getattr(part.segment, name), bits, name))
            both.append(result)
        return both[0], both[1]

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of every row. A window that is cut goes back to dense, at its decoded values."""
        if num_tokens >= self.seq_len or self.key is None or self.value is None or self.positions is None:
            return
        self.seq_len = max(num_tokens, 0)
        positions, keys, values = [self.positions], [self.key], [self.value]
        for bits, part in list(self.packed.items()):
            size = self._window_size(bits)
            ends = part.positions.reshape(len(part.positions), -1, size)[:, :, -1]
            whole = (ends != NONE) & (ends < self.seq_len)
            cut = ~whole.repeat_interleave(size, 1)
            if bool(cut.any()):
                positions.append(part.positions.masked_fill(~cut, NONE))
                keys.append(self._decoded(part.segment.key, bits, "key"))
                values.append(self._decoded(part.segment.value, bits, "value"))
            # Windows lie in ascending order, so those that stay are each row's first ones.
            count = int(whole.sum(1).max())
            if not count:
                del self.packed[bits]
                continue
            kept = part.positions.masked_fill(cut, NONE)[:, : count * size].clone()
            self.packed[bits] = _Packed.of(_first(part.segment, count, size), kept)
        joined = torch.cat(positions, 1)
        self._keep_dense(joined.masked_fill(joined >= self.seq_len, NONE), torch.cat(keys, 2), torch.cat(values, 2))

    def select_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Replace every held tensor by `choose(tensor)`, which picks or repeats rows of axis 0; packed tensors follow."""
        if self.key is None or self.value is None or self.positions is None:
            return
        self.key, self.value, self.positions = choose(self.key), choose(self.value), choose(self.positions)
        for bits, part in self.packed.items():
            lengths = None if part.lengths is None else choose(part.lengths)
            self.packed[bits] = _Packed(_mapped(part.segment, choose), choose(part.positions), lengths)

    def tokens_per_width(self) -> dict[int, int]:
        """Return bits -> tokens held at that width, of K and V and of all rows; dense ones count by their dtype."""
        if self.positions is None or self.key is None:
            return {}
        found = {8 * self.key.dtype.itemsize: 2 * int((self.positions != NONE).sum())}
        for bits, part in self.packed.items():
            found[bits] = 2 * int((part.positions != NONE).sum())
        return dict(sorted(found.items()))

    def numel(self) -> int:
        """Return the number of elements represented, K and V: 2 * batch * heads * seq_len * head_dim."""
        return 0 if self.key is None else 2 * self.key.shape[0] * self.key.shape[1] * self.seq_len * self.key.shape[3]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held, positions included."""
        yield from (t for t in (self.key, self.value, self.positions) if t is not None)
        for part in self.packed.values():
            yield from (*part.segment.tensors(), part.positions)
            yield from () if part.lengths is None else (part.lengths,)

    def nbytes(self) -> int:
        """Return the bytes of the storages behind the held tensors: codes, metadata, dense tokens, columns that pad, positions."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def _encoded(self, windows: Tensor, pair: tuple[Quantizer, Quantizer]) -> _Packed:
        # A row's own windows first: what it lacks goes to the back, where its positions say NONE.
        lacking = windows[:, :, 0] == NONE
        order = lacking.long().argsort(dim=1, stable=True)
        windows = windows.gather(1, order[:, :, None].expand_as(windows))
        longest = int((~lacking).sum(1).max())
        positions = windows[:, :longest].flatten(1).to(torch.int32)
        assert self.key is not None
        assert self.value is not None
        spec = pair[0].spec
        layout = self.layout or preferred_layout(spec, self.key.shape[3], self.key.dtype, self.key.device)
        if layout == "fragments-v1" and all(quantizer.name == "rtn" for quantizer in pair):
            return _Packed.of(encode_windows(self.key, self.value, positions, spec.num_bits, spec.window_size), positions)
        sides = []
        for dense, quantizer in zip((self.key, self.value), pair, strict=True):
            x = _taken(dense, positions)
            check_finite(x, quantizer.role)
            sides.append(quantizer.quantize(x))
        key, value = sides
        if layout == "fragments-v1":
            return _Packed.of(FragmentSegment.pack(key, value), positions)
        return _Packed.of(Segment(PackedTensor.pack(key), PackedTensor.pack(value)), positions)

    def _window_size(self, bits: int) -> int:
        return int(self.quantizers[bits][0].spec.window_size)

    def _decoded(self, side: Tensor | PackedTensor, bits: int, name: str) -> Tensor:
        assert isinstance(side, PackedTensor)
        quantizer = self.quantizers[bits][name == "value"]
        codes = bitpack.unpack(side.codes, side.num_bits, side.head_dim)
        return quantizer.dequantize(Quantized(codes, side.scale, side.minimum, quantizer.spec, side.scale.dtype))

    def _keep_dense(self, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Hold the tokens whose position is not `NONE`, ascending and against the right edge of every row."""
        order = positions.argsort(dim=1, stable=True)
        most = int((positions != NONE).sum(1).max()) if positions.numel() else 0
        order = order[:, positions.shape[1] - most :]
        self.positions = positions.gather(1, order).contiguous()
        self._full = _is_full(self.positions)
        self.key, self.value = (_gathered(x, order) for x in (key, value))


def _gathered(x: Tensor, columns: Tensor) -> Tensor:
    """Return columns [batch, n] of x [batch, heads, tokens, head_dim], in storage of their own."""
    return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _taken(x: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens at `positions` [batch, n]; zeros where that is `NONE`, which every quantizer can encode."""
    found = _gathered(x, positions.clamp_min(0).long())
    return found.masked_fill((positions == NONE)[:, None, :, None], 0)


def _put(target: Tensor, positions: Tensor, x: Tensor) -> None:
    """Write the columns of x [batch, heads, n, head_dim] to their positions in target; columns of `NONE` go nowhere."""
    rows, columns = (positions != NONE).nonzero(as_tuple=True)
    target[rows, :, positions[rows, columns].long()] = x[rows, :, columns].to(target.dtype)


def _is_full(positions: Tensor) -> bool:
    return not bool((positions == NONE).any())


def _seen(positions: Tensor, visible: Tensor | None) -> Tensor:
    """Return bool [batch, n]: columns that hold a token which is no padding."""
    there = positions != NONE
    return there if visible is None else there & visible.gather(1, positions.clamp_min(0).long())


def _first(segment: Segment | FragmentSegment, windows: int, window_size: int) -> Segment | FragmentSegment:
    """Return the first windows, in storage of their own."""
    if isinstance(segment, FragmentSegment):
        blocks = windows * window_size // (segment.tokens // segment.codes.shape[2])
        return replace(segment, codes=segment.codes[:, :, :blocks].clone(), meta=segment.meta[:, :, :windows].clone())

    def of(side: Tensor | PackedTensor) -> PackedTensor:
        assert isinstance(side, PackedTensor)
        codes = side.codes[:, :, : windows * window_size].clone()
        scale, minimum = (part[:, :, :windows].clone() for part in (side.scale, side.minimum))
        return replace(side, codes=codes, scale=scale, minimum=minimum)

    return replace(segment, key=of(segment.key), value=of(segment.value))


def _mapped(segment: Segment | FragmentSegment, choose: Callable[[Tensor], Tensor]) -> Segment | FragmentSegment:
    """Return the rows that `choose` picks."""
    if isinstance(segment, FragmentSegment):
        return replace(segment, codes=choose(segment.codes), meta=choose(segment.meta))

    def of(side: Tensor | PackedTensor) -> PackedTensor:
        assert isinstance(side, PackedTensor)
        return replace(side, codes=choose(side.codes), scale=choose(side.scale), minimum=choose(side.minimum))

    return replace(segment, key=of(segment.key), value=of(segment.value))
