"""A batch of videos that were read in full precision, and what a setting may know when it makes a cache for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wqlab.evals.scoring.facts import ModelFacts
    from wqlab.evals.scoring.stream import Stream


@dataclass(frozen=True, eq=False)
class VideoBatch:
    """Videos of one length.

    Parameters
    ----------
    indices : sequence of int
        Per row: the question's place in its stream.
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
    frames : sequence of tuple of int
        Per row: the frames that answer this question.
    tokens_per_frame : int
        Visual tokens of a frame.
    facts : ModelFacts
        What is known of the model.
    """

    indices: Sequence[int]
    stream: Stream
    video: Tensor
    start: int
    storage: torch.dtype
    words: Sequence[Tensor]
    asked: Sequence[list[int]]
    frames: Sequence[tuple[int, ...]]
    tokens_per_frame: int
    facts: ModelFacts

    @property
    def model(self) -> Any:
        """The model that reads."""
        return self.stream.model

    @property
    def stop(self) -> int:
        """The token behind the last visual one."""
        return self.start + self.video.shape[1]
