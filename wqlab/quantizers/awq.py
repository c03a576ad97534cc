"""AWQ: input channels that carry large activations are scaled up before rounding (Lin et al., "AWQ: Activation-aware Weight
Quantization for LLM Compression and Acceleration", MLSys 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wqlab.errors import ParameterError
from wqlab.quantizers import weight_grid
from wqlab.quantizers.weight_grid import WeightGrid
from wqlab.quantizers.weights import LinearStats, QuantizedWeight, WeightQuantizer
from wqlab.registry import register
from wqlab.types import QuantSpec

#: Ratios that the search tries: 0, 1/20 ... 19/20. The first one is plain round to nearest.
GRID_POINTS = 20
#: Channel scales below this share of the largest one are raised to it, so that channels that never fire divide nothing by zero.
_SMALLEST = 1e-4


@register("method", "awq")
@dataclass(frozen=True)
class AWQQuantizer(WeightQuantizer):
    """Round to nearest of ``W diag(s)`` per group, read as ``W ~ Q(W diag(s)) diag(1 / s)`` (Sect. 3.2, Eq. 4 and 5).

    ``s = m^ratio`` with `m` the mean absolute input of each channel, brought to ``sqrt(max s * min s) = 1``. The ratio is searched
    over `GRID_POINTS` values in [0, 1), and the one with the smallest error of the layer's output over the calibration's inputs is
    kept. Ratio 0 is among them, so on those inputs AWQ is never worse than plain rounding.

    Scales are searched per layer. In the published deployment `s` is folded into the operation before, which layers that read one
    input must then agree on; here each layer keeps its own as ``scales["channel"]``, float16 per input channel, and pays for it.
    The published search of a clipping range on top is not done.

    Parameters
    ----------
    num_bits, group_size : int
        As in `WeightGrid`.
    search : bool
        False leaves out `s`, which is the method ``rtn_weight``.

    Raises
    ------
    ParameterError
        For an option outside its limits.
    """

    num_bits: int = 4
    group_size: int = 128
    search: bool = True

    name: ClassVar[str] = "awq"
    spec: ClassVar[QuantSpec] = QuantSpec(num_bits=4, window_size=128)

    def __post_init__(self) -> None:
        WeightGrid(self.num_bits, self.group_size)
        if not isinstance(self.search, bool):
            raise ParameterError(f"{self.name}: search = {self.search!r} is neither True nor False")

    @property
    def code_bits(self) -> float:
        """Bits per weight of the codes alone."""
        return float(self.num_bits)

    def quantize(self, weight: Tensor, stats: LinearStats) -> QuantizedWeight:
        """Encode `weight` [out_features, in_features] on the device where it lies."""
        self.check(weight, stats)
        grid = WeightGrid(self.num_bits, self.group_size)
        source = weight.float()
        if not self.search:
            return grid.store(self.name, weight, grid.encode(source))
        stats = stats.to(weight.device)
        candidates = channel_scales(stats.mean_abs)
        # Not `weighted_error`, which waits for the device each time: twenty numbers are compared at the end, on the device.
        hessian = stats.hessian.float()
        losses = []
        for scale in candidates:
            lost = self._decoded(grid, source, scale) - source
            losses.append((lost @ hessian * lost).sum())
        # A candidate that overflows is none; argmin would take NaN for the smallest.
        best = torch.stack(losses).nan_to_num_(nan=torch.inf).argmin()
        scale = candidates[best].clone()  # not a view that keeps all candidates alive
        return grid.store(self.name, weight, grid.encode(source * scale.float()), scale)

    def dequantize(self, quantized: QuantizedWeight) -> Tensor:
        """Return the decoded weight [out_features, in_features] in the source's dtype."""
        return weight_grid.load(quantized)

    @staticmethod
    def _decoded(grid: WeightGrid, source: Tensor, scale: Tensor) -> Tensor:
        """Return what `source` float32 [out, in] comes back as with channel scales [in]."""
        return grid.decode(grid.encode(source * scale.float())) / scale.float()


def channel_scales(mean_abs: Tensor) -> Tensor:
    """Return the candidates, float16 [GRID_POINTS, in]: ``mean_abs^ratio`` over the geometric mean of its two ends.

    A calibration of zeros gives ones.
    """
    relative = mean_abs.double() / mean_abs.double().amax().clamp_min(torch.finfo(torch.float32).tiny)
    ratios = torch.arange(GRID_POINTS, device=mean_abs.device, dtype=torch.float64).unsqueeze(1) / GRID_POINTS
    powers = (relative**ratios).clamp_(min=_SMALLEST)
    return (powers / (powers.amax(1, keepdim=True) * powers.amin(1, keepdim=True)).sqrt_()).half()
