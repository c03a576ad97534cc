"""SmoothQuant on a KV cache, as SKVQ compares with it (Xiao et al., "SmoothQuant", 2023, Eq. 4; Duanmu et al., "SKVQ", 2024)."""

from __future__ import annotations

from torch import Tensor

from wqlab.quantizers.smoothing import SmoothedQuantizer
from wqlab.registry import register


@register("method", "smoothquant")
class SmoothQuantQuantizer(SmoothedQuantizer):
    """Channels divided by ``max|X|^alpha / max|W|^(1 - alpha)``, then one scale and minimum per token over all its heads.

    On keys, what meets the activation in the product is the query: ``k_max^alpha / q_max^(1 - alpha)``, with `q_max` from a
    calibration (1 without one). On values it is the output projection, whose ranges no cache knows: ``v_max^alpha``. Every token
    keeps its own scale, so no residual is needed and the policy ``windowed`` serves it. `granularity` takes its default and says no
    more.
    """

    name = "smoothquant"
    target = "kv"
    supported_bits = (2, 4, 8)
    heads_share = True

    def smooth(self, largest: Tensor, query_max: Tensor | None) -> Tensor:
        """Return ``largest^alpha / query_max^(1 - alpha)`` for keys, ``largest^alpha`` for values."""
        factors = largest**self.alpha
        return factors if query_max is None or self.role == "value" else factors / query_max ** (1 - self.alpha)
