"""SKVQ: channels reordered by their ranges, clipped groups per token (Duanmu et al., "SKVQ: Sliding-window Key and Value Cache
Quantization for Large Language Models", 2024).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.quantizers import Quantized, Quantizer, Role, channel_groups
from wqlab.quantizers.calibration import Calibration
from wqlab.registry import register
from wqlab.types import QuantSpec

#: Rounds of k-means; the clusters of a few hundred channels hardly move after five.
_ROUNDS = 10


@register("method", "skvq")
class SKVQQuantizer(Quantizer):
    """All channels of a token, ordered so that those of like range are neighbours, in clipped groups of G.

    The order comes from k-means on each channel's (min, max) with as many clusters as groups; groups then take G neighbours each,
    so that a token's metadata has a fixed size. With a `calibration` the order belongs to the model and costs a cache nothing.
    Without one it is taken from each window itself and stored with it, one number of the source's width per channel, which every
    count of bytes includes.
    The policy ``skvq`` adds the sliding window of 128 tokens and 5 sinks in full precision::

        QuantizedKVCache("skvq", 2, policy="skvq", method_options={"calibration": calibrate(model, input_ids=text)})

    Parameters
    ----------
    spec, role
        As in `Quantizer`. `granularity` takes its default and says no more.
    group_size : int, optional
        G, channels per group over all KV heads; 128 in the paper. Default: the window size.
    clip : float
        In (0, 1]: the share of a group's range that the grid spans, around its middle. The paper searches it per layer and finds
        about 0.92. Around the middle, not around zero, so that a constant group stays exact.
    calibration : Calibration, optional
        Ranges of the model's channels.
    metadata : {"fp16", "fp8"}
        How a group's scale and minimum are stored: in the source's 16 or 32 bits, or, as the paper also tries, in e4m3, 8 bits
        each. In e4m3 the minimum is rounded down and the scale up, so that the grid still holds the group; a constant group is
        then exact only where e4m3 has its number. Groups that reach below -448 or above what the grid spans are refused.

    Error
    -----
    For a group of range ``R = max - min``, its stored scale `s`, and ``r`` the rounding to the source's dtype
    (`wqlab.quantizers.rtn`)::

        |x - y| <= (1 - clip) / 2 * R + s / 2 * (1 + 2^-13) + r(y) + 2 r(max |group|)

    The first term is what clipping costs the largest and smallest elements; those inside have the rest only.
    """

    name = "skvq"
    target = "kv"
    supported_bits = (2, 4)
    window_grids = False
    published_policy = "skvq"
    takes_calibration = True
    supported_granularities = ("window_channel",)

    def __init__(
        self,
        spec: QuantSpec,
        role: Role = "key",
        group_size: int | None = None,
        clip: float = 0.92,
        calibration: Calibration | None = None,
        metadata: Literal["fp16", "fp8"] = "fp16",
    ) -> None:
        super().__init__(spec, role)
        self.group_size = spec.window_size if group_size is None else group_size
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise ParameterError(f"{self.name}: group_size = {group_size!r} is not a whole number of channels, 1 or more")
        if not 0 < clip <= 1:
            raise ParameterError(f"{self.name}: clip = {clip!r} is outside (0, 1]")
        if metadata not in ("fp16", "fp8"):
            raise ParameterError(f"{self.name}: metadata = {metadata!r} is unknown; 'fp16' or 'fp8'")
        self.clip = clip
        self.metadata = metadata
        self.calibration = calibration
        self._settled = self._calibrated(0)

    @property
    def tokens_per_group(self) -> int:
        """1, unless the order is taken from, and stored for, each window."""
        return self.spec.window_size if self.calibration is None else 1

    def for_layer(self, layer_idx: int) -> Quantizer:
        """Return this quantizer with the calibrated order of layer `layer_idx`."""
        if self.calibration is None:
            return self
        own = copy.copy(self)
        own._settled = self._calibrated(layer_idx)
        return own

    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim].

        Returns
        -------
        Quantized
            `codes` in the order of `x`; `scale` [batch, 1, seq, groups]. `minimum` is alike, or where an order is stored
            [batch, 1, windows, window_size * groups + heads * head_dim]: the minima of a window's tokens, then the order's bits.
            With metadata in FP8 both are uint8, the bit patterns, and a number of the order takes two of them.

        Raises
        ------
        UnsupportedError, NonFiniteError
            As `check`, and for a group that FP8 metadata cannot describe.
        """
        self.check(x)
        batch, heads, seq, head_dim = x.shape
        tokens = x.transpose(1, 2).reshape(batch, seq, heads * head_dim)
        order = self._order(tokens)
        spread = self._spread(order, tokens.shape)
        arranged = self._clipped(tokens.gather(2, spread)).unsqueeze(1)
        small = self.metadata == "fp8"
        rows = (self._encode_fp8 if small else channel_groups.encode)(arranged, self.spec.num_bits, self.group_size)
        codes = torch.empty_like(rows.codes).scatter_(3, spread.unsqueeze(1), rows.codes)
        minimum = rows.minimum
        if self._stores_order(heads * head_dim):
            shape = batch, 1, seq // self.spec.window_size
            minimum = torch.cat([minimum.reshape(*shape, -1), _as_bits(order, minimum.dtype).unsqueeze(1)], dim=3)
        codes = codes.reshape(batch, seq, heads, head_dim).transpose(1, 2).contiguous()
        return Quantized(codes, rows.scale, minimum, self.spec, x.dtype)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return the decoded tensor [batch, heads, seq, head_dim], in the source's dtype and order."""
        batch, heads, seq, head_dim = quantized.codes.shape
        channels = heads * head_dim
        minimum = quantized.minimum
        codes = quantized.codes.transpose(1, 2).reshape(batch, seq, channels)
        if self._stores_order(channels):
            stored = channels * (2 if self.metadata == "fp8" else 1)
            order = _from_bits(minimum[:, 0, :, -stored:])
            minimum = minimum[..., :-stored].reshape(batch, 1, seq, -1)
        else:
            order = self._order(codes)
        scale = quantized.scale
        if self.metadata == "fp8":  # four significant bits: exact in every dtype of a source
            scale, minimum = (bits.contiguous().view(torch.float8_e4m3fn).to(quantized.dtype) for bits in (scale, minimum))
        spread = self._spread(order, codes.shape)
        rows = channel_groups.Rows(codes.gather(2, spread).unsqueeze(1), scale, minimum)
        values = channel_groups.decode(rows, self.spec.num_bits, self.group_size, quantized.dtype)
        tokens = torch.empty_like(values).scatter_(3, spread.unsqueeze(1), values)
        return tokens.reshape(batch, seq, heads, head_dim).transpose(1, 2).contiguous()

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return ``num_bits``, a scale and a minimum per group, and a number per window and channel where an order is stored.

        With metadata in FP8 a scale and a minimum take 8 bits each, and a number of the order 16.
        """
        channels = shape[1] * shape[3]
        groups = channel_groups.num_groups(channels, self.group_size)
        stored = 1 / self.spec.window_size if self._stores_order(channels) else 0.0
        own, number = (1, 2) if self.metadata == "fp8" else (dtype.itemsize, dtype.itemsize)
        return self.spec.num_bits + 8 * (own * 2 * groups / channels + number * stored)

    def _encode_fp8(self, arranged: Tensor, num_bits: int, group_size: int) -> channel_groups.Rows:
        """Return what `channel_groups.encode` does, for a grid whose scale and minimum are e4m3, as bit patterns in uint8."""
        batch, heads, seq, channels = arranged.shape
        groups, levels = channel_groups.num_groups(channels, group_size), 2**num_bits - 1
        size = min(group_size, channels)
        # The last channel again fills up the last group, as it does there.
        filled = torch.cat([arranged, arranged[..., -1:].expand(-1, -1, -1, groups * size - channels)], dim=-1)
        grouped = filled.reshape(batch, heads, seq, groups, size).double()
        low, high = grouped.amin(4), grouped.amax(4)
        table = torch.arange(256, dtype=torch.uint8, device=arranged.device).view(torch.float8_e4m3fn).double()
        table = torch.unique(table[table.isfinite()])
        below = (torch.searchsorted(table, low, right=True) - 1).clamp_min(0)
        minimum = table[below]
        wanted = (high - minimum) / levels
        if bool((low < table[0]).any()) or bool((low > table[-1]).any()) or bool((wanted > table[-1]).any()):
            raise UnsupportedError(
                f"{self.name}: groups of the {self.role} reach from {float(low.amin()):.4g} to {float(high.amax()):.4g}, and e4m3 "
                f"ends at {float(table[-1]):g}: a minimum or a scale has no FP8 number; take metadata='fp16'"
            )
        scale = table[torch.searchsorted(table, wanted)]
        steps = (grouped - minimum.unsqueeze(4)) / torch.where(scale == 0, 1.0, scale).unsqueeze(4)
        codes = steps.round().clamp(0, levels).to(torch.uint8).reshape(batch, heads, seq, groups * size)[..., :channels]
        stored = (number.to(torch.float8_e4m3fn).view(torch.uint8) for number in (scale, minimum))
        return channel_groups.Rows(codes.contiguous(), *stored)

    def _calibrated(self, layer_idx: int) -> Tensor | None:
        """Return the order of a calibrated layer, int64 [1, 1, channels]; once per layer, because each decoding needs it."""
        if self.calibration is None:
            return None
        low, high, _ = self.calibration.of(self.role, layer_idx)
        return channel_order(low.reshape(1, 1, -1), high.reshape(1, 1, -1), channel_groups.num_groups(low.numel(), self.group_size))

    def _stores_order(self, channels: int) -> bool:
        """One group has no order to speak of."""
        return self.calibration is None and channels > self.group_size

    def _order(self, tokens: Tensor) -> Tensor:
        """Return int64 [batch, windows, channels], or [1, 1, channels] where it is the same for all, for [batch, seq, channels]."""
        batch, seq, channels = tokens.shape
        groups = channel_groups.num_groups(channels, self.group_size)
        if self._settled is not None:
            if self._settled.shape[2] != channels:
                raise UnsupportedError(
                    f"{self.name}: calibrated for {self._settled.shape[2]} channels in all KV heads, got {channels}; "
                    "calibrate this model"
                )
            return self._settled.to(tokens.device)
        if groups == 1:
            return torch.arange(channels, device=tokens.device)[None, None]
        windows = tokens.reshape(batch, seq // self.spec.window_size, self.spec.window_size, channels)
        return channel_order(windows.amin(2), windows.amax(2), groups)

    def _spread(self, order: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the order of every token, int64 [batch, seq, channels]."""
        if order.shape[:2] == (1, 1) and not self._stores_order(shape[2]):
            return order.expand(*shape)
        return order.repeat_interleave(self.spec.window_size, 1)

    def _clipped(self, arranged: Tensor) -> Tensor:
        """Clamp each group of [batch, seq, channels] to the middle share `clip` of its range."""
        parts = []
        for part in torch.split(arranged, self.group_size, dim=2):
            low, high = part.amin(2, keepdim=True).double(), part.amax(2, keepdim=True).double()
            cut = (1 - self.clip) / 2 * (high - low)
            parts.append(part.clamp((low + cut).to(part.dtype), (high - cut).to(part.dtype)))
        return torch.cat(parts, dim=2)


