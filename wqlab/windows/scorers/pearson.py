"""Mean pairwise Pearson correlation (WindowQuant, Table 11)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wqlab.registry import register
from wqlab.windows import similarity
from wqlab.windows.batch import WindowBatch
from wqlab.windows.scorers import Scorer


@register("scorer", "pearson")
@dataclass(frozen=True)
class PearsonScorer(Scorer):
    """Mean pairwise Pearson correlation (WindowQuant, Table 11)."""

    name = "pearson"

    def compare(self, batch: WindowBatch) -> Tensor:
        """Return `wqlab.windows.similarity.pearson` of the batch."""
        return similarity.pearson(batch.text, batch.windows, batch.text_mask)
