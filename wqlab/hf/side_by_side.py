"""Several caches compared in one batch: row `i` is held by cache `i`, so the model's weights are read once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from wqlab.errors import UnsupportedError


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Layer `layer_idx` of all the caches."""

    is_compileable = False
    is_croppable = False

    def __init__(self, caches: Sequence[Any], layer_idx: int) -> None:
        super().__init__()
        self.caches, self.layer_idx = caches, layer_idx

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the caches do it themselves."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give each cache its row and put what they return together again."""
        if key_states.shape[0] != len(self.caches):
            raise UnsupportedError(
                f"{len(self.caches)} caches side by side need a batch of as many rows, got {key_states.shape[0]}"
            )
        seen = [
            cache.update(key_states[i : i + 1], value_states[i : i + 1], self.layer_idx, *args, **kwargs)
            for i, cache in enumerate(self.caches)
        ]
        return torch.cat([key for key, _ in seen]), torch.cat([value for _, value in seen])

    def get_seq_length(self) -> int:
        """Return the tokens held, the same in every cache."""
        return int(self.caches[0].get_seq_length(self.layer_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Crop this layer of every cache."""
        for cache in self.caches:
            cache.layers[self.layer_idx].crop(tokens_to_remove)

    def reset(self) -> None:
        """Reset this layer of every cache."""
        for cache in self.caches:
            cache.layers[self.layer_idx].reset()

    def _refuse(self, *args: Any) -> NoReturn:
        raise UnsupportedError("rows of caches side by side belong to different caches and cannot be exchanged: no beams here")

    reorder_cache = batch_select_indices = batch_repeat_interleave = _refuse


class SideBySideCache(Cache):  # type: ignore[misc]
    """A cache made of one cache per batch row.

    Feed the same tokens in every row, and each row shows what its own cache makes of them. Decoding reads all weights for every
    token, so comparing six settings this way costs little more than running one.

    Parameters
    ----------
    caches : sequence of Cache
        One per row, each for a batch of one, of any kind.

    Raises
    ------
    UnsupportedError
        From a pass whose batch has another number of rows, and from beam search.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        super().__init__(layers=[])
        self.caches = list(caches)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append row `i` of K and V [batch, kv_heads, new, head_dim] to layer `layer_idx` of cache `i`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(_Layer(self.caches, len(self.layers)))
        result: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return result
