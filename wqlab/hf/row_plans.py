"""Windows at widths that differ from row to row, decoded: for evaluations, which ask another question of every row.

A real cache shares one plan among its rows (WindowQuant, Sect. 3.2.1), so an evaluation of single requests would have to run them
one by one. Here every row holds the values that a `wqlab.hf.WindowQuantCache` of its own would decode, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from wqlab import quantizers
from wqlab.errors import ParameterError
from wqlab.types import Granularity

FULL_BITS = 16


class RowPlansCache(DynamicCache):  # type: ignore[misc]
    """A cache whose first tokens per layer are a prompt that is encoded, row by row after a plan of its own.

    Parameters
    ----------
    bit_widths : Tensor
        int64 [batch, layers, windows]: 16 for windows that stay as they are, or bits of the method.
    start : int
        First token of the first window.
    window_size : int
        Tokens per window.
    method, granularity
        As `wqlab.hf.WindowQuantCache`.
    storage_dtype : torch.dtype
        Of full-precision tokens and metadata.
    decoded : dict, optional
        Keeps decoded windows for further caches that are filled with the same prompt.

    Raises
    ------
    ParameterError
        For widths of another shape, or that the method does not have.
    """

    def __init__(
        self,
        bit_widths: Tensor,
        start: int,
        window_size: int = 32,
        method: str = "rtn",
        granularity: Granularity = "window_channel",
        storage_dtype: torch.dtype = torch.float16,
        decoded: dict[Any, Tensor] | None = None,
    ) -> None:
        super().__init__()
        if bit_widths.dim() != 3:
            raise ParameterError(f"bit_widths {list(bit_widths.shape)} must be [batch, layers, windows]")
        self._widths, self._start, self._window, self._storage = bit_widths.cpu(), start, window_size, storage_dtype
        self._decoded_windows = decoded
        self._kind = (method, granularity, window_size)
        self._quantizers = {
            bits: {
                role: quantizers.create(method, bits, window_size, granularity, role)  # type: ignore[arg-type]
                for role in ("key", "value")
            }
            for bits in sorted(set(self._widths.flatten().tolist()) - {FULL_BITS})
        }
        #: Bytes saved against the storage dtype, all rows and layers together. A real cache also notes where the video's tokens
        #: stood, once per row and layer; a negative saving.
        self._saved = 0.0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append K and V [batch, kv_heads, new, head_dim]; the first ones of a layer come back decoded.

        Raises
        ------
        ParameterError
            When the first tokens end before the last window does.
        """
        if self.get_seq_length(layer_idx) == 0:
            self._saved -= key_states.shape[0] * key_states.shape[2] * torch.int32.itemsize
            key_states = self._decoded(key_states, layer_idx, "key")
            value_states = self._decoded(value_states, layer_idx, "value")
        result: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return result

    def report(self) -> dict[str, Any]:
        """Return ``tokens``, ``bytes_held`` (what the encoded windows and the rest take), ``bytes_fp16``, ``bits_per_element``."""
        elements = sum(layer.keys.numel() + layer.values.numel() for layer in self.layers)
        held = elements * self._storage.itemsize - self._saved
        return {
            "tokens": self.get_seq_length(),
            "bytes_held": round(held),
            "bytes_fp16": 2 * elements,
            "bits_per_element": 8 * held / elements if elements else 0.0,
        }

    def _decoded(self, x: Tensor, layer: int, role: str) -> Tensor:
        stop = self._start + self._widths.shape[2] * self._window
        if x.shape[2] < stop or x.shape[0] != len(self._widths):
            raise ParameterError(
                f"K or V {list(x.shape)} does not hold the windows of {len(self._widths)} rows, which end at token {stop}"
            )
        stored = x.to(self._storage)
        video = stored[:, :, self._start : stop].contiguous()
        heads, dim = x.shape[1], x.shape[3]
        widths = self._widths[:, layer]
        decoded = video.clone()
        for bits, sides in self._quantizers.items():
            chosen = widths == bits
            if not bool(chosen.any()):
                continue
            at = chosen.repeat_interleave(self._window, 1).to(x.device)[:, None, :, None]
            decoded = torch.where(at, self._at_width(video, bits, layer, role), decoded)
            cost = sides[role].bits_per_element((1, heads, self._window, dim), self._storage)
            self._saved += int(chosen.sum()) * heads * self._window * dim * (self._storage.itemsize - cost / 8)
        return torch.cat([stored[:, :, : self._start], decoded, stored[:, :, stop:]], dim=2).to(x.dtype)

    def _at_width(self, video: Tensor, bits: int, layer: int, role: str) -> Tensor:
        quantizer, place = self._quantizers[bits][role], (*self._kind, bits, layer, role)
        if self._decoded_windows is None:
            return quantizer.dequantize(quantizer.quantize(video))
        if place not in self._decoded_windows:
            self._decoded_windows[place] = quantizer.dequantize(quantizer.quantize(video))
        return self._decoded_windows[place]
