"""A batch of videos that were read in full precision, and what a setting may know when it makes a cache for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wqlab.evals.scoring.stream import Stream
from wqlab.hf import QuantizedKVCache
from wqlab.hf.question_attention import question_attention

if TYPE_CHECKING:
    from wqlab.evals.pocketbench import Item, Question
    from wqlab.evals.scoring.facts import ModelFacts


@dataclass(frozen=True, eq=False)
class VideoBatch:
    """Videos of one length.

    Parameters
    ----------
    items : sequence of Item
        The videos.
    stream : Stream
        What the model has read: the videos, and text behind them where the protocol says so.
    video : Tensor
        [batch, visual, hidden], the visual embeddings.
    start : int
        First visual token.
    storage : torch.dtype
        Of full-precision tokens and metadata.
    words : sequence of Tensor
        Per row [words, hidden]: the embeddings of the question that a plan may know, with its options.
    asked : sequence of list of int
        Per row: the ids of the same question with the chat's markers around it, as a model reads it behind the video.
    known : sequence of Question
        Per row: this question; its frames are those that answer it.
    tokens_per_frame : int
        Visual tokens of a frame.
    facts : ModelFacts
        What is known of the model.
    """

    items: Sequence[Item]
    stream: Stream
    video: Tensor
    start: int
    storage: torch.dtype
    words: Sequence[Tensor]
    asked: Sequence[list[int]]
    known: Sequence[Question]
    tokens_per_frame: int
    facts: ModelFacts
    #: What several settings need and one computes: decoded windows, attention.
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        """The model that reads."""
        return self.stream.model

    @property
    def stop(self) -> int:
        """The token behind the last visual one."""
        return self.start + self.video.shape[1]

    def attention(self) -> Tensor:
        """Return float32 [layers, batch, visual]: the weight that the known question's tokens pay to each visual token.

        The question is read behind the video, in full precision, whatever else the stream holds.
        """
        if "attention" not in self.shared:
            self.shared["attention"] = self._attention()
        found: Tensor = self.shared["attention"]
        return found

    def _attention(self) -> Tensor:
        cache = QuantizedKVCache(policy="full")
        for index, layer in enumerate(self.stream.cache.layers):
            (key,), (value,) = layer.segments.key.parts(), layer.segments.value.parts()
            cache.update(key[:, :, : self.stop], value[:, :, : self.stop], index)
        rows = len(self.asked)
        held = self.stream.branch[:, : self.stop], self.stream.positions[:, : self.stop]
        behind = Stream(self.model, cache, *held, [self.stop] * rows, self.stream.last)
        width = max(map(len, self.asked))
        # Shorter questions are padded in front.
        asked = torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in self.asked], device=self.video.device)
        return question_attention(self.model, lambda: behind.read(self.asked), asked)[:, :, self.start : self.stop]
