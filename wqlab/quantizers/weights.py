"""Quantizers of weights: what one linear layer becomes, exactly as it is stored, and what its inputs say about which error matters.

A file of this package that registers one `WeightQuantizer` under kind ``"method"`` is a method of weights; `wqlab.hf.linears` puts
it into every linear layer of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from wqlab import registry
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.quantizers import DTYPES, Target, check_finite
from wqlab.types import QuantSpec, VQSpec


@dataclass(frozen=True, eq=False)
class LinearStats:
    """What calibration tells of the inputs x [tokens, in_features] of one linear layer.

    Parameters
    ----------
    hessian : Tensor
        float32 [in_features, in_features]: the mean of x xT, half the Hessian of the layer's squared output error.
    mean_abs : Tensor
        float32 [in_features]: the mean of abs(x).
    tokens : int
        Tokens that were read.

    Raises
    ------
    NonFiniteError
        When a number is NaN or infinite.
    ParameterError
        When the shapes do not fit each other.
    """

    hessian: Tensor
    mean_abs: Tensor
    tokens: int

    def __post_init__(self) -> None:
        size = self.mean_abs.shape[0]
        if self.hessian.shape != (size, size) or self.mean_abs.dim() != 1 or self.tokens < 1:
            raise ParameterError(
                f"calibration: hessian {list(self.hessian.shape)}, mean_abs {list(self.mean_abs.shape)} and tokens = {self.tokens} "
                "must be [in, in], [in] and 1 or more"
            )
        check_finite(self.hessian, "calibration: the Hessian")
        check_finite(self.mean_abs, "calibration: mean_abs")

    @classmethod
    def of_inputs(cls, x: Tensor) -> LinearStats:
        """Return the statistics of inputs [tokens, in_features]."""
        x = x.float()
        return cls(x.T @ x / x.shape[0], x.abs().mean(0), x.shape[0])

    def to(self, device: torch.device) -> LinearStats:
        """Return them on `device`."""
        return LinearStats(self.hessian.to(device), self.mean_abs.to(device), self.tokens)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """An encoded weight. Its tensors are exactly what is stored, so their bytes are the cost.

    Parameters
    ----------
    method : str
        The registry key of the quantizer that reads it.
    codes, codebooks, scales : dict of str to Tensor
        Packed codes; codebooks (with whatever table is stored); scales, zero points, signs and other metadata.
    shape : tuple of int
        [out_features, in_features].
    dtype : torch.dtype
        Of the source and of what `WeightQuantizer.dequantize` returns.
    meta : dict
        JSON-ready numbers and words that decoding needs beyond the tensors, such as a seed.
    losses : tuple of float
        `weighted_error` after each step of the learning, for methods that learn. Not stored.
    """

    method: str
    codes: dict[str, Tensor]
    codebooks: dict[str, Tensor]
    scales: dict[str, Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype
    meta: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()

    def bits(self) -> dict[str, float]:
        """Return bits per weight of ``codes``, ``codebooks``, ``scales`` and their ``total``, padding included."""
        weights = self.shape[0] * self.shape[1]
        parts = {part: 8 * sum(t.nbytes for t in getattr(self, part).values()) / weights for part in PARTS}
        return parts | {"total": sum(parts.values())}

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return it on `device`."""
        codes, codebooks, scales = ({name: t.to(device) for name, t in getattr(self, part).items()} for part in PARTS)
        return replace(self, codes=codes, codebooks=codebooks, scales=scales)


PARTS = ("codes", "codebooks", "scales")


