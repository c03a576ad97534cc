"""What the methods share that divide channels by smoothing factors and then quantize each token."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.quantizers import Quantized, Quantizer, Role, channel_groups
from wqlab.quantizers.calibration import Calibration
from wqlab.types import QuantSpec


class SmoothedQuantizer(Quantizer):
    """Divide each channel by a factor, encode each token on an asymmetric grid, multiply back when decoding.

    With a `calibration` the factors belong to the model and cost a cache nothing: the methods fold them into the projections that
    make queries, keys and values. Without one they are taken from each window itself and stored with it, one number of the source's
    dtype per channel, which every count of bytes includes.

    Parameters
    ----------
    spec, role
        As in `Quantizer`.
    alpha : float
        Migration strength in [0, 1]; 0.5 in the papers.
    calibration : Calibration, optional
        Ranges of the model's channels.

    Error
    -----
    Let `f` be the channel's factor, ``z = x / f`` rounded to the source's dtype, `z'` its decoded value, `s` the token's stored
    scale, and ``r(v) = max(eps |v|, tiny) / 2 * (1 + 2^-12)`` the rounding to the dtype (see `wqlab.quantizers.rtn`)::

        |x - y| <= f (s / 2 * (1 + 2^-13) + r(z') + r(z)) + r(y)
    """

    #: Whether all heads of a token share one scale.
    heads_share: ClassVar[bool]
    takes_calibration = True
    window_grids = False
    supported_granularities = ("window_channel",)

    def __init__(self, spec: QuantSpec, role: Role = "key", alpha: float = 0.5, calibration: Calibration | None = None) -> None:
        super().__init__(spec, role)
        if not 0 <= alpha <= 1:
            raise ParameterError(f"{self.name}: alpha = {alpha!r} is outside [0, 1]")
        self.alpha = alpha
        self.calibration = calibration
        self._layer = 0

    def for_layer(self, layer_idx: int) -> Quantizer:
        """Return this quantizer with the calibrated factors of layer `layer_idx`."""
        if self.calibration is None:
            return self
        self.calibration.of(self.role, layer_idx)  # refuses a layer that is not there
        own = copy.copy(self)
        own._layer = layer_idx
        return own

    @property
    def tokens_per_group(self) -> int:
        """1, unless factors are taken from, and stored for, each window."""
        return self.spec.window_size if self._stores_factors else 1

    @abstractmethod
    def smooth(self, largest: Tensor, query_max: Tensor | None) -> Tensor:
        """Return factors, shaped as `largest` [..., head_dim], the channels' largest absolute values in float64.

        `query_max` is shaped alike, or None without a calibration. Zeros and what is not finite become 1.
        """

    def smooths(self) -> bool:
        """Return whether this side is smoothed at all."""
        return True

    @property
    def _stores_factors(self) -> bool:
        return self.calibration is None and self.smooths()

    def factors(self, x: Tensor) -> Tensor | None:
        """Return the factors for `x` [batch, heads, seq, head_dim], in its dtype, or None for a side that is not smoothed.

        [batch, heads, windows, head_dim] without a calibration, else [1, heads, 1, head_dim].
        """
        if not self.smooths():
            return None
        batch, heads, seq, head_dim = x.shape
        if self.calibration is None:
            size = self.spec.window_size
            largest = x.reshape(batch, heads, seq // size, size, head_dim).abs().amax(3).double()
            found = self.smooth(largest, None)
        else:
            low, high, query = self.calibration.of(self.role, self._layer)
            if low.shape != (heads, head_dim):
                raise UnsupportedError(
                    f"{self.name}: calibrated for [kv_heads, head_dim] = {list(low.shape)}, got {[heads, head_dim]}; "
                    "calibrate this model"
                )
            both = torch.maximum(low.abs(), high.abs()).double().to(x.device)
            found = self.smooth(both, query.double().to(x.device))[None, :, None]
        stored = found.to(x.dtype)
        return torch.where((stored > 0) & torch.isfinite(stored), stored, torch.ones_like(stored))

    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim].

        Returns
        -------
        Quantized
            With H = 1 where heads share a scale, else the heads: `scale` and `minimum` are [batch, H, seq, 1]. Where factors are
            stored, `scale` is [batch, H, windows, window_size + heads / H * head_dim], the scales of a window's tokens and then
            its factors, and `minimum` is [batch, H, windows, window_size].
        """
        self.check(x)
        factors = self.factors(x)
        smoothed = x if factors is None else (x.to(_working(x.dtype)) / self._spread(factors, x.shape[2])).to(x.dtype)
        tokens = self._joined(smoothed)
        rows = channel_groups.encode(tokens, self.spec.num_bits, tokens.shape[3])
        codes = self._parted(rows.codes, x.shape[1])
        scale, minimum = rows.scale, rows.minimum
        if factors is not None and self._stores_factors:
            shape = (x.shape[0], tokens.shape[1], x.shape[2] // self.spec.window_size, self.spec.window_size)
            scale = torch.cat([scale.reshape(shape), self._joined(factors)], dim=3)
            minimum = minimum.reshape(shape)
        return Quantized(codes, scale, minimum, self.spec, x.dtype)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return ``(codes * scale + minimum) * factor`` [batch, heads, seq, head_dim], in the source's dtype."""
        codes, scale, minimum = quantized.codes, quantized.scale, quantized.minimum
        heads, seq = codes.shape[1:3]
        if self._stores_factors:
            factors: Tensor | None = self._parted(scale[..., self.spec.window_size :], heads)
            one = (codes.shape[0], scale.shape[1], seq, 1)
            scale, minimum = scale[..., : self.spec.window_size].reshape(one), minimum.reshape(one)
        else:
            factors = self.factors(codes.to(quantized.dtype))
        tokens = channel_groups.Rows(self._joined(codes), scale, minimum)
        values = self._parted(channel_groups.decode(tokens, self.spec.num_bits, tokens.codes.shape[3], quantized.dtype), heads)
        if factors is None:
            return values
        limit = torch.finfo(quantized.dtype).max
        return (values.to(_working(quantized.dtype)) * self._spread(factors, seq)).clamp_(-limit, limit).to(quantized.dtype)

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return ``num_bits``, a scale and a minimum per token (and head), and a factor per window and channel where stored."""
        _, heads, _, head_dim = shape
        per_token = head_dim * (heads if self.heads_share else 1)
        stored = 1 / self.spec.window_size if self._stores_factors else 0.0
        return self.spec.num_bits + 8 * dtype.itemsize * (2 / per_token + stored)

    def _spread(self, factors: Tensor, seq: int) -> Tensor:
        """Return factors for every token: windows repeated; calibrated ones as they are."""
        wide = factors.to(_working(factors.dtype))
        return wide.repeat_interleave(self.spec.window_size, 2) if self._stores_factors else wide

    def _joined(self, x: Tensor) -> Tensor:
        """Return [batch, 1, seq, heads * head_dim] where heads share a scale."""
        return x.transpose(1, 2).flatten(2).unsqueeze(1) if self.heads_share else x

    def _parted(self, x: Tensor, heads: int) -> Tensor:
        """Undo `_joined`."""
        return x.reshape(x.shape[0], x.shape[2], heads, -1).transpose(1, 2).contiguous() if self.heads_share else x


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32
