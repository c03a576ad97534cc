"""Quantizers: how the values of one tensor become codes, and back. One file per published method.

The registry knows each class under kind ``"method"``; a new file in this package that registers one class can be used by name
wherever a method is chosen (``QuantizedKVCache(method=...)``), and the contract tests run over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from wqlab import registry
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.types import Granularity, QuantSpec

Target = Literal["kv", "weight"]
#: Which tensor a quantizer serves. Methods that treat keys and values alike use it in error messages only.
Role = Literal["key", "value", "weight"]
#: The dtypes whose metadata and error bounds are worked out.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class Quantized:
    """An encoded tensor: ``x ~ code * scale + minimum``, element by element over its group.

    Methods whose `Quantizer.window_grids` is False may group otherwise and store more of their own in `scale` and `minimum`; each
    says what in its `quantize`.

    Parameters
    ----------
    codes : Tensor
        uint8 [batch, heads, seq, head_dim], one code per element (`Quantizer.codes_per_token` says where it is one per several),
        not packed (packing is the business of `wqlab.layouts`).
    scale, minimum : Tensor
        In the source's dtype, four axes in the same order; an axis has length 1 where a group spans it, and axis 2 counts
        groups along the sequence. Batch is always axis 0 and sequence always axis 2, so that caches can select and append
        without knowing the method.
    spec : QuantSpec
        Bits and groups.
    dtype : torch.dtype
        Of the source, and of what `Quantizer.dequantize` returns.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    spec: QuantSpec
    dtype: torch.dtype


