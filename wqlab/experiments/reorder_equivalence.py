"""Error of attention over a reordered cache against float64, and what reordering does to prefill (WindowQuant, 3.3.2 and 3.3.4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from wqlab.experiments import Experiment, slider, video_prompts
from wqlab.experiments.video_prompts import VideoParameters, VideoPrompt
from wqlab.models.shipped import POCKET_VLM
from wqlab.profile import environment
from wqlab.registry import register
from wqlab.types import Evidence, Input, Result, Value

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from wqlab.evals.reordering import LayerStates, VisualSpan

_WINDOW = 32
_QUICK_PERMUTATIONS = 2


class ReorderEquivalenceParameters(VideoParameters):
    """Parameters of `reorder_equivalence`; those of the videos are `VideoParameters`.

    Parameters
    ----------
    alpha : float
        Of the plan that says which windows lie together.
    normalize : {"minmax", "rank", "none"}
        How similarities reach the thresholds; with ``none`` nearly all windows have one width and there is little to reorder.
    num_permutations : int
        Random orders of the windows, beside the plan's, the original and the reversed one.
    """

    video: Literal["hard", "easy"] = Field("hard", description="PocketBench split that the pocket VLM watches")
    num_frames: int = Field(16, ge=8, le=100, description="frames per video, 64 visual tokens each")
    num_videos: int = Field(1, ge=1, le=96, description="videos, each with its question")
    alpha: float = slider(2.0, 0.1, 12.0, 0.1, "of the plan that says which windows lie together", gt=0, le=700)
    normalize: Literal["minmax", "rank", "none"] = Field("minmax", description="how similarities reach the thresholds")
    num_permutations: int = Field(4, ge=1, le=64, description="random orders of the windows")


class Prefill(NamedTuple):
    """A whole prefill: hidden states [layers, seq, hidden] behind each layer; log-probabilities behind the question's tokens."""

    states: Tensor
    predicted: Tensor


class Found(NamedTuple):
    """What the videos showed: the table, the plans' mean width, and what was read."""

    data: pd.DataFrame
    mean_bits: float
    note: str
    inputs: tuple[Input, ...]


def _prefill(model: Any, prompt: VideoPrompt, order: Tensor | None = None) -> Prefill:
    """Run the model over a prompt whose tokens lie in `order`, each at its own rotary position."""
    import torch

    embeddings, options = prompt.embeddings, {}
    if order is not None:
        embeddings = embeddings[:, order]
        # Without a mask transformers takes positions that jump for several sequences in one row.
        options = {"position_ids": order[None], "attention_mask": torch.ones(1, len(order), dtype=torch.int64)}
    asked = embeddings.shape[1] - prompt.stop
    out = model(inputs_embeds=embeddings, use_cache=False, output_hidden_states=True, logits_to_keep=asked, **options)
    states = torch.cat(out.hidden_states[1:])
    return Prefill(states if order is None else states[:, order.argsort()], out.logits[0].double().log_softmax(-1))


def _whole_prefills(
    model: Any, prompt: VideoPrompt, span: VisualSpan, plan: list[list[int]], base: Prefill
) -> Iterator[dict[str, Any]]:
    """Yield what reordering inside or before a prefill does to hidden states and predicted tokens, against `base`.

    ``kv_storage``: K and V in the plan's order of each layer, the causal mask left where it was. ``tokens_storage``,
    ``tokens_position``: all tokens in one order from the first layer on, causal by place in that order, and by position.
    """
    from wqlab.evals.reordering import by_width, causal, squares, token_order
    from wqlab.hf.intercept import intercept_attention

    orders = [token_order(span, by_width(widths)) for widths in plan]
    # One order for all layers, as near to theirs as it can be: by the sum of a window's widths.
    shared = token_order(span, by_width([sum(widths) for widths in zip(*plan, strict=True)]))

    def reordered(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor, Any]:
        return key[:, :, orders[layer]], value[:, :, orders[layer]], mask

    def by_position(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor, Any]:
        return key, value, causal(shared, shared)[None, None]

    changes: dict[str, tuple[Any, Tensor | None]] = {
        "kv_storage": (reordered, None),
        "tokens_storage": (None, shared),
        "tokens_position": (by_position, shared),
    }
    for name, (change, order) in changes.items():
        with intercept_attention(model, change) if change else nullcontext():
            found = _prefill(model, prompt, order)
        # Rounding may take a divergence of 0 below it.
        kl = (base.predicted.exp() * (base.predicted - found.predicted)).sum(-1).clamp_min(0)
        changed = (base.predicted.argmax(-1) != found.predicted.argmax(-1)).double()
        for queries, at in (("question", slice(None, -1)), ("answer", slice(-1, None))):
            row = {"part": "tokens", "prefill": name, "queries": queries}
            yield {**row, "kl": float(kl[at].mean()), "changed": float(changed[at].mean())}
        for layer, (ours, reference) in enumerate(zip(found.states, base.states, strict=True)):
            for queries, at in (("video", slice(span.start, span.stop)), ("question", slice(span.stop, None))):
                where = {"part": "states", "prefill": name, "layer": layer, "queries": queries}
                yield {**where, **squares(ours[at], reference[at])}


