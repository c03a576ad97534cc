"""Mean pairwise cosine, the paper's default (WindowQuant, Eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wqlab.registry import register
from wqlab.windows import similarity
from wqlab.windows.batch import WindowBatch
from wqlab.windows.scorers import Scorer


@register("scorer", "cosine")
@dataclass(frozen=True)
class CosineScorer(Scorer):
    """Mean pairwise cosine, the paper's default (WindowQuant, Eq. 8)."""

    name = "cosine"

    def compare(self, batch: WindowBatch) -> Tensor:
        """Return `wqlab.windows.similarity.cosine` of the batch."""
        return similarity.cosine(batch.text, batch.windows, batch.text_mask)
