"""transformers' own QuantizedCache, as its users pick it, with bytes counted the way this package counts them.

Its backends ``quanto`` and ``hqq`` are packages of their own (``pip install optimum-quanto`` or ``hqq``); ``fp8`` needs none but a
newer transformers. What it does differs from KIVI, which it names as its model:

- the whole prompt is encoded at once; the residual fills with generated tokens only;
- when the residual is full, everything is decoded and encoded again, so errors of old tokens add up;
- a group is `q_group_size` neighbours in memory, channels of one token and of the next, for keys as for values.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor
from transformers.cache_utils import QuantizedCache

from wqlab.errors import MissingPartError, ParameterError, UnsupportedError

Backend = Literal["quanto", "hqq", "fp8"]
#: Backend -> module that it imports, and what pip calls it.
_NEEDS = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq")}


class TransformersQuantizedCache(QuantizedCache):  # type: ignore[misc]
    """A `transformers.QuantizedCache` that can say what it holds.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Whose config names the layers.
    backend : {"quanto", "hqq", "fp8"}
        Who encodes.
    **options
        ``nbits``, ``axis_key``, ``axis_value``, ``q_group_size``, ``residual_length``, with transformers' own defaults (4 bits,
        groups of 64, residual 128); none for ``fp8``.

    Raises
    ------
    MissingPartError
        When the backend is not installed, with the line that installs it.
    ParameterError
        For another backend, or an option that it refuses.
    UnsupportedError
        At the first tokens, when they cannot be cut into groups (a prompt too short for odd head sizes).

    Examples
    --------
    >>> cache = TransformersQuantizedCache(model, "quanto", nbits=4)  # doctest: +SKIP
    >>> model.generate(**inputs, **cache_argument(model, cache))  # doctest: +SKIP
    """

    def __init__(self, model: Any, backend: Backend = "quanto", **options: Any) -> None:
        if backend not in (*_NEEDS, "fp8"):
            raise ParameterError(f"backend = {backend!r} is not one of quanto, hqq, fp8")
        if not is_installed(backend):
            raise MissingPartError(
                f"transformers' QuantizedCache needs {_NEEDS[backend][1]} for backend {backend!r}: pip install {_NEEDS[backend][1]}"
            )
        self.group_size = options.get("q_group_size", 64) if backend in _NEEDS else 1
        try:
            super().__init__(backend, model.config.get_text_config(decoder=True), **options)
        except ImportError as error:  # there, but too old for this transformers
            raise MissingPartError(f"transformers' QuantizedCache, backend {backend!r}: {error}") from error
        except (TypeError, ValueError) as error:
            raise ParameterError(f"transformers' QuantizedCache, backend {backend!r}: {error}") from error
        self.backend = backend

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append K and V [batch, kv_heads, new, head_dim]; see `transformers.QuantizedCache`.

        Raises
        ------
        UnsupportedError
            When the elements of one batch row are no multiple of the group: the message says how many tokens would be.
        """
        elements = key_states.shape[1] * key_states.shape[2] * key_states.shape[3]
        if self.get_seq_length(layer_idx) == 0 and elements % self.group_size:
            raise UnsupportedError(
                f"layer {layer_idx}: {key_states.shape[2]} tokens of {key_states.shape[1]} heads x {key_states.shape[3]} channels "
                f"are {elements} elements, no multiple of q_group_size = {self.group_size}; "
                "take a divisor of head_dim as q_group_size"
            )
        result: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return result

    def tensors(self) -> Iterator[Tensor]:
        """Yield every plain tensor held, codes, scales and zero points among them, each storage once."""
        seen: set[int] = set()
        for layer in self.layers:
            names = ("_quantized_keys", "_quantized_values", "keys", "values")
            for held in (getattr(layer, name, None) for name in names):
                for tensor in _plain(held):
                    if tensor.numel() and tensor.untyped_storage().data_ptr() not in seen:
                        seen.add(tensor.untyped_storage().data_ptr())
                        yield tensor

    def nbytes(self) -> int:
        """Return the bytes of the storages behind all tensors held."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    def report(self) -> dict[str, Any]:
        """Return ``tokens``, ``bytes_held``, ``bytes_fp16`` and ``bits_per_element``, as `QuantizedKVCache.report` does."""
        elements = sum(_elements(layer) for layer in self.layers)
        held = self.nbytes()
        return {
            "tokens": self.get_seq_length(),
            "bytes_held": held,
            "bytes_fp16": 2 * elements,
            "bits_per_element": 8 * held / elements if elements else 0.0,
        }

    def describe(self) -> str:
        """Return the report as one line."""
        r = self.report()
        saved = f"{r['bytes_fp16'] / r['bytes_held']:.2f}x smaller than FP16" if r["bytes_held"] else "empty"
        bits = f"{r['bytes_held']:,} bytes, {r['bits_per_element']:.2f} bits/element"
        return f"{r['tokens']} tokens (transformers, {self.backend}): {bits}, {saved}"


def is_installed(backend: Backend) -> bool:
    """Return whether the package behind a backend is here; ``fp8`` needs none."""
    return backend not in _NEEDS or _found(_NEEDS[backend][0])


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def _plain(held: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside tensors of other classes, tuples and dicts: what the backends return."""
    if isinstance(held, dict):
        held = tuple(held.values())
    if isinstance(held, (tuple, list)):
        for part in held:
            yield from _plain(part)
    elif type(held) is Tensor:
        yield held
    elif isinstance(held, Tensor):  # a subclass that wraps others, as quanto's
        yield from _plain(tuple(vars(held).values()))


def _elements(layer: Any) -> int:
    """Return the elements of K and V that a layer represents."""
    if getattr(layer, "_quantized_keys", None) is None:
        return 0
    per_token = 0
    for decoded in (layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)):
        per_token += decoded.shape[0] * decoded.shape[1] * decoded.shape[3]
    return per_token * int(layer.get_seq_length())
