"""QoQ's KV4: SmoothAttention and 4 bits per head (Lin et al., "QServe: W4A8KV4 Quantization and System Co-design", 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from wqlab.errors import UnsupportedError
from wqlab.quantizers.smoothing import SmoothedQuantizer
from wqlab.registry import register


@register("method", "qoq")
class QoQQuantizer(SmoothedQuantizer):
    """Keys divided by ``max|K|^alpha`` per channel; keys and values on an asymmetric grid per token and head.

    SmoothAttention: outliers of keys sit in fixed channels; values have none and are not smoothed. Channels `i` and
    ``i + head_dim / 2`` share a factor, the larger of the two, because the rotary embedding mixes them, and only then can the
    factor be folded into the projections in front of it. Scale and zero point are taken per token and head when the token arrives,
    so no residual is needed. `granularity` takes its default and says no more.
    """

    name = "qoq"
    target = "kv"
    supported_bits = (4, 8)
    heads_share = False

    def smooths(self) -> bool:
        """Return whether this side is keys."""
        return self.role == "key"

    def smooth(self, largest: Tensor, query_max: Tensor | None) -> Tensor:
        """Return ``max(largest_i, largest_(i + head_dim / 2))^alpha``, the same for both channels of a rotary pair.

        Raises
        ------
        UnsupportedError
            For an odd head_dim, whose channels have no pairs.
        """
        head_dim = largest.shape[-1]
        if head_dim % 2:
            raise UnsupportedError(f"{self.name}: head_dim = {head_dim} is odd, so channels form no rotary pairs; use smoothquant")
        pairs = torch.maximum(largest[..., : head_dim // 2], largest[..., head_dim // 2 :])
        return torch.cat([pairs, pairs], dim=-1) ** self.alpha
