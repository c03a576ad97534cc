"""Attention that reads a WindowQuant cache as it lies: packed, sorted by width, without a decoded copy (WindowQuant, 3.3.4).

A cache layer hands over a key tensor that carries the layer. transformers passes that tensor on to the registered attention
function, which finds the layer on it; no model is patched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops.mixed_decode import mixed_decode

if TYPE_CHECKING:
    from wqlab.hf.frozen_cache import FrozenLayer
    from wqlab.hf.window_cache import WindowQuantLayer

#: Under which transformers knows the attention and its mask.
NAME = "wqlab_windowquant"
#: The kernel is made for this many query tokens; a longer question reads the decoded cache.
MAX_QUERY_TOKENS = 64
_CARRIED = "_wqlab_layer"
_FROZEN = (
    "a frozen cache shows every token that was no padding when it was frozen, but {why}; give the padding to freeze() and no "
    "attention mask to the model, or use the cache without freezing it"
)


def carrying(key: Tensor, layer: WindowQuantLayer | FrozenLayer) -> Tensor:
    """Return `key` with the layer on it."""
    setattr(key, _CARRIED, layer)
    return key


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return attention [batch, q_len, heads, head_dim]; what transformers calls."""
    layer: WindowQuantLayer | FrozenLayer | None = getattr(key, _CARRIED, None)
    if layer is not None:
        layer.read_by(module.config)  # type: ignore[arg-type]
        if layer.is_frozen:
            return _frozen(layer, query, attention_mask, kwargs), None
        if not key.shape[2]:
            if _is_plain(attention_mask, query.shape[2], len(layer.segments), kwargs.get("sliding_window")):
                visible = None if attention_mask is None else attention_mask[:, 0, -1]
                return mixed_decode(query, layer.segments.parts(visible), kwargs.get("scaling")).transpose(1, 2).contiguous(), None
            key, value = layer.segments.dequantize(query.dtype)
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


def _frozen(layer: FrozenLayer, query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return attention of one token over a layer that knows its own length and padding."""
    window = options.get("sliding_window")
    if mask is not None or (window is not None and window < layer.get_seq_length()):
        why = "an attention mask was given" if mask is not None else f"there is a sliding window of {window} tokens"
        raise UnsupportedError(_FROZEN.format(why=why))
    return layer.store.attend(query, options.get("scaling")).transpose(1, 2).contiguous()


def _is_plain(mask: Tensor | None, q_len: int, seq_len: int, sliding_window: int | None) -> bool:
    """Return whether a mask says padding and causality only, so that its last row says all: which tokens are no padding.

    Otherwise it is a sliding window, a tree of drafted tokens, or an additive bias.
    """
    if mask is None:
        return sliding_window is None or sliding_window >= seq_len
    if mask.dim() != 4 or mask.dtype.is_floating_point or mask.shape[1] != 1 or mask.shape[-1] != seq_len:
        return False
    # One comparison per layer and question, not per generated token.
    causal = mask.new_ones(q_len, seq_len).tril(seq_len - q_len)
    return q_len == 1 or bool((mask[:, 0] == (mask[:, 0, -1:] & causal)).all())


def _mask(*args: Any, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the mask that SDPA takes; none for a frozen cache, which says that it hands over no key.

    While a CUDA graph is recorded, transformers would else make one, of the length at that time.
    """
    if kv_length:
        result: Tensor | None = sdpa_mask(*args, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
        return result
    if attention_mask is not None:
        raise UnsupportedError(_FROZEN.format(why="an attention mask was given"))
    return None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)  # without it transformers passes no mask at all for an unknown name


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Let the model's language part read a `WindowQuantCache` packed, by `wqlab.ops.mixed_decode`, while the block runs.

    Only full-precision passes (the prompt) go through torch's SDPA, whatever the model used before; afterwards it uses that again.
    A cache that was filled inside may be read outside, decoded, and the reverse. Other caches work inside as ever.

    Parameters
    ----------
    model : PreTrainedModel
        Any model whose attention goes through transformers' attention interface.

    Raises
    ------
    UnsupportedError
        When the model does not let its attention be chosen.
    ParameterError
        When the model is inside such a block already.

    Examples
    --------
    >>> cache = WindowQuantCache.prepare(model, inputs, alpha=2.0)  # doctest: +SKIP
    >>> with packed_attention(model):  # doctest: +SKIP
    ...     model.generate(**inputs, **cache_argument(model, cache), max_new_tokens=32)
    """
    text: PretrainedConfig = model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    if before == NAME:
        raise ParameterError(f"this {type(model).__name__} reads packed caches already; leave that block first")
    choose_attention(model, text, NAME)
    try:
        if text._attn_implementation != NAME:
            raise UnsupportedError(
                f"{type(model).__name__} keeps its attention implementation {before!r}: it does not go through transformers' "
                "attention interface, so nothing of ours can read the packed cache there; use attention='dequantize' (the same "
                "cache, decoded for each step), or a model class of transformers 5"
            )
        yield
    finally:
        choose_attention(model, text, before)


def choose_attention(model: Any, text: PretrainedConfig, name: str) -> None:
    """Set the language model's implementation and leave the vision encoder's alone."""
    parts = [part for part in model.config.sub_configs if getattr(model.config, part, None) is text]
    model.set_attn_implementation({parts[0]: name} if parts else name)
