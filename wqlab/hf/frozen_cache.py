"""A transformers cache for decode steps in a CUDA graph: nothing is allocated, the device knows how long it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from wqlab.cache.frozen import FrozenSegments, Steps
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf.attention import carrying
from wqlab.ops.mixed_decode import MixedKV


class Store(Protocol):
    """Keys and values of one layer with room for new tokens, as `wqlab.cache.frozen.FrozenSegments`."""

    def write(self, key: Tensor, value: Tensor) -> None:
        """Put the newest token [batch, kv_heads, 1, head_dim] in place."""

    def attend(self, query: Tensor, scaling: float | None = None) -> Tensor:
        """Return attention [batch, num_heads, 1, head_dim] of its query [batch, num_heads, 1, head_dim]."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""


class FrozenLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `FrozenCache`, found by the attention function of `wqlab.hf.attention`."""

    is_frozen: Literal[True] = True

    def __init__(self, cache: FrozenCache, store: Store) -> None:
        super().__init__()
        self._cache, self.store = cache, store
        #: Whether the hand-over was not read yet.
        self.waiting = False
        self.is_initialized = True

    def read_by(self, config: Any) -> None:
        """Note that the attention function got this layer."""
        self.waiting = False

    def get_seq_length(self) -> int:
        """Return the tokens held."""
        return self._cache.seq_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the key that is handed over, which is empty: no mask is to be made."""
        return 0, 0

    def _refuse(self, *args: Any) -> NoReturn:
        raise UnsupportedError("a frozen cache keeps its rows; choose, repeat or reset them before it is frozen")

    reset = reorder_cache = batch_select_indices = batch_repeat_interleave = _refuse


class FrozenCache(Cache):  # type: ignore[misc]
    """A cache of fixed size, which takes one new token per row and step. `WindowQuantCache.freeze` makes one.

    Parameters
    ----------
    stores : sequence of Store
        One per layer.
    steps : Steps
        Theirs.
    seq_len : int
        Tokens per row so far, padding included.
    next_position : Tensor, optional
        int64 [batch]: the rotary position of the next token. Default: `seq_len`.

    Notes
    -----
    It can only be read packed: run the model inside `wqlab.hf.attention.packed_attention`, or let
    `wqlab.hf.decode_graph.DecodeGraph` do it. Padding is that of the time when it was frozen, so no attention mask is given any
    more.
    """

    def __init__(self, stores: Sequence[Store], steps: Steps, seq_len: int, next_position: Tensor | None = None) -> None:
        super().__init__(layers=[FrozenLayer(self, store) for store in stores])
        self.steps, self._seq_len = steps, seq_len
        batch = steps.lengths.shape[1]
        first = torch.full((batch,), seq_len, dtype=torch.int64, device=steps.position.device)
        self._next_position = first if next_position is None else next_position

    @classmethod
    def of(cls, layers: Sequence[MixedKV], seq_len: int, max_new_tokens: int, next_position: Tensor | None = None) -> FrozenCache:
        """Return a cache that goes on where `layers` end.

        Raises
        ------
        ParameterError
            Without a layer, or without room.
        UnsupportedError
            When the layers lie on several devices.
        """
        if not layers:
            raise ParameterError("the cache holds no tokens, so there is nothing to freeze; read the prompt first")
        devices = {t.device for kv in layers for t in kv.tensors()}
        if len(devices) > 1:
            raise UnsupportedError(
                f"the layers lie on {', '.join(sorted(map(str, devices)))}, and a decode step is recorded on one device; "
                "load the model on one"
            )
        steps = Steps(len(layers), layers[0].batch, max_new_tokens, devices.pop())
        return cls([FrozenSegments(kv, steps, i) for i, kv in enumerate(layers)], steps, seq_len, next_position)

    @property
    def seq_len(self) -> int:
        """Tokens per row, new ones included."""
        return self._seq_len + self.steps.taken

    @property
    def next_position(self) -> Tensor:
        """int64 [batch]: the rotary position of the next token."""
        return self._next_position + self.steps.taken

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's K and V [batch, kv_heads, 1, head_dim]; return an empty key that carries the layer, and no values.

        Raises
        ------
        UnsupportedError
            For more tokens, another batch, or when the attention of a layer before did not read it.
        ParameterError
            When the room is used up.
        """
        batch = self.steps.lengths.shape[1]
        if key_states.shape[2] != 1 or key_states.shape[0] != batch:
            raise UnsupportedError(
                f"a frozen cache of {batch} rows takes one new token for each of them, and got [batch, heads, tokens, head_dim] = "
                f"{list(key_states.shape)}; read prompts before it is frozen"
            )
        ignored = [i for i, layer in enumerate(self.layers) if layer.waiting]
        if ignored:
            raise UnsupportedError(
                f"the attention of layer {ignored[0]} did not read the frozen cache; run the model inside "
                "wqlab.hf.attention.packed_attention(model), or use DecodeGraph"
            )
        if layer_idx == 0:
            self.steps.advance()
        layer = self.layers[layer_idx]
        layer.store.write(key_states, value_states)
        layer.waiting = True
        return carrying(key_states[:, :, :0], layer), value_states[:, :, :0]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, which must have come since the cache was frozen."""
        self.steps.rewind(-tokens_to_remove if tokens_to_remove <= 0 else self.seq_len - tokens_to_remove)

    def nbytes(self) -> int:
        """Return the bytes held by all layers, the room included."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for x in self.layers for t in x.store.tensors()}
        return sum(held.values())
