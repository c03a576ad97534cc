"""A second question on a cache that was quantized after the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wqlab.evals.protocols import Protocol, Turn
from wqlab.models.pocket import prompt
from wqlab.registry import register

if TYPE_CHECKING:
    from wqlab.evals.pocketbench import Question


@register("protocol", "multi_turn")
class MultiTurn(Protocol):
    """The video, another question and its correct answer are prefilled, the video is quantized, then the item's question is asked.

    The scored question is the one of the other protocols, so that their accuracies compare. A plan that was made for the other
    question could not foresee it.
    """

    name = "multi_turn"
    num_questions = 2

    def turn(self, tokenizer: Any, questions: Sequence[Question]) -> Turn:
        """Return the second question, answered, as prefilled text and the first question as the one that follows up."""
        scored, earlier = questions[:2]
        answer = prompt.answer_ids(tokenizer, earlier.options[earlier.answer])
        prefilled = prompt.question_ids(tokenizer, earlier.text, earlier.options) + answer
        return Turn(scored, prefilled, prompt.follow_up_ids(tokenizer, scored.text, scored.options), earlier)
