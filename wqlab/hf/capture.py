"""What a transformers model does on the way: hidden states around attention, and where attention goes.

Nothing of a full attention map is kept: rows are computed one block at a time beside the model's own attention and reduced at
once, so a prompt of thousands of tokens fits in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from wqlab import progress
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.windows.importance import ImportanceMeter

_NAME = "wqlab_capture"
log = logging.getLogger(__name__)


@dataclass
class LayerImportance:
    """s_i of one layer (Eq. 9), with "after" read two ways, because the paper does not say which."""

    after_residual: ImportanceMeter = field(default_factory=ImportanceMeter)
    attention_output: ImportanceMeter = field(default_factory=ImportanceMeter)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the language model's decoder layers, in order: the modules that own a ``self_attn`` with a ``layer_idx``.

    Raises
    ------
    UnsupportedError
        When the model has none.
    """
    found = [m for m in model.modules() if getattr(getattr(m, "self_attn", None), "layer_idx", None) is not None]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no decoder layers with a `self_attn.layer_idx`; wqlab reads such models only"
        )
    return sorted(found, key=lambda m: int(m.self_attn.layer_idx))  # type: ignore[union-attr, arg-type]


@contextmanager
def capture_importance(model: nn.Module, attention_mask: Tensor | None = None) -> Iterator[list[LayerImportance]]:
    """Collect s_i of every layer while the block runs forward passes.

    ``h`` is the input of the decoder layer (the residual stream), the attention's output is ``a``: the two readings of
    "after attention" are ``h + a`` (after the residual add, the default everywhere) and ``a`` alone.

    Parameters
    ----------
    model : torch.nn.Module
        With recognisable decoder layers.
    attention_mask : Tensor, optional
        [batch, seq] of the passes in the block: tokens that are 0 there, padding, do not count.

    Yields
    ------
    list of LayerImportance
        One per layer; read `value()` of its meters after the forward pass.

    Raises
    ------
    UnsupportedError
        For a model without recognisable decoder layers.
    """
    layers = decoder_layers(model)
    meters = [LayerImportance() for _ in layers]
    inputs: dict[int, Tensor] = {}
    handles = []

    def counted(x: Tensor) -> Tensor:
        return x if attention_mask is None else x[attention_mask.to(x.device) != 0]

    def before(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            attended = output[0] if isinstance(output, tuple) else output
            h = inputs.pop(index)
            try:
                h, attended = counted(h), counted(attended)
                meters[index].after_residual.update(h, h + attended)
                meters[index].attention_output.update(h, attended)
                progress.report("layers", index + 1, len(meters))
            except NonFiniteError as error:
                raise NonFiniteError(f"layer {index}: {error}") from error

        return hook

    try:
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
            handles.append(layer.self_attn.register_forward_hook(after(index)))  # type: ignore[union-attr, arg-type]
        yield meters
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class AttentionStatistics:
    """Per layer and head, how strongly groups of key positions are attended to.

    Only queries of the last part of the prompt count and only keys before them, so every counted query sees every counted key
    and early keys gain nothing from having more queries.

    Attributes
    ----------
    edges : list of int
        Group g holds the keys ``edges[g] <= j < edges[g + 1]``.
    logit : dict of int to Tensor
        Layer -> float64 [num_heads, num_groups]: mean over queries and keys of the scaled product, before softmax (Eq. 2).
    mass : dict of int to Tensor
        Layer -> float64 [num_heads, num_groups]: mean over queries of the softmax weight summed over the group's keys.
    """

    edges: list[int]
    query_block: int = 256
    logit: dict[int, Tensor] = field(default_factory=dict)
    mass: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Reduce one layer's attention rows; query [1, heads, seq, d], key [1, kv_heads, seq, d], both after RoPE."""
        seq_len, first = query.shape[2], self.edges[-1]
        if query.shape[0] != 1 or key.shape[2] != seq_len or seq_len <= first:
            raise ParameterError(
                f"attention is captured for one prompt of more than {first} tokens in one pass, got {tuple(query.shape)}"
            )
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)[0].float()
        sizes = [high - low for low, high in pairwise(self.edges)]
        logit = torch.zeros(query.shape[1], len(sizes), dtype=torch.float64)
        mass = torch.zeros_like(logit)
        for start in range(first, seq_len, self.query_block):
            rows = query[0, :, start : start + self.query_block].float() * scaling
            stop = start + rows.shape[1]
            scores = rows @ key[:, :stop].transpose(1, 2)
            # Sums over the keys of one row stay in float32; rows are added in float64. All counted keys lie in the past.
            for group, (a, b) in enumerate(pairwise(self.edges)):
                logit[:, group] += scores[:, :, a:b].sum(-1).double().sum(1).cpu()
            future = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device=scores.device).triu(1)
            scores[:, :, start:].masked_fill_(future, float("-inf"))
            weights = scores.softmax(-1)
            for group, (a, b) in enumerate(pairwise(self.edges)):
                mass[:, group] += weights[:, :, a:b].sum(-1).double().sum(1).cpu()
        queries = seq_len - first
        self.logit[layer] = logit / (queries * torch.tensor(sizes, dtype=torch.float64))
        self.mass[layer] = mass / queries
        if not (torch.isfinite(self.logit[layer]).all() and torch.isfinite(self.mass[layer]).all()):
            raise NonFiniteError(f"layer {layer}: attention holds NaN or infinity; load the model in float32 or check its weights")


#: The statistics that the registered attention function feeds; set by `capture_attention` for its block only.
_active: AttentionStatistics | None = None


def _capturing_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    if _active is not None:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        _active.add(layer, query, key, float(scaling))
        progress.report("layers", layer + 1, int(module.config.num_hidden_layers))  # type: ignore[union-attr, arg-type]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_NAME, _capturing_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)  # without it transformers passes no mask at all for an unknown name


@contextmanager
def capture_attention(model: Any, edges: list[int], query_block: int = 256) -> Iterator[AttentionStatistics]:
    """Collect `AttentionStatistics` while the block runs one forward pass over one prompt.

    The model's own attention implementation is put back afterwards.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any model whose attention goes through transformers' attention interface.
    edges : list of int
        Borders of the key groups, ascending from 0; queries from ``edges[-1]`` on are counted.
    query_block : int
        Rows computed at once; memory is ``heads * query_block * seq_len * 8`` bytes.

    Raises
    ------
    ParameterError
        When `edges` is not ascending from 0 or the prompt is not longer than its last entry.
    UnsupportedError
        When the model did not call the attention interface.
    """
    global _active
    if len(edges) < 2 or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise ParameterError(f"edges = {edges} is refused: it must ascend from 0 and have at least two entries")
    before = model.config._attn_implementation
    statistics = AttentionStatistics(edges=list(edges), query_block=query_block)
    model.set_attn_implementation(_NAME)
    _active = statistics
    try:
        yield statistics
    finally:
        _active = None
        model.set_attn_implementation(before)
    if not statistics.mass:
        raise UnsupportedError(
            f"{type(model).__name__} does not call transformers' attention interface, so its attention cannot be captured"
        )
