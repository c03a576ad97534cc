"""The default protocol: a video is cached, then a user asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wqlab.evals.protocols import Protocol, Turn
from wqlab.models.pocket import prompt
from wqlab.registry import register

if TYPE_CHECKING:
    from wqlab.evals.pocketbench import Question


@register("protocol", "cache_then_ask")
class CacheThenAsk(Protocol):
    """The video is prefilled and quantized; question and answer then attend to the quantized cache only."""

    name = "cache_then_ask"

    def turn(self, tokenizer: Any, questions: Sequence[Question]) -> Turn:
        """Return the first question, asked on the quantized cache."""
        question = questions[0]
        return Turn(question, [], prompt.question_ids(tokenizer, question.text, question.options), question)
