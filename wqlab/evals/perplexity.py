"""Perplexity of a causal language model whose cache is quantized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wqlab import progress
from wqlab.errors import NonFiniteError, ParameterError
from wqlab.hf import cache_argument


@dataclass(frozen=True)
class Perplexity:
    """What `perplexity` returns.

    Parameters
    ----------
    nll : Tensor
        float32 [batch, seq - 1]: negative log-likelihood of each token after the first, in nats.
    mean_nll : float
        Its mean, in nats per token.
    perplexity : float
        ``exp(mean_nll)``.
    report : dict
        What the cache said about itself at the end; empty for a cache without `report`.
    cache : object
        The cache at the end.
    """

    nll: Tensor
    mean_nll: float
    perplexity: float
    report: dict[str, Any]
    cache: Any = field(repr=False)


@torch.inference_mode()
def perplexity(model: Any, input_ids: Tensor, cache_factory: Callable[[], Any], chunk: int = 32) -> Perplexity:
    """Feed `input_ids` through a fresh cache, `chunk` tokens at a time, and score every token after the first.

    In one forward pass over the whole text, every token would attend to the keys and values of that same pass, which are still in
    full precision: the cache is encoded behind the computation, nobody ever reads it, and each width scores exactly like FP16.
    Fed in chunks, a token attends to the **decoded** windows of all earlier chunks, and in full precision only to its own chunk
    and to the cache's full-precision tokens: what decoding after a long prompt does, at the speed of prefill. With `chunk` equal to
    the cache's window size each chunk is one window.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model; nothing in it is changed.
    input_ids : Tensor
        int64 [batch, seq], no padding, `seq` at least 2.
    cache_factory : callable
        Returns a fresh cache.
    chunk : int
        Tokens per forward pass.

    Raises
    ------
    ParameterError
        For another shape, or a chunk below 1.
    NonFiniteError
        When a logit that matters is NaN or infinite, naming the chunk.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ParameterError(f"input_ids of shape {list(input_ids.shape)}: need [batch, seq] with 2 tokens or more")
    if chunk < 1:
        raise ParameterError(f"chunk = {chunk} is not 1 or more")
    cache = cache_factory()
    argument = cache_argument(model, cache)
    scores = []
    for start in range(0, input_ids.shape[1], chunk):
        logits = model(input_ids=input_ids[:, start : start + chunk], use_cache=True, **argument).logits
        targets = input_ids[:, start + 1 : start + chunk + 1]
        # The last token of the text predicts nothing that we know.
        scored = torch.log_softmax(logits[:, : targets.shape[1]].float(), dim=-1)
        nll = -scored.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if not bool(torch.isfinite(nll).all()):
            raise NonFiniteError(f"tokens {start} to {start + chunk}: the model gives a log-likelihood that is not finite")
        scores.append(nll)
        progress.report("tokens scored", min(start + chunk, input_ids.shape[1]), input_ids.shape[1])
    nll = torch.cat(scores, dim=1)
    mean = float(nll.double().mean())
    return Perplexity(nll, mean, math.exp(mean), cache.report() if hasattr(cache, "report") else {}, cache)
