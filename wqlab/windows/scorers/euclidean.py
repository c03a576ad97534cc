"""1 / (1 + mean pairwise Euclidean distance) (WindowQuant, Table 11)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wqlab.registry import register
from wqlab.windows import similarity
from wqlab.windows.batch import WindowBatch
from wqlab.windows.scorers import Scorer


@register("scorer", "euclidean")
@dataclass(frozen=True)
class EuclideanScorer(Scorer):
    """1 / (1 + mean pairwise Euclidean distance) (WindowQuant, Table 11)."""

    name = "euclidean"

    def compare(self, batch: WindowBatch) -> Tensor:
        """Return `wqlab.windows.similarity.euclidean` of the batch."""
        return similarity.euclidean(batch.text, batch.windows, batch.text_mask)