@lru_cache(maxsize=4)
def _watch(split: str, seed: int, num_frames: int, num_videos: int, alpha: float, normalize: Any, num_permutations: int) -> Found:
    """Show the videos to the model and attend in all orders."""
    import numpy as np
    import pandas as pd
    import torch

    from wqlab.evals.reordering import LayerStates, VisualSpan, by_width, decode_errors, prefill_errors
    from wqlab.evals.threads import polite_threads
    from wqlab.hf.capture import capture_importance
    from wqlab.hf.intercept import intercept_attention
    from wqlab.models import load
    from wqlab.windows.plan import on_host
    from wqlab.windows.search import search

    loaded = load(POCKET_VLM)
    layers: dict[int, LayerStates] = {}

    def keep(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor, Any]:
        layers[layer] = LayerStates(query, key, value)
        return key, value, mask

    rows: list[dict[str, Any]] = []
    importance: list[float] = []
    mean_bits = []
    with polite_threads(), torch.inference_mode():
        for prompt in video_prompts.prompts(loaded, split, seed, num_frames, num_videos):
            span = VisualSpan(prompt.start, prompt.stop, prompt.embeddings.shape[1], _WINDOW)
            with intercept_attention(loaded.model, keep), capture_importance(loaded.model) as meters:
                base = _prefill(loaded.model, prompt)
            importance = importance or [meter.after_residual.value() for meter in meters]  # once per model, on the first prompt
            visual = prompt.embeddings[:, span.start : span.stop]
            plan = on_host(search(prompt.words, visual, importance, alpha=alpha, normalize=normalize, window_size=_WINDOW))
            mean_bits.append(plan.summary().mean_bits)
            widths: list[list[int]] = plan.bit_widths.tolist()
            unsorted = list(range(plan.num_windows))
            draws = [np.random.default_rng(i).permutation(plan.num_windows).tolist() for i in range(num_permutations)]
            others = {"unsorted": unsorted, "reversed": unsorted[::-1], **{f"random {i + 1}": o for i, o in enumerate(draws)}}
            for number, states in sorted(layers.items()):
                mine = {"plan": by_width(widths[number])}
                decoded = decode_errors(states, span, widths[number], mine | others)
                rows += [{"part": "decode", "layer": number, **row} for row in decoded]
                prefilled = prefill_errors(states, span, mine | {"random": draws[0]})
                rows += [{"part": "prefill", "layer": number, **row} for row in prefilled]
            rows += _whole_prefills(loaded.model, prompt, span, widths, base)
    inputs = (*loaded.inputs, video_prompts.generator())
    return Found(_joint(pd.DataFrame(rows)), sum(mean_bits) / len(mean_bits), loaded.note, inputs)


def _joint(rows: pd.DataFrame) -> pd.DataFrame:
    """Return relative errors, of squares that were summed over the videos, and in prefill over the queries of a layer too."""
    import numpy as np
    import pandas as pd

    def relative(part: str, *keys: str) -> pd.DataFrame:
        sums = rows[rows["part"] == part].groupby(["part", *keys], as_index=False, sort=False)
        found = sums[["squared_error", "squared_reference"]].sum()
        error = np.sqrt(found.pop("squared_error") / found.pop("squared_reference"))
        return found.assign(relative_error=error)

    moved = rows[rows["part"] == "decode"].groupby(["layer", "storage", "order"], as_index=False)["displacement"].mean()
    by_query = relative("prefill", "layer", "order", "mask", "queries", "position")
    of_layers = by_query.groupby(["order", "mask", "queries", "position"], sort=False)["relative_error"]
    spread = of_layers.quantile(np.array([0.1, 0.5, 0.9])).unstack().set_axis(["error_low", "relative_error", "error_high"], axis=1)
    tokens = rows[rows["part"] == "tokens"].groupby(["part", "prefill", "queries"], as_index=False, sort=False)
    return pd.concat(
        [
            relative("decode", "layer", "storage", "order").merge(moved),
            relative("prefill", "layer", "order", "mask", "queries"),
            spread.reset_index().assign(part="prefill_position"),
            relative("states", "prefill", "layer", "queries"),
            tokens[["kl", "changed"]].mean(),
        ],
        ignore_index=True,
    )


