"""A transformers cache that keeps K and V quantized, for any decoder that accepts a `Cache`.

`update` hands back ordinary tensors, so no attention function is replaced: earlier tokens as they are held (decoded windows,
full-precision tail) and the new ones as they came. The tokens of one forward pass therefore see each other in full precision,
and the cache's loss from the next pass on, which is how both papers prefill.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from wqlab import quantizers
from wqlab.cache import policies
from wqlab.cache.segments import LayerSegments, TensorSegments
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.hf.rotary import RotaryWatch, UnrotatedKeys
from wqlab.ops import cq_encode
from wqlab.types import Granularity


class SegmentsLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a cache that holds its tokens in segments, packed or not.

    Parameters
    ----------
    layer_idx : int
        For error messages.
    new_segments : callable
        Returns empty segments, with ``crop``, ``select_rows`` and ``len``.
    """

    is_compileable = False
    # A window that was encoded and cut again has lost its exact values, so a rollback does leave a trace; `crop` itself works.
    is_croppable = False

    def __init__(self, layer_idx: int, new_segments: Callable[[], Any]) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._new_segments = new_segments
        self.segments = new_segments()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note device and dtype of the first tokens."""
        self.device, self.dtype, self.is_initialized = key_states.device, key_states.dtype, True

    def get_seq_length(self) -> int:
        """Return the tokens held."""
        return len(self.segments)

    def reset(self) -> None:
        """Forget everything."""
        self.segments = self._new_segments()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        A positive number is the length to keep, which is what transformers before 5.24 passes. A window that is cut returns to
        full precision at its decoded values.
        """
        keep = tokens_to_remove if tokens_to_remove > 0 else len(self.segments) + tokens_to_remove
        self.segments.crop(max(keep, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick the batch rows `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows `indices`."""
        self.segments.select_rows(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        self.segments.select_rows(lambda t: t.repeat_interleave(repeats, dim=0))


class SegmentsCache(Cache):  # type: ignore[misc]
    """A cache of `SegmentsLayer`s, which can say what it holds."""

    def nbytes(self) -> int:
        """Return the bytes held by all layers."""
        return sum(layer.segments.nbytes() for layer in self.layers)

    def shared_nbytes(self) -> int:
        """Return the bytes that decoding needs beside the cache and that belong to the model; 0 for most methods."""
        return 0

    def report(self) -> dict[str, Any]:
        """Return what is held.

        Returns
        -------
        dict
            ``tokens`` per layer; ``tokens_per_width`` (bits -> tokens, summed over K and V of all layers); ``bytes_held``;
            ``bytes_fp16``, what the same elements take in FP16; ``bits_per_element``, metadata and padding included (0.0
            for an empty cache); ``bytes_shared``, what belongs to the model and not to this cache, such as codebooks, and is in
            none of the others.
        """
        widths: dict[int, int] = {}
        elements = 0
        for layer in self.layers:
            elements += layer.segments.numel()
            for bits, tokens in layer.segments.tokens_per_width().items():
                widths[bits] = widths.get(bits, 0) + tokens
        held = self.nbytes()
        return {
            "tokens": self.get_seq_length(),
            "tokens_per_width": dict(sorted(widths.items())),
            "bytes_held": held,
            "bytes_fp16": 2 * elements,
            "bits_per_element": 8 * held / elements if elements else 0.0,
            "bytes_shared": self.shared_nbytes(),
        }

    def describe(self) -> str:
        """Return the report as one line."""
        r = self.report()
        total = sum(r["tokens_per_width"].values()) or 1
        mix = ", ".join(f"{tokens / total:.0%} at {bits} bits" for bits, tokens in r["tokens_per_width"].items())
        saved = f"{r['bytes_fp16'] / r['bytes_held']:.2f}x smaller than FP16" if r["bytes_held"] else "empty"
        size = f"{r['bytes_held']:,} bytes, {r['bits_per_element']:.2f} bits/element"
        shared = f"; {r['bytes_shared']:,} bytes of codebooks belong to the model" if r["bytes_shared"] else ""
        return f"{r['tokens']} tokens ({mix or 'none'}): {size}, {saved}{shared}"


class QuantizedKVLayer(SegmentsLayer):
    """One layer of `QuantizedKVCache`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append K and V [batch, kv_heads, new, head_dim]; return all tokens' K and V in the model's dtype, in original order.

        Raises
        ------
        NonFiniteError, UnsupportedError
            Naming the layer; the cache is as before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.segments.key.parts(key_states.dtype), self.segments.value.parts(value_states.dtype)
        try:
            self.segments.append(key_states, value_states)
        except (NonFiniteError, UnsupportedError) as error:
            raise type(error)(f"layer {self.layer_idx}: {error}") from error
        return torch.cat([*past[0], key_states], dim=2), torch.cat([*past[1], value_states], dim=2)


class QuantizedKVCache(SegmentsCache):
    """A cache for ``model.generate`` whose old tokens are encoded by one method at one width.

    Parameters
    ----------
    method : str
        A registered quantizer.
    num_bits : int
        Bits per code.
    policy : str
        ``"windowed"`` or ``"full"`` (nothing encoded, the baseline), or another registered policy.
    window_size : int
        Tokens per window.
    granularity : {"window_channel", "window_head", "window"}
        Which elements of a window share scale and minimum.
    storage_dtype : torch.dtype, optional
        Of full-precision tokens and metadata. Default: the model's dtype. A model computing in float32 on a CPU holds with
        ``torch.float16`` what it would hold on a GPU.
    method_options : mapping, optional
        The quantizer's own options, for example ``{"calibration": calibrate(model, input_ids=text)}``.
    rotary : RotaryWatch, optional
        ``watch_rotary(model)``: keys are held, and so encoded, as they are before their rotary positions. Codebooks that were
        learnt from such keys need it; other methods take it too. Positions cost 4 bytes per token (12 with M-RoPE), once for all
        layers.
    **policy_options
        For the policy: ``residual_length``, ``sink_windows``.

    Raises
    ------
    UnknownNameError, ParameterError
        For a setting that cannot be; at construction, not in the middle of a generation.

    Notes
    -----
    Windows count from the first column of the batch, so the pads of a left-padded batch are part of the first windows.

    Examples
    --------
    >>> cache = QuantizedKVCache(num_bits=4)
    >>> model.generate(**inputs, **cache_argument(model, cache))  # doctest: +SKIP
    >>> print(cache.describe())  # doctest: +SKIP
    """

    def __init__(
        self,
        method: str = "rtn",
        num_bits: int = 4,
        policy: str = "windowed",
        window_size: int = 32,
        granularity: Granularity = "window_channel",
        storage_dtype: torch.dtype | None = None,
        method_options: Mapping[str, Any] | None = None,
        rotary: RotaryWatch | None = None,
        **policy_options: Any,
    ) -> None:
        if storage_dtype is not None and storage_dtype not in quantizers.DTYPES:
            raise ParameterError(f"storage_dtype = {storage_dtype} is not one of {', '.join(map(str, quantizers.DTYPES))}")
        rules = policies.create(policy, window_size=window_size, **policy_options)
        options = dict(method_options or {})
        if "codebooks" in options:
            options.setdefault("encoder", cq_encode.encode)
        key, value = (quantizers.create(method, num_bits, window_size, granularity, role, **options) for role in ("key", "value"))
        books = getattr(key, "codebooks", None)
        if books is not None and (books.rotary == "before") != (rotary is not None):
            needed = "pass rotary=watch_rotary(model)" if rotary is None else "leave rotary out"
            raise ParameterError(f"these codebooks are of keys {books.rotary} the rotary positions: {needed}")
        super().__init__(layers=[])
        self.rotary = rotary

        def new_segments(layer_idx: int) -> LayerSegments:
            sides = [(side.for_layer(layer_idx), rules.for_role(side.role), storage_dtype) for side in (key, value)]
            keys = TensorSegments(*sides[0]) if rotary is None else UnrotatedKeys(rotary, *sides[0])
            return LayerSegments(keys, TensorSegments(*sides[1]))

        self._new_segments = new_segments

    def assume_positions(self, positions: Tensor) -> None:
        """Say the positions [batch, seq] (M-RoPE: [axes, batch, seq]) of tokens that are appended without a pass of the model.

        Nothing to do for a cache that keeps keys with their rotary positions.
        """
        if self.rotary is not None:
            self.rotary.note(positions)

    def nbytes(self) -> int:
        """Return the bytes held by all layers; positions that layers share count once."""
        held = (getattr(layer.segments.key, "positions", None) for layer in self.layers)
        positions = {p.data_ptr(): p.nbytes for p in held if p is not None}
        total: int = super().nbytes() + sum(positions.values())
        return total

    def shared_nbytes(self) -> int:
        """Return the bytes of codebooks and the like, of the layers that are in use."""
        layers: list[LayerSegments] = [layer.segments for layer in self.layers]
        return sum(side.quantizer.shared_nbytes() for layer in layers for side in (layer.key, layer.value))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to layer `layer_idx`, creating layers as they are met; see `QuantizedKVLayer.update`."""
        while len(self.layers) <= layer_idx:
            new = len(self.layers)
            self.layers.append(QuantizedKVLayer(new, partial(self._new_segments, new)))
        result: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return result


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return ``{name: cache}`` with the name that this model's `forward` and `generate` know: ``cache``, or ``past_key_values``.

    transformers 5.24 renamed the argument; the old name still works there, with a warning.
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}
