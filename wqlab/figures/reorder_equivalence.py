"""Eq. 12, 13 and Sect. 3.3.4: decode attention over a reordered cache above, prefill with a reordered one below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.figures import EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: storage dtype -> colour and unit roundoff.
_STORAGE = {"bfloat16": ("#D55E00", 2.0**-8), "float16": ("#E69F00", 2.0**-11), "float32": ("#0072B2", 2.0**-24)}
_WRONG, _MILD, _RIGHT = "#B2182B", "#E69F00", "#1B7837"
_PREFILLS = {
    "kv_storage": ("K and V reordered, mask by storage", _WRONG),
    "tokens_storage": ("tokens reordered, mask by storage", _MILD),
    "tokens_position": ("tokens reordered, mask by position", _RIGHT),
}
_FLOOR, _TOP = 3e-8, 10.0


@register("figure", "reorder_equivalence")
def draw(result: Result) -> Figure:
    """Draw decode errors per layer and per order, and prefill errors per query and per layer."""
    import matplotlib.pyplot as plt

    parts = {str(part): rows for part, rows in result.data.groupby("part", sort=False)}
    figure, ((by_layer, by_order), (by_query, states)) = plt.subplots(2, 2, figsize=(10.2, 7.5))
    _decode_layers(by_layer, parts["decode"], result)
    _decode_orders(by_order, parts["decode"], result)
    _prefill_queries(by_query, parts["prefill_position"], result)
    _prefill_states(states, parts["states"], parts["tokens"], result)
    for axis in (by_layer, by_order, by_query, states):
        axis.set_yscale("log")
        axis.set_ylim(_FLOOR, _TOP)
    for axis in (by_layer, by_query):
        axis.set_ylabel(label("relative error", result, "relative_error"))
    return figure


def _decode_layers(axis: Axes, decode: pd.DataFrame, result: Result) -> None:
    """Draw the plan's order as lines; the band behind is the range of all orders, mostly as thin as the line."""
    style = EVIDENCE_STYLE[result.evidence["relative_error"].kind]
    for storage, (colour, roundoff) in _STORAGE.items():
        mine = decode[decode["storage"] == storage]
        table = mine.pivot(index="layer", columns="order", values="relative_error")
        layers = table.index.to_numpy(dtype=int)
        axis.fill_between(layers, table.min(axis=1), table.max(axis=1), color=colour, alpha=0.3, linewidth=0)
        axis.plot(layers, table["plan"], color=colour, label=f"{storage} cache", **style)
        axis.axhline(roundoff, color=colour, linewidth=1, linestyle=":")
    axis.plot([], [], color="0.45", linewidth=1, linestyle=":", label="unit roundoff")
    axis.set(title="Decode: cache sorted by width, against float64", xlabel="decoder layer")
    axis.legend(loc="upper center", ncols=2)


def _decode_orders(axis: Axes, decode: pd.DataFrame, result: Result) -> None:
    """Draw the mean over the layers against how far an order moves the windows."""
    means = decode.groupby(["storage", "order"], as_index=False)[["displacement", "relative_error"]].mean()
    marks = {"unsorted": ("D", "as the video goes"), "plan": ("s", "sorted by width"), "reversed": ("^", "reversed")}
    for storage, (colour, _) in _STORAGE.items():
        mine = means[means["storage"] == storage].set_index("order")
        for name, row in mine.iterrows():
            marker = marks.get(str(name), ("o", ""))[0]
            axis.plot(row["displacement"], row["relative_error"], marker, color=colour, markersize=6, alpha=0.75, markeredgewidth=0)
    for marker, name in (*marks.values(), ("o", "random")):
        axis.plot([], [], marker, color="0.45", markersize=6, markeredgewidth=0, label=name)
    axis.set(
        title="Decode: no order is better or worse", xlim=(-0.03, 0.55),
        xlabel="how far windows are moved, mean, in video lengths",
    )  # fmt: skip
    axis.legend(loc="upper center", ncols=2)


def _prefill_queries(axis: Axes, rows: pd.DataFrame, result: Result) -> None:
    """Draw the median of the layers; the band holds eight of ten layers."""
    style = EVIDENCE_STYLE[result.evidence["relative_error"].kind] | {"marker": ""}
    shown = {
        ("random", "storage"): ("random order, mask by storage", _MILD),
        ("plan", "storage"): ("sorted by width, mask by storage", _WRONG),
        ("plan", "position"): ("sorted by width, mask by position", _RIGHT),
    }
    for (order, mask), (name, colour) in shown.items():
        mine = rows[(rows["order"] == order) & (rows["mask"] == mask)].sort_values("position")
        at = mine["position"].to_numpy(dtype=int)
        axis.fill_between(at, mine["error_low"], mine["error_high"], color=colour, alpha=0.18, linewidth=0)
        axis.plot(at, mine["relative_error"], color=colour, label=name, **style)
    border = rows.loc[rows["queries"] == "question", "position"].min() - 0.5
    axis.axvspan(border, rows["position"].max(), color="0.9", linewidth=0, zorder=0)
    axis.annotate(
        "the question", (border, _TOP), xytext=(-4, -4), textcoords="offset points", ha="right", va="top", fontsize=8, color="0.35"
    )
    axis.set(
        title="One layer of prefill, K and V reordered",
        xlabel="position of the query, from the first visual token",
        xlim=(0, rows["position"].max()),
    )
    axis.legend(loc="center", bbox_to_anchor=(0.43, 0.4))


def _prefill_states(axis: Axes, states: pd.DataFrame, tokens: pd.DataFrame, result: Result) -> None:
    """Draw hidden states: of the video as thick lines, of the question as thin ones."""
    style = EVIDENCE_STYLE[result.evidence["relative_error"].kind] | {"marker": ""}
    kl = tokens[tokens["queries"] == "question"].set_index("prefill")["kl"]
    for prefill, (name, colour) in _PREFILLS.items():
        for queries, width in (("video", 2.2), ("question", 0.9)):
            mine = states[(states["prefill"] == prefill) & (states["queries"] == queries)]
            text = f"{name}: KL {kl[prefill]:.1g}" if queries == "video" else None
            axis.plot(mine["layer"], mine["relative_error"], color=colour, linewidth=width, label=text, **style)
    axis.plot([], [], color="0.45", linewidth=2.2, label="hidden states of the video")
    axis.plot([], [], color="0.45", linewidth=0.9, label="hidden states of the question")
    axis.set(title="Whole prefill against the original order", xlabel="decoder layer")
    title = f"KL of the question's predictions, nats ({result.evidence['kl'].kind})"
    axis.legend(loc="center", bbox_to_anchor=(0.54, 0.4), title=title, title_fontsize=8, alignment="left")
