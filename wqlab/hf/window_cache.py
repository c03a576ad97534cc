"""WindowQuant for a transformers model: search and plan before the prompt is read, then a cache of mixed widths, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from wqlab import quantizers, registry
from wqlab.cache.mixed import NONE, MixedSegments
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.hf.adapters import Text, for_model
from wqlab.hf.attention import MAX_QUERY_TOKENS, NAME, carrying, packed_attention
from wqlab.hf.cache import SegmentsCache, SegmentsLayer, cache_argument
from wqlab.hf.capture import capture_importance, decoder_layers
from wqlab.hf.frozen_cache import FrozenCache
from wqlab.hf.question_attention import question_attention
from wqlab.types import Granularity, WindowPlan
from wqlab.windows import scorers
from wqlab.windows.plan import on_host
from wqlab.windows.scorers.attention import AttentionScorer
from wqlab.windows.search import search

_log = logging.getLogger(__name__)
#: Model -> s_i of its layers, calibrated once (Eq. 9).
_CALIBRATED: WeakKeyDictionary[nn.Module, list[float]] = WeakKeyDictionary()


class WindowQuantLayer(SegmentsLayer):
    """One layer of `WindowQuantCache`.

    Parameters
    ----------
    cache : WindowQuantCache
        Knows plan and windows.
    layer_idx : int
        Which layer of the plan this is.
    """

    is_frozen: Literal[False] = False

    def __init__(self, cache: WindowQuantCache, layer_idx: int) -> None:
        super().__init__(layer_idx, lambda: MixedSegments(cache.quantizers))
        self._owner = cache
        #: The configuration of the attention that read this layer and can read it packed. It says what reads the layer next.
        self._reader: Any = None
        #: Whether the packed tokens were handed over and not read yet.
        self.waiting = False
        #: Whether the whole prompt was here once, so that its windows are encoded, and are never encoded again after a crop.
        self.whole = False

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.waiting = self.whole = False

    def read_by(self, config: Any) -> None:
        """Note that the attention function of `wqlab.hf.attention` got this layer."""
        self._reader, self.waiting = config, False

    def reads_packed(self) -> bool:
        """Return whether the attention above this layer is known to read it packed."""
        return self._reader is not None and self._reader._attn_implementation == NAME

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append K and V [batch, kv_heads, new, head_dim] and return what the attention is to read.

        That is all tokens' K and V in their original order: the pass that completes the prompt gets it in full precision; behind
        it this layer is encoded, before the next layer runs, so that never more than one layer exceeds what the plan holds. Inside
        `packed_attention` a later pass gets no tokens, but a key that carries this layer.

        Raises
        ------
        NonFiniteError, UnsupportedError
            Naming the layer.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        packed = self.whole and key_states.shape[2] <= MAX_QUERY_TOKENS and self.reads_packed()
        # The new tokens come last, and go back as they came; the earlier ones as they are held.
        past = None if packed or not len(self.segments) else self.segments.dequantize(key_states.dtype)
        stored = self._owner.storage_dtype or key_states.dtype
        try:
            self.segments.append(key_states.to(stored), value_states.to(stored))
            self._owner.encode_when_whole(self)
        except (NonFiniteError, UnsupportedError) as error:
            raise type(error)(f"layer {self.layer_idx}: {error}") from error
        if packed:
            self.waiting = True
            return carrying(key_states[:, :, :0], self), value_states[:, :, :0]
        if past is not None:
            key_states, value_states = torch.cat([past[0], key_states], dim=2), torch.cat([past[1], value_states], dim=2)
        return carrying(key_states.view_as(key_states), self), value_states


class WindowQuantCache(SegmentsCache):
    """A cache whose visual windows lie at the widths of a plan; text and generated tokens stay in full precision.

    Parameters
    ----------
    method : str
        A registered quantizer that keeps one scale and one minimum per window (`Quantizer.window_grids`).
    granularity : {"window_channel", "window_head", "window"}
        Which elements of a window share scale and minimum.
    storage_dtype : torch.dtype, optional
        Of full-precision tokens and metadata. Default: the model's dtype. A model computing in float32 on a CPU holds with
        ``torch.float16`` what it would hold on a GPU.

    Raises
    ------
    ParameterError
        For another storage dtype, or a method whose windows cannot be read packed.

    Notes
    -----
    `follow` gives it the plan; without one it is a full-precision cache. `windowquant` does both for ``generate``.
    """

    def __init__(
        self, method: str = "rtn", granularity: Granularity = "window_channel", storage_dtype: torch.dtype | None = None
    ) -> None:
        if storage_dtype is not None and storage_dtype not in quantizers.DTYPES:
            raise ParameterError(f"storage_dtype = {storage_dtype} is not one of {', '.join(map(str, quantizers.DTYPES))}")
        super().__init__(layers=[])
        if not registry.lookup("method", method).window_grids:
            raise ParameterError(
                f"method {method!r} keeps more than a scale and a minimum per window, so its windows cannot be read packed; "
                f"use QuantizedKVCache(method={method!r}), or method='rtn' here"
            )
        self.method, self.granularity, self.storage_dtype = method, granularity, storage_dtype
        self.quantizers: dict[int, Any] = {}
        self.plan: WindowPlan | None = None
        #: Refuse to decode: `windowquant` sets it, so that nothing is slower than it was asked to be without a word.
        self.only_packed = False
        self._windows: Tensor | None = None
        self._prompt_len = 0

    @classmethod
    def prepare(
        cls,
        model: Any,
        inputs: Mapping[str, Any],
        alpha: float = 2.0,
        window_size: int = 32,
        *,
        importance: Sequence[float] | None = None,
        text: Text = "question",
        method: str = "rtn",
        granularity: Granularity = "window_channel",
        storage_dtype: torch.dtype | None = None,
        **search_options: Any,
    ) -> WindowQuantCache:
        """Return an empty cache with a plan for this prompt: search before the prompt is read (WindowQuant, section 3.2).

        Parameters
        ----------
        model : PreTrainedModel
            Of a family that `wqlab.hf.adapters` knows.
        inputs : mapping
            What the model's processor returned.
        alpha, window_size, importance, text, method, granularity, storage_dtype, **search_options
            See `windowquant`.

        Raises
        ------
        UnsupportedError
            For a family without an adapter, or a prompt without visual tokens.
        ParameterError
            When a video is shorter than a window, or an option is out of range.
        """
        cache, adapter = cls(method, granularity, storage_dtype), for_model(model)
        visual = adapter.visual_positions(model, inputs)
        if not bool(visual.any()):
            raise UnsupportedError("the prompt has no visual tokens, so there are no windows; generate outside the block instead")
        if search_options.get("window_unit") == "frames":
            search_options = {"tokens_per_frame": adapter.tokens_per_frame(model, inputs), **search_options}
        scorer = search_options.pop("scorer", "cosine")
        scorer = scorers.create(scorer) if isinstance(scorer, str) else scorer
        with torch.no_grad():
            if scorer.reads == "attention":
                words, video = _attended(model, inputs, adapter, cast(AttentionScorer, scorer).layers, visual)
            else:
                words, video = adapter.text_embeddings(model, inputs, text), adapter.visual_embeddings(model, inputs)
        s = list(importance) if importance is not None else _importance(model, inputs)
        plan = search(
            words, video, s, scorer=scorer, alpha=alpha, window_size=window_size, num_layers=len(decoder_layers(model)),
            **search_options,
        )  # fmt: skip
        cache.follow(plan, visual)
        return cache

    def follow(self, plan: WindowPlan, visual: Tensor) -> None:
        """Take a plan, before the first token.

        Parameters
        ----------
        plan : WindowPlan
            Of this prompt.
        visual : Tensor
            bool [batch, prompt]: where visual tokens stand. Row b's windows are its visual tokens, `plan.window_size` at a time.

        Raises
        ------
        ParameterError
            When the cache holds tokens already, or the plan is of other rows.
        """
        if self.get_seq_length():
            raise ParameterError(f"the cache holds {self.get_seq_length()} tokens already; give a plan to an empty cache")
        if len(plan.windows_per_row) != visual.shape[0]:
            raise ParameterError(f"the plan is of {len(plan.windows_per_row)} rows, the prompt has {visual.shape[0]}")
        self.plan = on_host(plan)
        widths = sorted({int(bits) for bits in self.plan.bit_widths.ravel()} - {16}, reverse=True)
        size = self.plan.window_size
        self.quantizers = {
            bits: tuple(quantizers.create(self.method, bits, size, self.granularity, role) for role in ("key", "value"))
            for bits in widths
        }
        self.layers.clear()
        self._windows = window_positions(visual, size, self.plan.num_windows)
        self._prompt_len = visual.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to layer `layer_idx`, creating layers as they are met; see `WindowQuantLayer.update`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(WindowQuantLayer(self, len(self.layers)))
        ignored = [layer.layer_idx for layer in self.layers if layer.waiting]
        unseen = self.only_packed and self.layers[layer_idx].whole and not self.layers[layer_idx].reads_packed()
        if ignored or unseen:
            raise UnsupportedError(
                f"the attention of layer {ignored[0] if ignored else layer_idx} does not go through transformers' attention "
                "interface, so it cannot read the packed cache; use attention='dequantize' (the same cache, decoded for each "
                "step), or a model class of transformers 5"
            )
        result: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return result

    def freeze(self, max_new_tokens: int, attention_mask: Tensor | None = None) -> FrozenCache:
        """Return a cache of fixed size that goes on from here, for decode steps in a CUDA graph (`wqlab.hf.decode_graph`).

        Packed windows are shared with this cache, the full-precision tokens are copied; drop this cache to free them.

        Parameters
        ----------
        max_new_tokens : int
            Tokens that it will have room for.
        attention_mask : Tensor, optional
            [batch, tokens so far]: 0 for padding. Default: there is none.

        Raises
        ------
        ParameterError
            Before the prompt was read, without room, or for a mask of another shape.
        UnsupportedError
            When the layers lie on several devices.
        """
        held = self.get_seq_length()
        if not held or not all(layer.whole for layer in self.layers):
            raise ParameterError(
                f"the cache holds {held} of the prompt's {self._prompt_len or 'unknown number of'} tokens; freeze it when it holds "
                "all of them"
            )
        visible = next_position = None
        if attention_mask is not None:
            wanted = [self.layers[0].segments.batch, held]
            if list(attention_mask.shape) != wanted:
                raise ParameterError(f"attention_mask {list(attention_mask.shape)} must be {wanted}: the tokens so far")
            visible = attention_mask.to(self.layers[0].device).bool()
            next_position = visible.sum(1)
        layers = [layer.segments.parts(visible) for layer in self.layers]
        return FrozenCache.of(layers, held, max_new_tokens, next_position)

    def describe(self) -> str:
        """Return the report as one line, with the windows per width of every layer, equal neighbours together."""
        line = super().describe()
        if self.plan is None:
            return line
        widths = (16, 4, 2)
        counts = [tuple(int((layer == bits).sum()) for bits in widths) for layer in self.plan.bit_widths]
        groups, first = [], 0
        for last, count in enumerate(counts):
            if last + 1 == len(counts) or counts[last + 1] != count:
                layers = f"{first}" if first == last else f"{first}-{last}"
                groups.append(f"{layers}: {'/'.join(map(str, count))}")
                first = last + 1
        return f"{line}; windows at {'/'.join(map(str, widths))} bits in layers {', '.join(groups)}"

    def encode_when_whole(self, layer: WindowQuantLayer) -> None:
        """Encode a layer whose prompt is complete and not yet encoded. A prompt that comes in chunks stays whole until its last."""
        segments = layer.segments
        if layer.whole or len(segments) < self._prompt_len:
            return
        layer.whole = True
        if self.plan is None or self._windows is None:
            return
        widths = [int(bits) for bits in self.plan.bit_widths[layer.layer_idx]]
        if any(bits != 16 for bits in widths):
            windows, rows = self._windows.to(layer.device), segments.batch
            # Beam search repeats the rows of a prompt before the first pass.
            segments.encode(windows.repeat_interleave(rows // len(windows), 0), widths)


def window_positions(visual: Tensor, window_size: int, num_windows: int) -> Tensor:
    """Return int64 [batch, num_windows, window_size]: the positions of each window's tokens, `NONE` for windows that a row lacks.

    Parameters
    ----------
    visual : Tensor
        bool [batch, prompt].
    window_size, num_windows : int
        Tokens per window; windows of the longest row.
    """
    found = torch.full((visual.shape[0], num_windows, window_size), NONE, device=visual.device)
    for row, there in enumerate(visual):
        at = there.nonzero().squeeze(1)
        count = min(len(at) // window_size, num_windows)
        found[row, :count] = at[: count * window_size].reshape(count, window_size)
    return found


@contextmanager
def windowquant(
    model: Any,
    alpha: float = 2.0,
    window_size: int = 32,
    *,
    importance: Sequence[float] | None = None,
    text: Text = "question",
    method: str = "rtn",
    granularity: Granularity = "window_channel",
    storage_dtype: torch.dtype | None = None,
    attention: Literal["packed", "dequantize"] = "packed",
    **search_options: Any,
) -> Iterator[list[WindowQuantCache]]:
    """Let ``model.generate(**inputs)`` inside the block search, plan and hold its cache as WindowQuant does.

    Parameters
    ----------
    model : PreTrainedModel
        A video-language model of a family that `wqlab.hf.adapters` knows. It is left as it was.
    alpha : float
        Of Eq. 10 and 11.
    window_size : int
        Visual tokens per window, or frames with ``window_unit="frames"``.
    importance : sequence of float, optional
        s_i per layer. Default: measured on the first prompt, by one pass more, and kept for this model.
    text : {"question", "all"}
        What the windows are compared with: the words after the last visual token, or every word of the prompt.
    method, granularity, storage_dtype
        As `WindowQuantCache`.
    attention : {"packed", "dequantize"}
        ``packed``: generated tokens read the cache as it lies, by `wqlab.ops.mixed_decode`. ``dequantize``: a decoded copy of one
        layer at a time goes to the model's own attention; slower, for models whose attention cannot be replaced.
    **search_options
        Of `wqlab.windows.search.search`: ``scorer``, ``normalize``, ``first_window_full``, ``preset``, ``window_unit``. The scorer
        ``attention`` runs the prompt through the model up to the last of its layers before the plan is known, which costs that part
        of a prefill; give it with layers that were calibrated (`wqlab.evals.premise.best_layers`), for example
        ``scorers.create("attention", layers=(17, 18, 23))``.

    Yields
    ------
    list of WindowQuantCache
        One is added by each ``generate``; ``caches[-1].describe()`` is the one-line report, ``caches[-1].plan`` the plan. Given
        back to ``generate``, with the longer conversation, such a cache goes on: nothing is searched or encoded again.

    Raises
    ------
    UnsupportedError
        For a family without an adapter, a model whose attention cannot be replaced, or a prompt without visual tokens.
    ParameterError
        When a video is shorter than a window, another cache is passed to ``generate``, or blocks of one model are nested.

    Examples
    --------
    >>> with windowquant(model, alpha=2.0, normalize="rank") as caches:  # doctest: +SKIP
    ...     model.generate(**inputs, max_new_tokens=8)
    >>> print(caches[-1].describe())  # doctest: +SKIP
    """
    if attention not in ("packed", "dequantize"):
        raise ParameterError(f"attention = {attention!r} is neither 'packed' nor 'dequantize'")
    if "generate" in vars(model):
        raise ParameterError("this model is inside a windowquant block already; leave that block first")
    adapter, original = for_model(model), model.generate
    caches: list[WindowQuantCache] = []

    def generate(**inputs: Any) -> Any:
        given = next((inputs.pop(name) for name in ("past_key_values", "cache") if inputs.get(name) is not None), None)
        if given is None:
            given = WindowQuantCache.prepare(
                model, inputs, alpha, window_size, importance=importance, text=text, method=method,
                granularity=granularity, storage_dtype=storage_dtype, **search_options,
            )  # fmt: skip
            given.only_packed = attention == "packed"
            caches.append(given)
        elif not any(given is cache for cache in caches):
            raise ParameterError(
                f"generate was given a {type(given).__name__} inside windowquant, which brings its own; leave it out, or give one "
                "of this block's caches to go on with it"
            )
        else:
            held = given.get_seq_length()
            if bool(adapter.visual_positions(model, inputs)[:, held:].any()):
                raise UnsupportedError(
                    f"there are visual tokens behind the {held} that this cache holds, and it has one plan, of its first prompt; "
                    "ask about the new video with a cache of its own"
                )
            inputs = adapter.without_pixels(inputs)
        result = original(**inputs, **cache_argument(model, given))
        _log.info("windowquant: %s", given.describe())
        return result

    with packed_attention(model) if attention == "packed" else nullcontext():
        model.generate = generate
        try:
            yield caches
        finally:
            del model.generate
            for cache in caches:
                cache.only_packed = False  # outside the block it is decoded, as every attention can read it


def _attended(
    model: nn.Module, inputs: Mapping[str, Any], adapter: Any, layers: Sequence[int], visual: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return, row by row, what the scorer ``attention`` reads: ones [1, layers], and each visual token's weight [visual, layers].

    The prompt goes through the model up to the last of `layers`, which is that part of a prefill.
    """
    options = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
    asked = adapter.question_positions(model, inputs)
    weights = question_attention(model, lambda: model(**options, use_cache=False), asked, layers).permute(1, 2, 0)
    video = [row[at] for row, at in zip(weights, visual, strict=True)]
    return [row.new_ones(1, len(layers)) for row in video], video


def _importance(model: nn.Module, inputs: Mapping[str, Any]) -> list[float]:
    """Return s_i of every layer of a model, measured once (Eq. 9, after the residual add)."""
    if model not in _CALIBRATED:
        _log.info("windowquant: measuring the layers' importance on this prompt, once for this model")
        options = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        with torch.no_grad(), capture_importance(model, inputs.get("attention_mask")) as meters:
            model(**options, use_cache=False)
        _CALIBRATED[model] = [meter.after_residual.value() for meter in meters]
    return _CALIBRATED[model]
