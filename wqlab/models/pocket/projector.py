"""From what the encoder sees to embeddings that the language model reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wqlab.models.pocket.vision import LEVELS, NUM_PATCHES


class PocketProjector(nn.Module):
    """LayerNorm per level, a learned table of the 64 places, and a two-layer perceptron.

    Parameters
    ----------
    features : sequence of int
        Features per level, in the order in which they are concatenated. Each level has a LayerNorm of its own because the levels'
        scales differ by an order of magnitude.
    hidden, out : int
        Width of the hidden layer, and of the language model.
    gain : float
        First value of the last LayerNorm's weight: the standard deviation of the language model's embedding matrix, so that
        visual tokens start at the size of text tokens.
    """

    def __init__(self, features: Sequence[int] = LEVELS, hidden: int = 1152, out: int = 576, gain: float = 0.136) -> None:
        super().__init__()
        self.features = tuple(features)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in self.features)
        self.positions = nn.Parameter(torch.randn(NUM_PATCHES, sum(self.features)) * 0.02)
        self.inner = nn.Linear(sum(self.features), hidden)
        self.outer = nn.Linear(hidden, out)
        self.norm = nn.LayerNorm(out)
        nn.init.constant_(self.norm.weight, gain)

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings [B, T * 64, out] of features [B, T * 64, sum(features)] (T frames, 64 places each)."""
        levels = [norm(level) for norm, level in zip(self.norms, torch.split(features, list(self.features), dim=-1), strict=True)]
        x = torch.cat(levels, dim=-1)
        x = x + self.positions.repeat(x.shape[1] // NUM_PATCHES, 1)
        out: Tensor = self.norm(self.outer(F.gelu(self.inner(x))))
        return out
