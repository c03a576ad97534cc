"""A decoder with random weights in the shape of a published one, for measuring: what the weights are changes no latency.

`fused` gives its layers the form that a serving engine runs: projections of one input in one product, and elementwise chains in one
kernel each. Same weights, same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

_SPREAD = 0.02


def qwen2(
    layers: int, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, vocab_size: int, *,
    device: torch.device, dtype: torch.dtype = torch.float16, seed: int = 0,
) -> Qwen2ForCausalLM:  # fmt: skip
    """Return a `Qwen2ForCausalLM` whose weights are normal numbers, made on `device`.

    Parameters
    ----------
    layers, hidden_size, intermediate_size, num_heads, num_kv_heads, vocab_size : int
        Its shape; embedding and output weights are not shared.
    device : torch.device
        Where it is made; nothing as large as it passes through the host.
    dtype : torch.dtype
        Of all weights.
    seed : int
        Of the weights.
    """
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=layers,
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    # Its frequencies are computed, not loaded, and were lost with the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.fill_(1) if name.endswith("norm.weight") else weight.normal_(0, _SPREAD, generator=generator)
    for layer in model.model.layers:
        _merge(layer.mlp, ("gate_proj", "up_proj"))
        _merge(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
    return model


@contextmanager
def fused(model: Qwen2ForCausalLM, compiled: bool = True) -> Iterator[None]:
    """Run the layers of `qwen2` in fewer kernels while the block runs.

    Parameters
    ----------
    model : Qwen2ForCausalLM
        Made by `qwen2`.
    compiled : bool
        Whether torch.compile makes one kernel of each elementwise chain. It needs a compiler on the machine.
    """
    chosen: Callable[[Callable[..., Any]], Callable[..., Any]] = _compiled if compiled else lambda function: function
    norm, add_norm, rotate, gate = chosen(_norm), chosen(_add_norm), chosen(_rotate), chosen(_gate)
    changed: list[nn.Module] = []

    def put(module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        changed.append(module)

    try:
        put(model.model.norm, partial(_normed, model.model.norm, norm))
        for layer in model.model.layers:
            put(layer.input_layernorm, partial(_normed, layer.input_layernorm, norm))
            put(layer.self_attn, partial(_attention, layer.self_attn, rotate))
            put(layer.mlp, partial(_mlp, layer.mlp, gate))
            put(layer, partial(_layer, layer, add_norm))
        yield
    finally:
        for module in changed:
            del module.forward  # the class's own is found again


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one kernel; the same one each time, so that nothing is compiled again for another block."""
    result: Callable[..., Any] = torch.compile(function, fullgraph=True)
    return result


def _merge(module: nn.Module, names: tuple[str, ...]) -> None:
    """Let the weights of several projections of one input lie behind each other, so that they can be read as one."""
    for part in ("weight", "bias"):
        parts = [getattr(getattr(module, name), part) for name in names]
        if parts[0] is None:
            continue
        merged = torch.cat(parts)
        setattr(module, f"_merged_{part}", merged)
        views = torch.split(merged, [len(one) for one in parts])
        for name, view in zip(names, views, strict=True):
            setattr(getattr(module, name), part, nn.Parameter(view, requires_grad=False))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _add_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return total, _norm(total, weight, eps)


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key [batch, heads, tokens, head_dim] at their rotary positions; cos, sin [batch, tokens, head_dim]."""
    cos, sin = cos[:, None], sin[:, None]
    half = query.shape[-1] // 2

    def rotated(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    return rotated(query), rotated(key)


def _gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def _normed(module: Any, norm: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    return norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module: Any, gate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = module.down_proj(gate(functional.linear(x, module._merged_weight)))
    return result


def _attention(
    module: Any, rotate: Callable[..., tuple[Tensor, Tensor]], hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None, past_key_values: Any = None, cache: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As ``Qwen2Attention.forward``, with one product for query, key and value; the cache's name depends on transformers."""
    batch, tokens, _ = hidden_states.shape
    states = functional.linear(hidden_states, module._merged_weight, module._merged_bias)
    heads = states.view(batch, tokens, -1, module.head_dim).transpose(1, 2)
    kv_heads = module.config.num_key_value_heads
    query, key, value = torch.split(heads, [module.config.num_attention_heads, kv_heads, kv_heads], dim=1)
    query, key = rotate(query, key, *position_embeddings)
    held = cache if cache is not None else past_key_values
    if held is not None:
        key, value = held.update(key, value, module.layer_idx)
    attend = AttentionInterface()[module.config._attn_implementation]
    output, _ = attend(module, query, key, value, attention_mask, dropout=0.0, scaling=module.scaling)
    return module.o_proj(output.reshape(batch, tokens, -1)), None


def _layer(module: Any, add_norm: Callable[..., tuple[Tensor, Tensor]], hidden_states: Tensor, **options: Any) -> Tensor:
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **options)
    second = module.post_attention_layernorm
    residual, normed = add_norm(hidden_states, attended, second.weight, second.variance_epsilon)
    result: Tensor = residual + module.mlp(normed)
    return result