@register("stem", "reorder_equivalence")
class ReorderEquivalence(Experiment[ReorderEquivalenceParameters]):
    """Attends over real caches of the pocket VLM in many orders, and prefills with tokens that lie in another order."""

    stem = "reorder_equivalence"
    title = "Attention over a reordered cache"
    paper = "WindowQuant, Sect. 3.3.2 (Eq. 12, 13), 3.3.4 and Fig. 9"
    Parameters = ReorderEquivalenceParameters
    live = False

    def parts(self, parameters: ReorderEquivalenceParameters) -> list[str]:
        """Return the pocket VLM's parts, and the clips that the videos' backgrounds come from."""
        return parameters.video_parts()

    def run(self, parameters: ReorderEquivalenceParameters) -> Result:
        """Measure relative errors |out - reference| / |reference|, joint over heads and videos.

        Returns
        -------
        Result
            ``part == "decode"``: the question's attention over the cache against float64 attention over the same dequantized tokens
            in their original order, per ``layer``, ``storage`` dtype and ``order`` of the windows, which moves them by
            ``displacement``. ``"prefill"``: attention of one layer whose K and V are reordered, float32 against float64 in the
            original order, with the causal ``mask`` by storage or by position, for the ``queries`` of video and question.
            ``"prefill_position"``: the same per query, its ``position`` counted from the first visual token; median of the layers,
            ``error_low`` and ``error_high`` their 10 % and 90 % quantiles. ``"states"``: hidden states of whole prefills against
            the original order, both in float32. ``"tokens"``: what these predict behind the tokens of the question, and at its end
            (the answer's first token): ``kl`` (nats) to the original order, and ``changed``, the share whose most likely token is
            another one.
        """
        p = parameters
        permutations = _QUICK_PERMUTATIONS if p.quick else p.num_permutations
        found = _watch(*p.watched(), p.alpha, p.normalize, permutations)
        evidence = Evidence(
            kind="measured",
            source=f"{video_prompts.describe(*p.watched())}; {permutations} random orders; mixed_decode's reference backend",
            hardware=environment.hardware_line(),
        )
        return Result(
            stem=self.stem,
            parameters=p.model_dump(),
            data=found.data.astype({"layer": "Int64", "position": "Int64"}),
            evidence=dict.fromkeys(("relative_error", "error_low", "error_high", "kl", "changed"), evidence),
            values=_values(found.data),
            inputs=list(found.inputs),
            notes=[
                f"Plan: alpha {p.alpha:g}, {p.normalize}: {found.mean_bits:.2f} bits per code, RTN per window and channel.",
                "wqlab reorders behind the prefill, so its prefill is the original one.",
                found.note,
            ],
        )


def _values(data: pd.DataFrame) -> dict[str, Value]:
    def error(value: float) -> Value:
        return Value(float(value), "1", "relative_error")

    parts = {str(part): rows for part, rows in data.groupby("part")}
    values = {}
    for storage, mine in parts["decode"].groupby("storage"):
        per_order = mine.groupby("order")["relative_error"].mean()
        values[f"decode_error_{storage}"] = error(mine["relative_error"].max())
        values[f"decode_error_plan_{storage}"] = error(mine.loc[mine["order"] == "plan", "relative_error"].max())
        for name, mean in (("plan", per_order["plan"]), ("worst_order", per_order.max())):
            ratio = float(mean / per_order["unsorted"])
            values[f"decode_{name}_to_unsorted_{storage}"] = Value(ratio, "ratio", "relative_error")
    for keys, errors in parts["prefill"].groupby(["order", "mask", "queries"])["relative_error"]:
        name = "_".join(map(str, keys))  # type: ignore[call-overload]
        values[f"prefill_{name}_median"], values[f"prefill_{name}_max"] = error(errors.median()), error(errors.max())
    last = parts["states"]["layer"] == parts["states"]["layer"].max()
    for row in parts["states"][last].to_dict("records"):
        values[f"states_{row['prefill']}_{row['queries']}"] = error(row["relative_error"])
    for row in parts["tokens"].to_dict("records"):
        values[f"kl_{row['prefill']}_{row['queries']}"] = Value(row["kl"], "nats", "kl")
        values[f"changed_{row['prefill']}_{row['queries']}"] = Value(row["changed"], "share", "changed")
    return values
