"""The attention that the question pays to a window in some early layers: a scorer that asks the model itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.registry import register
from wqlab.windows.batch import WindowBatch
from wqlab.windows.scorers import Scorer


@register("scorer", "attention")
@dataclass(frozen=True)
class AttentionScorer(Scorer):
    """Softmax weight that the question's tokens pay to a window's tokens, mean over heads and `layers`.

    It is no comparison of embeddings: its callers run the first layers of the model over the prompt
    (`wqlab.hf.question_attention`), which costs that part of a prefill. `score` then gets, as `visual`, each token's weight in each
    layer, [tokens, layers], and as `text` one row of ones.

    Parameters
    ----------
    layers : tuple of int
        Ascending, from 0. The layers whose attention finds what a question asks for differ from model to model:
        `wqlab.evals.premise.best_layers` picks them on videos where the right windows are known.

    Raises
    ------
    ParameterError
        For something else.
    """

    name = "attention"
    reads = "attention"
    layers: tuple[int, ...] = (8, 9, 10)

    def __post_init__(self) -> None:
        good = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in self.layers)
        if not self.layers or not good or list(self.layers) != sorted(set(self.layers)):
            raise ParameterError(f"scorer attention: layers = {self.layers!r} is refused: take one or more, ascending, from 0")

    def compare(self, batch: WindowBatch) -> Tensor:
        """Return the weight of each window's tokens, mean over layers."""
        return torch.einsum("bwtl,bnl->bw", batch.windows, batch.text) / batch.text.shape[-1]