class Quantizer(ABC):
    """One method at one setting. It holds nothing of a request, so one object may serve all layers (`for_layer`).

    Parameters
    ----------
    spec : QuantSpec
        Bits, window size and granularity.
    role : {"key", "value", "weight"}
        The tensor it serves.

    Attributes
    ----------
    name : str
        The registry key.
    target : {"kv", "weight"}
        What the method was published for.
    supported_bits, supported_granularities : tuple
        What `spec` may ask for.
    relative_error : float, optional
        For codes that are floating-point numbers: the largest error over the element's size. None for grids of equal steps.
    window_grids : bool
        Whether `Quantized` holds one scale and one minimum per window (and channel, head), and nothing else. Only then can packed
        windows be read without decoding them first, as `wqlab.windowquant` does.
    takes_calibration : bool
        Whether the method has an option ``calibration``, and was published with one.
    takes_codebooks : bool
        Whether the method needs an option ``codebooks`` that was learnt from the model (`wqlab.quantizers.codebooks`).
    published_policy : str
        The cache policy that the method was published with; its defaults are the paper's numbers.

    Raises
    ------
    ParameterError
        For bits, window size or granularity outside those limits.
    """

    name: ClassVar[str]
    target: ClassVar[Target] = "kv"
    supported_bits: ClassVar[tuple[int, ...]] = (2, 4, 8)
    supported_granularities: ClassVar[tuple[Granularity, ...]] = get_args(Granularity)
    relative_error: ClassVar[float | None] = None
    window_grids: ClassVar[bool] = True
    takes_calibration: ClassVar[bool] = False
    takes_codebooks: ClassVar[bool] = False
    published_policy: ClassVar[str] = "windowed"

    def __init__(self, spec: QuantSpec, role: Role = "key") -> None:
        self.check_spec(spec)
        self.spec = spec
        self.role = role

    @classmethod
    def check_spec(cls, spec: QuantSpec) -> None:
        """Raise ParameterError for bits, window size or granularity outside the method's limits."""
        if spec.num_bits not in cls.supported_bits:
            raise ParameterError(f"{cls.name}: num_bits = {spec.num_bits!r} is not one of {_listed(cls.supported_bits)}")
        if spec.granularity not in cls.supported_granularities:
            known = _listed(cls.supported_granularities)
            raise ParameterError(f"{cls.name}: granularity = {spec.granularity!r} is not one of {known}")
        if isinstance(spec.window_size, bool) or not isinstance(spec.window_size, int) or spec.window_size < 1:
            raise ParameterError(f"{cls.name}: window_size = {spec.window_size!r} is not a whole number of tokens, 1 or more")

    @property
    def tokens_per_group(self) -> int:
        """Tokens that are encoded together: `seq` of `quantize` is a multiple of it. 1 for methods that work per token."""
        return self.spec.window_size

    @property
    def code_bits(self) -> int:
        """Bits of one code; `spec.num_bits` counts bits per element, which is another number where a code stands for several."""
        return self.spec.num_bits

    def codes_per_token(self, head_dim: int) -> int:
        """Return the codes of one token and head: `head_dim`, or fewer where a code stands for several elements."""
        return head_dim

    def for_layer(self, layer_idx: int) -> Quantizer:
        """Return the quantizer of one layer; methods without a calibration are the same in all."""
        return self

    def shared_nbytes(self) -> int:
        """Return the bytes of what decoding needs beside the codes and belongs to the model, such as codebooks; 0 for most."""
        return 0

    @abstractmethod
    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim]; windows are encoded independently of each other.

        Raises
        ------
        UnsupportedError
            When shape or dtype cannot be served; `check` words it.
        NonFiniteError
            When `x` holds NaN or infinity.
        """

    @abstractmethod
    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return the decoded tensor [batch, heads, seq, head_dim], in the source's dtype."""

    @abstractmethod
    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return the exact bits per element, codes and metadata, for a tensor of `shape` and `dtype`.

        Bytes that a layout adds to fill its last byte (odd head sizes) are not in it; a cache reports those it holds.
        """

    def check(self, x: Tensor) -> None:
        """Refuse what no method here can encode: wrong rank, dtype or length, NaN, infinity.

        Raises
        ------
        UnsupportedError, NonFiniteError
            Naming the value, the limit and the way out.
        """
        if x.dim() != 4 or 0 in (x.shape[0], x.shape[1], x.shape[3]):
            raise UnsupportedError(f"{self.name}: shape {list(x.shape)} is not [batch, heads, seq, head_dim] of 1 or more each")
        if x.dtype not in DTYPES:
            raise UnsupportedError(f"{self.name}: dtype {x.dtype} is not one of {_listed(DTYPES)}; convert the {self.role} first")
        size = self.tokens_per_group
        if x.shape[2] % size:
            raise UnsupportedError(
                f"{self.name}: seq = {x.shape[2]} is no multiple of window_size = {size}; "
                f"keep the last {x.shape[2] % size} tokens in full precision (policy 'windowed' does)"
            )
        check_finite(x, self.role)


def check_finite(x: Tensor, what: str) -> None:
    """Raise NonFiniteError when `x` holds NaN or infinity, saying how many and in which tensor."""
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        bad = int((~finite).sum())
        nans = int(torch.isnan(x).sum())
        raise NonFiniteError(
            f"{what}: {bad} of {x.numel()} elements are not finite ({nans} NaN, {bad - nans} infinite), so no range can be taken; "
            "run the model in bfloat16 or float32, or look for the layer that overflows"
        )


def create(
    method: str,
    num_bits: int = 4,
    window_size: int = 32,
    granularity: Granularity = "window_channel",
    role: Role = "key",
    **options: Any,
) -> Quantizer:
    """Return the quantizer registered as `method`; `options` are the method's own.

    Raises
    ------
    UnknownNameError
        For a method that does not exist.
    ParameterError
        For a method of weights, a setting outside the method's limits, or an option it does not have.
    """
    found: type[Quantizer] = registry.lookup("method", method)
    if found.target != "kv":
        raise ParameterError(f"method {method!r} quantizes weights, not a KV cache: apply it with wqlab.hf.quantize_linears")
    spec = QuantSpec(num_bits=num_bits, window_size=window_size, granularity=granularity)
    try:
        return found(spec, role, **options)
    except TypeError as error:
        raise ParameterError(f"{method}: {error}") from error


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
