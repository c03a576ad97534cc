"""Where a question looks: the attention that its tokens pay to every token before them, layer by layer, from a pass cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.hf.capture import decoder_layers
from wqlab.hf.intercept import intercept_attention


class _SeenEnoughError(Exception):
    """Ends a forward pass behind the last layer that is asked for."""


def question_attention(model: Any, forward: Callable[[], Any], asked: Tensor, layers: Sequence[int] | None = None) -> Tensor:
    """Run `forward` as far as the last of `layers` and return the attention that the asked tokens pay.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any model whose attention goes through transformers' attention interface.
    forward : callable
        Runs `model` once, over the prompt or over its last part behind a cache. Everything it would return is dropped.
    asked : Tensor
        bool [batch, new]: which of the tokens of this pass ask, at least one in each row.
    layers : sequence of int, optional
        Which layers, ascending. Default: all.

    Returns
    -------
    Tensor
        float32 [layers, batch, tokens]: for every token in the cache or the pass the softmax weight that it gets, mean over heads
        and asking tokens. Over the tokens it sums to 1.

    Raises
    ------
    ParameterError
        For layers that the model does not have, or a row in which nothing asks.
    NonFiniteError
        When attention is not finite.
    UnsupportedError
        When the model does not call the attention interface.
    """
    count = len(decoder_layers(model))
    chosen = list(range(count)) if layers is None else list(layers)
    if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < count:
        raise ParameterError(f"layers = {chosen} is refused: take one or more, ascending, from 0 to {count - 1}")
    if not bool(asked.any(1).all()):
        raise ParameterError(f"no token of row {int((~asked.any(1)).nonzero()[0])} asks; mark the tokens of its question")
    found: list[Tensor] = []

    def note(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if layer in chosen:
            found.append(_weights(query, key, mask, asked))
        if layer == chosen[-1]:
            raise _SeenEnoughError
        return key, value, mask

    with torch.no_grad(), intercept_attention(model, note), suppress(_SeenEnoughError):
        forward()
    result = torch.stack(found)
    if not bool(torch.isfinite(result).all()):
        raise NonFiniteError("a question's attention holds NaN or infinity; run the model in bfloat16 or float32")
    return result


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, asked: Tensor) -> Tensor:
    """Return float32 [batch, tokens]; row by row, so that the scores of one row are in memory and not those of a batch."""
    groups, new, tokens = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    rows = []
    for row, chosen in enumerate(asked.to(query.device)):
        at = chosen.nonzero().squeeze(1)
        heads = query[row][:, at].float().reshape(key.shape[1], groups, len(at), -1)
        scores = torch.einsum("kgqd,ktd->kgqt", heads, key[row].float()) * query.shape[-1] ** -0.5
        if mask is None:  # causal: the newest token sees all
            ahead = torch.arange(tokens, device=at.device)[None, :] > (at + tokens - new)[:, None]
            scores = scores.masked_fill(ahead, float("-inf"))
        else:
            own = mask[row if len(mask) > 1 else 0, 0][at, :tokens]
            scores = scores.masked_fill(~own, float("-inf")) if own.dtype == torch.bool else scores + own
        rows.append(scores.softmax(-1).mean((0, 1, 2)))
    return torch.stack(rows)
