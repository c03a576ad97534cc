"""WindowQuant as it is written: the whole prompt is prefilled, then the cache is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wqlab.evals.protocols import Protocol, Turn
from wqlab.models.pocket import prompt
from wqlab.registry import register

if TYPE_CHECKING:
    from wqlab.evals.pocketbench import Question


@register("protocol", "paper_literal")
class PaperLiteral(Protocol):
    """Video and question are prefilled in full precision, then the video is quantized (WindowQuant, sect. 3.3.4).

    The first token of each option comes from the full-precision prefill; only the later ones see the quantized cache. Options that
    differ in their first token are told apart mostly without it.
    """

    name = "paper_literal"

    def turn(self, tokenizer: Any, questions: Sequence[Question]) -> Turn:
        """Return the first question, asked before the cache is quantized."""
        question = questions[0]
        return Turn(question, prompt.question_ids(tokenizer, question.text, question.options), [], question)
