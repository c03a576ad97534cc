"""A decode step of a transformers model, recorded once in a CUDA graph and replayed for every token."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.hf.attention import NAME, packed_attention
from wqlab.hf.cache import cache_argument
from wqlab.hf.frozen_cache import FrozenCache

_WARMUP = 2


class DecodeGraph:
    """Greedy decoding from a frozen cache. On a CPU each step is an ordinary call.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder, or a model with one, whose attention goes through transformers' attention interface.
    cache : FrozenCache
        From `WindowQuantCache.freeze`. It must not be used elsewhere meanwhile.
    tokens : Tensor
        int64 [batch, 1]: the last token of each row, which is not in the cache yet.
    position_ids : Tensor, optional
        The rotary position of `tokens`, in the shape that the model takes. Default: ``cache.next_position``.

    Attributes
    ----------
    tokens : Tensor
        Written in place by every step: its result, and the input of the next one. Write others there to sample.
    logits : Tensor or None
        [batch, vocabulary] of the last step.

    Raises
    ------
    ParameterError
        For tokens of another shape, or a cache without room.

    Examples
    --------
    >>> with windowquant(model) as caches:  # doctest: +SKIP
    ...     first = model.generate(**inputs, max_new_tokens=1)[:, -1:]
    >>> graph = DecodeGraph(model, caches[-1].freeze(256), first)  # doctest: +SKIP
    >>> graph.generate(256)  # doctest: +SKIP
    """

    def __init__(self, model: Any, cache: FrozenCache, tokens: Tensor, position_ids: Tensor | None = None) -> None:
        batch, device = cache.steps.lengths.shape[1], cache.steps.position.device
        if tuple(tokens.shape) != (batch, 1):
            raise ParameterError(f"tokens {list(tokens.shape)} must be [{batch}, 1]: the last token of each row of the cache")
        self.model, self.cache = model, cache
        self.tokens = tokens.to(device).clone()
        positions = cache.next_position[:, None] if position_ids is None else position_ids
        self.position_ids = positions.to(device).clone()
        self.logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._record(device)

    def step(self) -> Tensor:
        """Decode one token; return `tokens`, which the next step overwrites.

        Raises
        ------
        ParameterError
            When the cache has no room left.
        """
        self.cache.steps.check_room()
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
            self.cache.steps.taken += 1  # what the host did while the graph was recorded is not repeated
        return self.tokens

    def generate(self, max_new_tokens: int) -> Tensor:
        """Return the next tokens, int64 [batch, max_new_tokens]; ends of sentences do not stop it."""
        self.cache.steps.check_room(max_new_tokens)
        return torch.cat([self.step().clone() for _ in range(max_new_tokens)], dim=1)

    def _run(self) -> None:
        given = cache_argument(self.model, self.cache)
        inside = self.model.config.get_text_config(decoder=True)._attn_implementation == NAME
        with torch.no_grad(), nullcontext() if inside else packed_attention(self.model):
            result = self.model(input_ids=self.tokens, position_ids=self.position_ids, use_cache=True, **given)
            self.logits = result.logits[:, -1]
            self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
            self.position_ids.add_(1)

    def _record(self, device: torch.device) -> None:
        steps, tokens, positions = self.cache.steps, self.tokens.clone(), self.position_ids.clone()
        before = steps.taken
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Libraries choose and load their kernels before anything is recorded. What these steps write is written again.
                for _ in range(_WARMUP):
                    self._run()
                    steps.rewind(steps.taken - before)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
            with torch.cuda.graph(graph, stream=stream):
                self._run()
            steps.taken = before  # recording runs nothing
            self.tokens.copy_(tokens)
            self.position_ids.copy_(positions)
        self._graph = graph