def channel_order(low: Tensor, high: Tensor, num_clusters: int) -> Tensor:
    """Return an order of channels in which those of like range are neighbours, by k-means on (low, high).

    Parameters
    ----------
    low, high : Tensor
        [..., channels].
    num_clusters : int
        Clusters. They start at channels spread evenly over the widths of the ranges, so the result is the same every time.

    Returns
    -------
    Tensor
        int64 [..., channels]: the channel at each place; clusters of narrow ranges first.
    """
    points = torch.stack([low, high], dim=-1).double()
    channels = points.shape[-2]
    by_width = (points[..., 1] - points[..., 0]).argsort(dim=-1, stable=True)
    places = ((torch.arange(num_clusters, device=low.device) + 0.5) * channels / num_clusters).long()
    centres = points.gather(-2, by_width[..., places, None].expand(*by_width.shape[:-1], num_clusters, 2))
    label = by_width
    for _ in range(_ROUNDS):
        label = (points.unsqueeze(-2) - centres.unsqueeze(-3)).square().sum(-1).argmin(-1)
        sums = torch.zeros_like(centres).scatter_add_(-2, label.unsqueeze(-1).expand_as(points), points)
        counts = torch.zeros_like(centres[..., 0]).scatter_add_(-1, label, torch.ones_like(points[..., 0])).unsqueeze(-1)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    rank = (centres[..., 1] - centres[..., 0]).argsort(dim=-1, stable=True).argsort(dim=-1)
    return rank.gather(-1, label).argsort(dim=-1, stable=True)


def _as_bits(order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of `order` as bit patterns of `dtype`, two of them for uint8: exact, and finite below 31,744 channels."""
    return order.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype)


def _from_bits(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.int32 if stored.dtype.itemsize == 4 else torch.int16).long()
