"""Ranges of channels over a calibration text: what methods know of a model before they see a request.

`wqlab.hf.calibration.calibrate` measures one; a method that uses it takes it as its option ``calibration``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.quantizers import Role


@dataclass(frozen=True, eq=False)
class Calibration:
    """Smallest and largest value of every channel, as the cache holds it (keys behind the rotary positions).

    Parameters
    ----------
    key_low, key_high, value_low, value_high : Tensor
        [layers, kv_heads, head_dim].
    query_max : Tensor
        [layers, kv_heads, head_dim], the largest absolute value over the query heads that read this KV head.
    """

    key_low: Tensor
    key_high: Tensor
    value_low: Tensor
    value_high: Tensor
    query_max: Tensor

    def of(self, role: Role, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return low, high of `role` and query_max, each [kv_heads, head_dim], of one layer.

        Raises
        ------
        ParameterError
            For a layer that was not calibrated.
        """
        if layer_idx >= len(self.query_max):
            raise ParameterError(f"layer {layer_idx} was not calibrated: {len(self.query_max)} layers were; calibrate this model")
        low, high = (self.value_low, self.value_high) if role == "value" else (self.key_low, self.key_high)
        return low[layer_idx], high[layer_idx], self.query_max[layer_idx]
