"""Fig. 2 in both halves: what bits buy, for weights and for a cache, and where the points of both grids lie on real keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab.experiments.vq_quality import METRICS
from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "rtn_weight": "#E69F00", "awq": "#999999", "quip": "#0072B2", "aqlm": "#CC79A7", "gptvq": "#009E73",
    "rtn": "#E69F00", "kivi": "#009E73", "qoq": "#56B4E9", "cq": "#D55E00", "fp16": "#000000", "quip+cq": "#7A5195",
}  # fmt: skip
_NAMES = {
    "rtn_weight": "RTN, groups of 128", "awq": "AWQ", "quip": "QuIP#", "aqlm": "AQLM", "gptvq": "GPTVQ",
    "rtn": "RTN per window", "kivi": "KIVI", "qoq": "QoQ", "cq": "CQ", "fp16": "FP16", "quip+cq": "QuIP# + CQ",
}  # fmt: skip
_AXES = {
    "nll_difference": ("loss against FP16, nats per token", 1.0),
    "accuracy_difference": ("accuracy against FP16, points", 100.0),
}
#: CQ's kinds: marker by where its keys stand, filled by its weighting.
_MARKERS = {"before": "o", "after": "s"}


@register("figure", "vq_quality")
def draw(result: Result) -> Figure:
    """Return four panels: weights, cache, points, and what positions do."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10.8, 8.2))
    _weights(axes[0, 0], result)
    _cache(axes[0, 1], result)
    _points(axes[1, 0], result)
    _rotary(axes[1, 1], result)
    return figure


def _chosen(result: Result, part: str) -> list[dict[str, Any]]:
    data = result.data
    metric = METRICS[result.parameters["exam"]]
    rows = data[(data["part"] == part) & (data["metric"] == metric) & (data["exam"] == result.parameters["exam"])]
    found: list[dict[str, Any]] = rows.to_dict("records")
    return found


def _dress(axes: Axes, result: Result, title: str, what: str, column: str) -> None:
    metric = METRICS[result.parameters["exam"]]
    name, _ = _AXES[metric]
    if metric == "nll_difference":
        axes.set_yscale("symlog", linthresh=1e-2)
    axes.axhline(0, color="0.4", linewidth=1, linestyle=":")
    axes.set(title=title, xlabel=label(f"bits per {what}", result, column), ylabel=label(name, result, "value"))


def _weights(axes: Axes, result: Result) -> None:
    seen: set[str] = set()
    rows = [*_chosen(result, "weights"), *_chosen(result, "both")]
    if not rows:
        _missing(axes, "Weights of all linear layers")
        return
    for row in rows:
        _, factor = _AXES[row["metric"]]
        colour, value = _COLOURS[row["method"]], factor * row["value"]
        name = _NAMES[row["method"]] if row["method"] not in seen else None
        seen.add(row["method"])
        axes.plot([row["code_bits"], row["total_bits"]], [value, value], color=colour, linewidth=1, alpha=0.7)
        axes.plot(row["code_bits"], value, "|", color=colour, markersize=9)
        error = [[max(value - factor * row["low"], 0)], [max(factor * row["high"] - value, 0)]]
        both = row["part"] == "both"
        axes.errorbar(
            row["total_bits"],
            value,
            error,
            fmt="D" if both else "o",
            color=colour,
            capsize=2,
            linewidth=1,
            markersize=6,
            label=name,
        )
    _dress(axes, result, "Weights of all linear layers", "weight: tick codes alone, dot everything", "total_bits")
    axes.legend(fontsize=7.5)


def _missing(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.text(0.5, 0.5, "not recorded: the caption\nsays how to get it", ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()


def _cache(axes: Axes, result: Result) -> None:
    seen: set[tuple[Any, ...]] = set()
    if not _chosen(result, "cache"):
        _missing(axes, "KV cache")
        return
    for row in _chosen(result, "cache"):
        if row["method"] == "fp16":
            continue
        _, factor = _AXES[row["metric"]]
        colour, value = _COLOURS[row["method"]], factor * row["value"]
        keys = next((k for k in _MARKERS if f"keys {k}" in row["setting"]), "")
        hollow = "Fisher" in row["setting"] or "own policy" in row["setting"]
        words = [_NAMES[row["method"]]]
        words += [f"keys {keys} RoPE"] if keys else []
        words += ["Fisher-weighted"] if "Fisher" in row["setting"] else []
        words += ["its own policy"] if "own policy" in row["setting"] else []
        kind = tuple(words)
        error = [[max(value - factor * row["low"], 0)], [max(factor * row["high"] - value, 0)]]
        axes.errorbar(
            row["total_bits"], value, error, fmt=_MARKERS.get(keys, "^"), color=colour, capsize=2, linewidth=1, markersize=6,
            markerfacecolor="white" if hollow else colour, label=None if kind in seen else ", ".join(words),
        )  # fmt: skip
        seen.add(kind)
    _dress(axes, result, "KV cache", "cached element, scales included", "total_bits")
    axes.legend(fontsize=7)


def _points(axes: Axes, result: Result) -> None:
    data = result.data
    x, rtn, cq = (data[data["part"] == part] for part in ("keys", "rtn points", "cq points"))
    errors = data[data["part"] == "error"].set_index("method")["mse"]
    axes.plot(x["x"], x["y"], ".", color="0.65", markersize=3.5, label=label("keys", result, "x"), zorder=1)
    for rows, method, name, marker in ((rtn, "rtn", "RTN", "+"), (cq, "cq", "CQ", "x")):
        text = f"{name}, {len(rows)} points, MSE {errors[method]:.3g}"
        axes.plot(
            rows["x"], rows["y"], marker, color=_COLOURS[method], markersize=6, markeredgewidth=1.4, linestyle="none", label=text
        )
    axes.plot([], [], " ", label=f"RTN per window of 32: MSE {errors['rtn windows']:.3g}, plus a bit for scales")
    p = result.parameters
    where = "before" if p["keys"] == "before" else "behind"
    axes.set_title(f"Keys {where} RoPE, layer {p['layer']}, head {p['head']}, {p['num_bits']} bits per element")
    axes.set(xlabel=f"channel {2 * p['pair']}", ylabel=f"channel {2 * p['pair'] + 1}")
    axes.legend(fontsize=7)


def _rotary(axes: Axes, result: Result) -> None:
    rows = result.data[result.data["part"] == "rotary"]
    title = "Error on held-out keys and values of videos"
    if rows.empty:
        _missing(axes, title)
        return
    axes.set_title(title)
    places = [("key", "before"), ("key", "after"), ("key", "mrope"), ("value", "")]
    names = ["keys\nbefore RoPE", "keys\nbehind RoPE", "keys\nbehind M-RoPE", "values"]
    ways = [("rtn", 4), ("cq", 4), ("rtn", 2), ("cq", 2)]
    for number, (method, bits) in enumerate(ways):
        found = rows[(rows["method"] == method) & (rows["num_bits"] == bits)].set_index(["tensor", "rotary"])["key_error"]
        text = f"{_NAMES[method]}, {bits} bits"
        at = np.arange(len(places)) + 0.2 * (number - 1.5)
        axes.bar(
            at, [float(found[place]) for place in places], 0.19, color=_COLOURS[method], alpha=1 if bits == 4 else 0.5, label=text
        )
    axes.set_xticks(range(len(places)), names)
    axes.set(yscale="log", ylabel=label("squared error over squared length", result, "key_error"))
    axes.grid(axis="x", visible=False)
    axes.legend(fontsize=7.5)
