"""Tables 7 and 8: what each variant does to answers, how it differs from WindowQuant, and what the paper prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.experiments.ablation import NAMES
from wqlab.experiments.answers import AXES
from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "int2": "0.6", "int4": "0.6", "plan": "#0072B2", "no_first_window": "#56B4E9", "permuted_0": "#E69F00", "permuted_1": "#E69F00",
    "truth": "#009E73", "inverse": "#D55E00",
}  # fmt: skip


@register("figure", "ablation")
def draw(result: Result) -> Figure:
    """Return three panels with a row per variant."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10.8, 3.9), width_ratios=[1.15, 1, 1])
    _metric(axes[0], result)
    _difference(axes[1], result)
    _printed(axes[2], result)
    return figure


def _rows(axes: Axes, keys: list[str]) -> None:
    axes.set_yticks(range(len(keys)), [NAMES[key] for key in keys])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _metric(axes: Axes, result: Result) -> None:
    name, factor, unit = AXES[result.parameters["metric"]]
    column = result.parameters["metric"]
    data = result.data[(result.data["part"] == "answers") & (result.data["num_frames"] == result.parameters["num_frames"])]
    data = data.set_index("variant")
    keys = [key for key in NAMES if key in data.index]
    for place, key in enumerate(keys):
        row = data.loc[key]
        axes.hlines(place, factor * row[f"{column}_low"], factor * row[f"{column}_high"], color=_COLOURS[key], linewidth=2)
        axes.plot(factor * row[column], place, "o", color=_COLOURS[key], markersize=6)
        at, text = (factor * row[f"{column}_high"], place), f"{row['bits_per_element']:.2f} bits"
        axes.annotate(text, at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=7)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.22 * (high - low))
    axes.set_title(f"{result.parameters['num_frames']} frames, {result.parameters['normalize']}")
    axes.set_xlabel(label(f"{name} ({unit})", result, column))
    _rows(axes, keys)


def _difference(axes: Axes, result: Result) -> None:
    data = result.data[(result.data["part"] == "difference") & (result.data["num_frames"] == result.parameters["num_frames"])]
    axes.set_title("Accuracy against WindowQuant")
    if data.empty:
        axes.text(0.5, 0.5, "not recorded for\nthis normalization", ha="center", va="center", transform=axes.transAxes, fontsize=8)
        axes.set_axis_off()
        return
    data = data.set_index("variant")
    keys = [key for key in NAMES if key in data.index]
    for place, key in enumerate(keys):
        row = data.loc[key]
        axes.hlines(place, 100 * row["gain_low"], 100 * row["gain_high"], color=_COLOURS[key], linewidth=2)
        axes.plot(100 * row["gain"], place, "o", color=_COLOURS[key], markersize=6)
    axes.axvline(0, color="0.4", linewidth=1, linestyle=":")
    axes.set_xlabel(label("points, paired", result, "gain"))
    _rows(axes, keys)


def _printed(axes: Axes, result: Result) -> None:
    data = result.data[result.data["part"] == "paper"].set_index("variant")
    names = {**NAMES, "fp16": "full precision", "without_reorder": "without reorder"}
    keys = ["fp16", "plan", "no_first_window", "permuted_0", "without_reorder"]
    for place, key in enumerate(keys):
        row = data.loc[key]
        axes.plot(row["paper_accuracy"], place, "D", color=_COLOURS.get(key, "0.6"), markersize=6)
        text = f"{row['paper_accuracy']:g} %, {row['paper_tokens_per_s']:,.0f} tokens/s"
        axes.annotate(text, (row["paper_accuracy"], place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(keys)), [names[key] for key in keys])
    axes.invert_yaxis()
    axes.set_xlim(54.5, 63)
    axes.set_title("What Table 8 prints")
    axes.set_xlabel(label("accuracy in %", result, "paper_accuracy"))
    axes.grid(axis="y", visible=False)