class WeightQuantizer(ABC):
    """One method of weights at one setting; holds nothing of a layer, so one object serves all.

    Subclasses are frozen dataclasses whose fields are the options; they check them in ``__post_init__``.

    Attributes
    ----------
    name : str
        The registry key.
    spec : QuantSpec or VQSpec
        What the method was published with. A `QuantSpec`'s ``window_size`` is its group of input channels.
    learns_from_data : bool
        Whether `quantize` reads the statistics; those that do not still take them.
    """

    name: ClassVar[str]
    target: ClassVar[Target] = "weight"
    spec: ClassVar[QuantSpec | VQSpec]
    learns_from_data: ClassVar[bool] = True

    @property
    def code_bits(self) -> float:
        """Bits per weight of the codes alone, before padding."""
        return self.spec.code_bits if isinstance(self.spec, VQSpec) else float(self.spec.num_bits)

    @property
    def stored_entries(self) -> int:
        """Entries of one stored codebook; 0 for methods without codebooks."""
        return self.spec.num_entries if isinstance(self.spec, VQSpec) else 0

    @abstractmethod
    def quantize(self, weight: Tensor, stats: LinearStats) -> QuantizedWeight:
        """Encode `weight` [out_features, in_features] on the device where it lies.

        The same seed, weight and statistics give the same codes on one machine.

        Raises
        ------
        UnsupportedError
            For a shape or dtype that the method cannot serve.
        NonFiniteError
            When the weight holds NaN or infinity.
        ParameterError
            When the statistics are of another layer.
        """

    @abstractmethod
    def dequantize(self, quantized: QuantizedWeight) -> Tensor:
        """Return the decoded weight [out_features, in_features] in the source's dtype."""

    def entry_indices(self, quantized: QuantizedWeight) -> Tensor | None:
        """Return int64 [books, positions]: which entry each position reads, per codebook. None for methods without codebooks.

        Positions of one codebook are in the order of the weight's rows and, inside, of its columns; -1 where a codebook with a
        smaller scope has fewer of them.
        """
        return None

    def relabel(self, quantized: QuantizedWeight, order: Tensor) -> QuantizedWeight:
        """Return the same weight with entries renamed: new entry ``i`` of book ``b`` is the old entry ``order[b, i]``.

        Raises
        ------
        UnsupportedError
            For methods without codebooks.
        """
        raise UnsupportedError(f"{self.name} has no codebook whose entries could be reordered")

    def check(self, weight: Tensor, stats: LinearStats) -> None:
        """Refuse what no method here can encode.

        Raises
        ------
        UnsupportedError, NonFiniteError, ParameterError
            Naming the value, the limit and the way out.
        """
        if weight.dim() != 2 or 0 in weight.shape:
            raise UnsupportedError(f"{self.name}: shape {list(weight.shape)} is not [out_features, in_features] of 1 or more each")
        if weight.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise UnsupportedError(f"{self.name}: dtype {weight.dtype} is not one of {known}; convert it first")
        if stats.mean_abs.shape[0] != weight.shape[1]:
            raise ParameterError(
                f"{self.name}: statistics of {stats.mean_abs.shape[0]} inputs do not belong to a layer of {weight.shape[1]}"
            )
        check_finite(weight, "weight")


def create_weight_quantizer(method: str, **options: Any) -> WeightQuantizer:
    """Return the weight quantizer registered as `method`; `options` are the method's own.

    Raises
    ------
    UnknownNameError
        For a method that does not exist.
    ParameterError
        For a method of KV caches, a value outside the method's limits, or an option that it does not have.
    """
    found = registry.lookup("method", method)
    if found.target != "weight":
        raise ParameterError(f"method {method!r} quantizes KV caches, not weights: pass it to QuantizedKVCache")
    try:
        made: WeightQuantizer = found(**options)
    except TypeError as error:
        raise ParameterError(f"{method}: {error}") from error
    return made


def weighted_error(weight: Tensor, decoded: Tensor, hessian: Tensor) -> float:
    """Return ``tr(D H D^T) / tr(W H W^T)`` with D = `decoded` - `weight`: the squared error of the layer's output over its size.

    In float64. 0 for a layer whose output is all zeros and stays so, infinity when it does not.
    """
    w, h = weight.double(), hessian.double()
    d = decoded.double() - w
    lost, size = float((d @ h * d).sum()), float((w @ h * w).sum())
    if size == 0:
        return 0.0 if lost == 0 else float("inf")
    return lost / size


def reorder_by_frequency(quantizer: WeightQuantizer, quantized: QuantizedWeight) -> QuantizedWeight:
    """Return the same weight with each codebook's entries sorted by use: index 0 is the most frequent one (VQ-LLM, Sect. 5.1).

    A pure re-labelling: the decoded weight is the same to the bit. Entries that are used alike keep their order.
    """
    indices = quantizer.entry_indices(quantized)
    if indices is None:
        raise UnsupportedError(f"{quantizer.name} has no codebook whose entries could be reordered")
    counts = count_entries(indices, quantizer.stored_entries)
    return quantizer.relabel(quantized, counts.argsort(dim=1, descending=True, stable=True))


def count_entries(indices: Tensor, num_entries: int) -> Tensor:
    """Return int64 [books, num_entries]: how often each entry is read, from indices [books, positions] (-1: none)."""
    books = indices.shape[0]
    shifted = indices + torch.arange(books, device=indices.device).unsqueeze(1) * num_entries
    return torch.bincount(shifted[indices >= 0], minlength=books * num_entries).reshape(books, num_entries)
