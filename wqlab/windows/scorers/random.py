"""Scores that know nothing: an ablation of the search."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.registry import register
from wqlab.windows.batch import WindowBatch
from wqlab.windows.scorers import Scorer


@register("scorer", "random")
@dataclass(frozen=True)
class RandomScorer(Scorer):
    """Independent scores, uniform in [0, 1).

    For a random plan of the *same memory* as another plan, as in the paper's ablation, see `wqlab.types.WindowPlan.permuted`.

    Parameters
    ----------
    seed : int
        0 to 2^63 - 1. One seed gives the same scores on every device.

    Raises
    ------
    ParameterError
        For another seed.
    """

    name = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ParameterError(f"scorer random: seed = {self.seed!r} is not a whole number from 0 to 2^63 - 1")

    def compare(self, batch: WindowBatch) -> Tensor:
        """Draw on the CPU, whose generator is the same everywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.rand(batch.windows.shape[:2], generator=generator, dtype=batch.windows.dtype)
        return values.to(batch.windows.device, non_blocking=True)
