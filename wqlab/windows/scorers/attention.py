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
    #: What development videos chose of the pocket VLM's 30 layers (record premise_audit).
    layers: tuple[int, ...] = (17, 18, 23)

    def __post_init__(self) -> None:
        good = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in self.layers)
        if not self.layers or not good or list(self.layers) != sorted(set(self.layers)):
            raise ParameterError(f"scorer attention: layers = {self.layers!r} is refused: take one or more, ascending, from 0")

    def compare(self, batch: WindowBatch) -> Tensor:
        """Return the weight of each window's tokens, mean over layers.

        Raises
        ------
        ParameterError
            For embeddings in place of weights.
        """
        if batch.windows.shape[-1] != len(self.layers) or batch.text.shape[-1] != len(self.layers):
            raise ParameterError(
                f"scorer attention got rows of {batch.windows.shape[-1]} and {batch.text.shape[-1]} numbers; it reads attention "
                f"of {len(self.layers)} layers, [tokens, {len(self.layers)}], and ones [1, {len(self.layers)}]: "
                "wqlab.hf.question_attention measures it, and wqlab.windowquant does so by itself"
            )
        return torch.einsum("bwtl,bnl->bw", batch.windows, batch.text) / batch.text.shape[-1]
