"""Low-rank adapters: a trained ``scale * b @ a`` beside each frozen linear layer of a Llama.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: What multiplies ``b @ a``.
SCALE = 2.0
RANK = 16
#: The linear layers of one decoder layer that get an adapter.
TARGETS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter, which starts as zero.

    Parameters
    ----------
    linear : nn.Linear
        Frozen by this class; its weight may be in half precision.
    rank : int
        Rows of `a` [rank, in] and columns of `b` [out, rank], both float32: half precision would lose small steps of training.
    scale : float
        Of the adapter's output.
    """

    def __init__(self, linear: nn.Linear, rank: int = RANK, scale: float = SCALE) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = scale
        device = linear.weight.device
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``linear(x) + scale * (x @ a.T) @ b.T`` in the dtype of `x`."""
        low = F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        out: Tensor = self.linear(x) + low * self.scale
        return out


def _places(language_model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield ``layers.N.self_attn.q_proj``, the module that holds it, and its name there, for each target of each layer."""
    decoder = getattr(language_model, "model", language_model)
    for number, layer in enumerate(decoder.layers):
        for target in TARGETS:
            holder, name = target.split(".")
            yield f"layers.{number}.{target}", getattr(layer, holder), name


def inject(language_model: Any, rank: int = RANK, scale: float = SCALE) -> list[nn.Parameter]:
    """Freeze a Llama, wrap the linear layers of all its decoder layers, and return the adapters' parameters.

    Parameters
    ----------
    language_model : LlamaForCausalLM or LlamaModel
        Changed in place.
    rank, scale
        As `LoRALinear`.
    """
    language_model.requires_grad_(False)
    parameters: list[nn.Parameter] = []
    for _, holder, name in _places(language_model):
        wrapped = LoRALinear(getattr(holder, name), rank, scale)
        setattr(holder, name, wrapped)
        parameters += [wrapped.a, wrapped.b]
    return parameters


def lora_state(language_model: Any) -> dict[str, Tensor]:
    """Return the adapters of an injected Llama: ``layers.N.self_attn.q_proj.a`` and ``.b``, and so on (detached, not copied)."""
    state: dict[str, Tensor] = {}
    for place, holder, name in _places(language_model):
        wrapped = getattr(holder, name)
        if isinstance(wrapped, LoRALinear):
            state |= {f"{place}.a": wrapped.a.detach(), f"{place}.b": wrapped.b.detach()}
    return state


@torch.no_grad()
def merge(language_model: Any, state: Mapping[str, Tensor], scale: float = SCALE) -> None:
    """Add ``scale * b @ a``, computed in float32, to the weights of a plain Llama, in place.

    Raises
    ------
    KeyError
        When `state` lacks an adapter of this model.
    """
    for place, holder, name in _places(language_model):
        weight = getattr(holder, name).weight
        a, b = (state[f"{place}.{part}"].to(weight.device, torch.float32) for part in "ab")
        weight.copy_(weight.float() + scale * (b @ a))
