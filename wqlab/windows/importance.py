"""Layer importance: how much attention changes the hidden state (WindowQuant, Eq. 9; the idea is SqueezeAttention's)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wqlab.errors import NonFiniteError, ParameterError


@dataclass
class ImportanceMeter:
    """Mean cosine between a layer's hidden state before and after its attention, fed one block of tokens at a time.

    s_i near 1 says that layer i's attention hardly turns the hidden state, so the layer bears low bit widths.
    Only two numbers are kept, so prompts of any length fit.
    """

    total: float = 0.0
    tokens: int = 0

    def update(self, before: Tensor, after: Tensor, block: int = 1024) -> None:
        """Add the tokens of two hidden states, both [..., seq_len, hidden], any floating dtype.

        Raises
        ------
        ParameterError
            When the shapes differ.
        NonFiniteError
            When a hidden state has NaN or infinity.
        """
        if before.shape != after.shape:
            raise ParameterError(
                f"hidden states before {tuple(before.shape)} and after {tuple(after.shape)} attention differ in shape"
            )
        h, h_after = before.reshape(-1, before.shape[-1]), after.reshape(-1, after.shape[-1])
        for start in range(0, h.shape[0], block):
            h_block, after_block = h[start : start + block], h_after[start : start + block]
            # float64 for few rows at a time: cosines near 1 lose digits in half precision.
            cosine = torch.nn.functional.cosine_similarity(h_block.double(), after_block.double(), dim=-1, eps=1e-30)
            total = cosine.sum().item()
            if total != total or abs(total) == float("inf"):
                raise NonFiniteError("hidden states hold NaN or infinity; load the model in float32 or check its weights")
            self.total += total
            self.tokens += cosine.numel()

    def value(self) -> float:
        """Return s_i, the mean over all tokens seen.

        Raises
        ------
        ParameterError
            Before any token was seen.
        """
        if self.tokens == 0:
            raise ParameterError("no token was seen: run the model on a prompt before asking for s_i")
        return self.total / self.tokens
