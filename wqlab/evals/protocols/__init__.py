"""Protocols: what the model has read when the cache is quantized, and what it reads from the quantized cache. One file each.

They decide whether an accuracy says anything. Under greedy decoding from a full-precision prefill, the first token of an answer is
that of the full-precision model whatever the bits, so a one-letter answer never sees the quantized cache. Every figure of accuracy
therefore names its protocol. The registry knows each class under kind ``"protocol"``.

In all of them only visual tokens are encoded; the prefill itself is in full precision, as both papers have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from wqlab.evals.pocketbench import Question


class Turn(NamedTuple):
    """How one item is asked: the video, `prefilled`, then the cache is quantized, then `asked` and the options.

    Parameters
    ----------
    question : Question
        The one that is scored.
    prefilled : list of int
        Token ids read behind the video in full precision; may be empty.
    asked : list of int
        Token ids read from the quantized cache; empty where the question is in `prefilled`.
    known : Question
        The question that a plan may know when the cache is quantized.
    """

    question: Question
    prefilled: list[int]
    asked: list[int]
    known: Question


class Protocol(ABC):
    """Base of all protocols; they hold no state.

    Attributes
    ----------
    name : str
        The registry key.
    num_questions : int
        Questions that an item must have.
    """

    name: ClassVar[str]
    num_questions: ClassVar[int] = 1

    @abstractmethod
    def turn(self, tokenizer: Any, questions: Sequence[Question]) -> Turn:
        """Return how the questions of one item are asked; ``prefilled`` or ``asked`` is not empty, the same one for all items."""
