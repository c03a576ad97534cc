"""What a method must know about a family of video-language models, one file each, found by the model type.

A new family is a new file in this package whose class is registered as ``@register("adapter", "<model_type>")``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wqlab import registry
from wqlab.errors import UnknownNameError, UnsupportedError


class Adapter(ABC):
    """One family of models. `inputs` is always what the family's processor returns, or a part of it with ``input_ids``."""

    @abstractmethod
    def tokens_per_frame(self, model: Any) -> int:
        """Return how many visual tokens one frame takes."""

    @abstractmethod
    def visual_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return a bool Tensor [batch, seq], true where a visual token stands."""

    @abstractmethod
    def question_positions(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return a bool Tensor [batch, seq], true for the words of the user's last turn: no visual token, no marker of the chat."""

    @abstractmethod
    def visual_embeddings(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Return the embeddings that stand at the visual positions, [num_visual, hidden] for each row of the batch."""

    def text_embeddings(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Return the embeddings of the question's tokens, [num_tokens, hidden] for each row of the batch."""
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        positions = self.question_positions(model, inputs)
        return [row[at] for row, at in zip(embeddings, positions, strict=True)]


def for_model(model: Any) -> Adapter:
    """Return the adapter of a transformers model.

    Raises
    ------
    UnsupportedError
        When no adapter knows its model type.
    """
    kind = getattr(model.config, "model_type", None)
    try:
        return registry.lookup("adapter", str(kind))()  # type: ignore[no-any-return]
    except UnknownNameError as error:
        raise UnsupportedError(
            f"{type(model).__name__} is of model type {kind!r}, which no adapter knows (known: {', '.join(error.known)}); "
            "write wqlab/hf/adapters/<model type>.py, or use one of the known"
        ) from error
