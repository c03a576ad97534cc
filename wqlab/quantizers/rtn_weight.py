"""RTN of weights: the grid of `wqlab.quantizers.weight_grid` and nothing else, the baseline of every method of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wqlab.quantizers import weight_grid
from wqlab.quantizers.weight_grid import WeightGrid
from wqlab.quantizers.weights import LinearStats, QuantizedWeight, WeightQuantizer
from wqlab.registry import register
from wqlab.types import QuantSpec


@register("method", "rtn_weight")
@dataclass(frozen=True)
class RTNWeightQuantizer(WeightQuantizer):
    """Round to nearest per output channel and group of input channels, blind to the layer's inputs.

    Parameters
    ----------
    num_bits, group_size : int
        As in `WeightGrid`, whose error bound holds.

    Raises
    ------
    ParameterError
        As `WeightGrid`.
    """

    num_bits: int = 4
    group_size: int = 128

    name: ClassVar[str] = "rtn_weight"
    spec: ClassVar[QuantSpec] = QuantSpec(num_bits=4, window_size=128)
    learns_from_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        WeightGrid(self.num_bits, self.group_size)

    @property
    def code_bits(self) -> float:
        """Bits per weight of the codes alone."""
        return float(self.num_bits)

    def quantize(self, weight: Tensor, stats: LinearStats) -> QuantizedWeight:
        """Encode `weight` [out_features, in_features]; `stats` is checked and not read."""
        self.check(weight, stats)
        grid = WeightGrid(self.num_bits, self.group_size)
        return grid.store(self.name, weight, grid.encode(weight.float()))

    def dequantize(self, quantized: QuantizedWeight) -> Tensor:
        """Return the decoded weight [out_features, in_features] in the source's dtype."""
        return weight_grid.load(quantized)
