"""A layer's cache that allocates nothing while it decodes: packed windows stay, new tokens go into room that is there.

Where a new token goes and how many are valid is read from device memory, so that a decode step can be recorded in a CUDA graph
once and replayed for every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops.mixed_decode import Backend, FragmentSegment, MixedKV, Segment, mixed_decode


class Steps:
    """Where every layer's next token goes, on the device; one for all layers, so that a step moves all of them at once.

    Parameters
    ----------
    num_layers, batch : int
        Of the cache.
    room : int
        New tokens that every layer has room for.
    device : torch.device
        Where the layers lie.

    Attributes
    ----------
    position : Tensor
        int64 [num_layers]: the column of each layer's newest token.
    lengths : Tensor
        int32 [num_layers, batch]: columns that are valid, the newest token included.
    taken : int
        New tokens so far, as the host knows.
    """

    def __init__(self, num_layers: int, batch: int, room: int, device: torch.device) -> None:
        if room < 1:
            raise ParameterError(f"room for {room} new tokens: give 1 or more")
        self.room, self.taken = room, 0
        self.position = torch.full((num_layers,), -1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros((num_layers, batch), dtype=torch.int32, device=device)

    def begin_at(self, layer: int, tokens: int) -> None:
        """Say that a layer holds `tokens` columns before the first new token."""
        self.position[layer] = tokens - 1
        self.lengths[layer] = tokens

    def check_room(self, tokens: int = 1) -> None:
        """Raise ParameterError when there is no room for `tokens` more."""
        if self.taken + tokens > self.room:
            raise ParameterError(
                f"this frozen cache has room for {self.room} new tokens and holds {self.taken}, so {tokens} more do not fit; "
                "freeze it with a larger max_new_tokens"
            )

    def advance(self) -> None:
        """Begin a step: two launches, whatever the number of layers.

        Raises
        ------
        ParameterError
            When the room is used up.
        """
        self.check_room()
        self.position.add_(1)
        self.lengths.add_(1)
        self.taken += 1

    def rewind(self, tokens: int) -> None:
        """Forget the last `tokens` new tokens.

        Raises
        ------
        ParameterError
            When there were fewer.
        """
        if not 0 <= tokens <= self.taken:
            raise ParameterError(f"{tokens} new tokens cannot be forgotten: {self.taken} came since the cache was frozen")
        self.position.sub_(tokens)
        self.lengths.sub_(tokens)
        self.taken -= tokens


class FrozenSegments:
    """Keys and values of one layer.

    Parameters
    ----------
    kv : MixedKV
        What is held so far. Packed segments are kept as they are, without a copy; dense ones are copied together.
    steps : Steps
        Shared by all layers; this layer's begin is entered.
    layer : int
        Which of them this is.
    backend : {"auto", "cuda", "triton", "reference"}
        Of `wqlab.ops.mixed_decode.mixed_decode`.

    Raises
    ------
    UnsupportedError
        For dense segments with lengths of their own.
    """

    def __init__(self, kv: MixedKV, steps: Steps, layer: int, backend: Backend = "auto") -> None:
        self.backend: Backend = backend
        packed: list[Segment | FragmentSegment] = []
        dense: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for segment in kv.all():
            if isinstance(segment, Segment) and isinstance(segment.key, Tensor) and isinstance(segment.value, Tensor):
                if segment.lengths is not None:
                    raise UnsupportedError("dense tokens with lengths cannot be frozen; describe their padding by a mask")
                dense.append((segment.key, segment.value, segment.mask))
            else:
                packed.append(segment)
        tokens = sum(key.shape[2] for key, _, _ in dense)
        batch, heads, _, head_dim = kv.all()[0].shape
        like = dense[0][0] if dense else next(kv.tensors()).new_empty(0, dtype=torch.float16)
        self.key, self.value = (like.new_empty((batch, heads, tokens + steps.room, head_dim)) for _ in range(2))
        mask = None
        if any(part is not None for _, _, part in dense):
            mask = torch.ones((batch, tokens + steps.room), dtype=torch.bool, device=like.device)
        begin = 0
        for key, value, part in dense:
            end = begin + key.shape[2]
            self.key[:, :, begin:end], self.value[:, :, begin:end] = key, value
            if mask is not None and part is not None:
                mask[:, begin:end] = part
            begin = end
        steps.begin_at(layer, tokens)
        self._position = steps.position[layer : layer + 1]
        # The tensors are written in place from here on, so what reads them is put together once.
        self.kv = MixedKV(tuple(packed), Segment(self.key, self.value, steps.lengths[layer], mask))

    def write(self, key: Tensor, value: Tensor) -> None:
        """Put the newest token's key and value [batch, kv_heads, 1, head_dim] where `Steps.position` says."""
        self.key.index_copy_(2, self._position, key.to(self.key.dtype))
        self.value.index_copy_(2, self._position, value.to(self.value.dtype))

    def attend(self, query: Tensor, scaling: float | None = None) -> Tensor:
        """Return attention [batch, num_heads, 1, head_dim] of the newest token's query over all tokens so far."""
        return mixed_decode(query, self.kv, scaling, self.backend)

    def held(self) -> MixedKV:
        """Return what is valid now, without the room; asks the device."""
        tail = self.kv.tail
        assert tail is not None
        tokens = int(self._position) + 1
        mask = None if tail.mask is None else tail.mask[:, :tokens]
        dense = Segment(self.key[:, :, :tokens], self.value[:, :, :tokens], mask=mask)
        return replace(self.kv, segments=(*self.kv.segments, dense), tail=None)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held, the room included."""
        yield from self.kv.tensors()
