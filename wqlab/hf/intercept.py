"""Look at, or change, what a model's attention reads, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf.attention import choose_attention

_NAME = "wqlab_intercept"

#: (layer, query, key, value, mask) -> (key, value, mask). Queries and keys have their rotary positions; mask is None where the
#: attention is causal by the order of its rows and columns.
Change = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]

#: What the registered attention function calls; set by `intercept_attention` for its block only.
_active: Change | None = None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if _active is not None:
        key, value, attention_mask = _active(int(module.layer_idx), query, key, value, attention_mask)  # type: ignore[arg-type]
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)  # without it transformers passes no mask at all for an unknown name


@contextmanager
def intercept_attention(model: Any, change: Change) -> Iterator[None]:
    """Call `change` before each layer's attention while the block runs, and let torch's SDPA read what it returns.

    The model's own attention implementation is put back afterwards.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any model whose attention goes through transformers' attention interface.
    change : callable
        Gets the layer's number, query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, tokens, head_dim] and the
        mask, and returns key, value and mask.

    Raises
    ------
    ParameterError
        When blocks are nested.
    UnsupportedError
        When the model did not call the attention interface.
    """
    global _active
    if _active is not None:
        raise ParameterError("attention is intercepted already: leave that block first")
    called = False

    def noted(*given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        nonlocal called
        called = True
        return change(*given)

    # Of the language part alone, and put back there: inside `packed_attention` it is another than the whole model's.
    text = model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    choose_attention(model, text, _NAME)
    _active = noted
    try:
        yield
    finally:
        _active = None
        choose_attention(model, text, before)
    if not called:
        raise UnsupportedError(
            f"{type(model).__name__} does not call transformers' attention interface, so its attention cannot be intercepted"
        )
