"""CQ, coupled quantization: neighbouring channels share one index into a learnt codebook (Zhang et al., "KV Cache is 1 Bit Per
Channel: Efficient Large Language Model Inference with Coupled Quantization", 2024; VQ-LLM's CQ-2 and CQ-4).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.quantizers import Quantized, Quantizer, Role
from wqlab.quantizers.codebooks import KVCodebooks, look_up, nearest_entries
from wqlab.registry import register
from wqlab.types import QuantSpec

#: Bits per element -> channels that one index of 8 bits stands for.
VECTOR_SIZES = {4: 2, 2: 4}


@register("method", "cq")
class CQQuantizer(Quantizer):
    """Each token's channels in groups of 2 (CQ-4) or 4 (CQ-2); a group is the index of its codebook's nearest entry.

    The codebooks, one per layer, KV head and group, for keys and for values, belong to the model; a cache stores indices alone, and
    `bits_per_element` counts those. `shared_nbytes` says what the codebooks of a layer take. Every token is encoded by itself, so
    any number of them is.

    Keys lie on few directions before their rotary positions and on many behind them; the method codes them before, and a cache then
    takes the positions off when a key comes in and puts them on when it is read::

        books = learn_codebooks(model, tokens, num_bits=2, rotary="before")
        QuantizedKVCache("cq", 2, method_options={"codebooks": books}, rotary=watch_rotary(model))

    With codebooks for keys ``"after"`` the rotary positions a cache needs no `rotary`.

    Parameters
    ----------
    spec, role
        As in `Quantizer`; 4 or 2 bits. `granularity` and `window_size` say no more.
    codebooks : KVCodebooks
        With vectors of 2 channels for 4 bits and of 4 for 2 bits.
    encoder : callable, optional
        (x [batch, heads, seq, head_dim], entries in float32) -> codes, a faster way to the nearest entries than
        `wqlab.quantizers.codebooks.nearest_entries`. A cache passes `wqlab.ops.cq_encode.encode`.

    Error
    -----
    That of the nearest entry, which no grid bounds: a vector far from all of the calibration is as far from every entry.
    """

    name = "cq"
    target = "kv"
    supported_bits = (2, 4)
    window_grids = False
    takes_codebooks = True
    supported_granularities = ("window_channel",)

    def __init__(
        self,
        spec: QuantSpec,
        role: Role = "key",
        codebooks: KVCodebooks | None = None,
        encoder: Callable[[Tensor, Tensor], Tensor] = nearest_entries,
    ) -> None:
        super().__init__(spec, role)
        size = VECTOR_SIZES[spec.num_bits]
        if codebooks is None:
            raise ParameterError(
                f"{self.name} needs codebooks of the model: learn them with wqlab.hf.learn_codebooks(model, tokens, "
                f"num_bits={spec.num_bits}) and pass method_options={{'codebooks': ...}}"
            )
        if codebooks.vector_size != size:
            raise ParameterError(
                f"{self.name}: num_bits = {spec.num_bits} codes vectors of {size} channels, these codebooks are {codebooks.spec}"
            )
        self.codebooks = codebooks
        self.encoder = encoder
        self.entries = codebooks.of(role, 0)

    @property
    def tokens_per_group(self) -> int:
        """1: every token is encoded by itself."""
        return 1

    @property
    def code_bits(self) -> int:
        """8: an index of at most 256 entries."""
        return 8

    def codes_per_token(self, head_dim: int) -> int:
        """Return the groups of one head: ``head_dim / vector_size``."""
        return head_dim // self.codebooks.vector_size

    def for_layer(self, layer_idx: int) -> Quantizer:
        """Return the quantizer with the codebooks of one layer."""
        layer = copy.copy(self)
        layer.entries = self.codebooks.of(self.role, layer_idx)
        return layer

    def shared_nbytes(self) -> int:
        """Return the bytes of this layer's entries."""
        return self.entries.nbytes

    def quantize(self, x: Tensor) -> Quantized:
        """Encode `x` [batch, heads, seq, head_dim]; any `seq`.

        Returns
        -------
        Quantized
            `codes` [batch, heads, seq, head_dim / vector_size]; `scale` and `minimum` are empty, [batch, heads, seq, 0].

        Raises
        ------
        UnsupportedError
            When heads or head_dim are not those of the codebooks.
        """
        self.check(x)
        heads, groups, _, size = self.entries.shape
        if (x.shape[1], x.shape[3]) != (heads, groups * size):
            raise UnsupportedError(
                f"{self.name}: {self.role} of heads, head_dim = {x.shape[1]}, {x.shape[3]} does not fit codebooks of {heads}, "
                f"{groups * size}; learn them for this model"
            )
        nothing = x.new_empty(*x.shape[:3], 0)
        return Quantized(self.encoder(x, self._on(x.device).float()), nothing, nothing, self.spec, x.dtype)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Return the entries that the codes name [batch, heads, seq, head_dim], in the source's dtype."""
        return look_up(quantized.codes, self._on(quantized.codes.device)).to(quantized.dtype)

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> float:
        """Return the bits of the indices: 4 or 2. The codebooks are the model's; see `shared_nbytes`."""
        return float(self.spec.num_bits)

    def _on(self, device: torch.device) -> Tensor:
        if self.entries.device != device:
            self.entries = self.entries.to(device)  # once per layer: this object is one layer's
        return self.entries
