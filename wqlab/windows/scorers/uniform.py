"""The same score for every window: a plan that depends on the layer alone, an ablation of the search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.registry import register
from wqlab.windows.batch import WindowBatch
from wqlab.windows.scorers import Scorer


@register("scorer", "uniform")
@dataclass(frozen=True)
class UniformScorer(Scorer):
    """Score every window alike.

    Parameters
    ----------
    value : float
        The score; finite.

    Raises
    ------
    ParameterError
        For another value.
    """

    name = "uniform"
    value: float = 0.5

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ParameterError(f"scorer uniform: value = {self.value} is refused: it must be finite")

    def compare(self, batch: WindowBatch) -> Tensor:
        """Return `value` for each window."""
        return batch.windows.new_full(batch.windows.shape[:2], self.value)
