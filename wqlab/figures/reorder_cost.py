"""Table 8, method C: latency of attention over windows in place and reordered, and what the hardware's counters saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"reordered": "#0072B2", "in_place": "#E69F00", "in_place_sorted": "#009E73", "per_run": "#D55E00"}
_PAPER = "#CC79A7"


@register("figure", "reorder_cost")
def draw(result: Result) -> Figure:
    """Return three panels: latency per shape, times the reordered latency beside the paper's ratio, sectors per request."""
    import matplotlib.pyplot as plt

    figure, (latency, ratio, sectors) = plt.subplots(1, 3, figsize=(10.6, 3.9), width_ratios=[1.15, 1.15, 1])
    data = result.data
    bench = data[(data["part"] == "bench") & (data["plan"] == result.parameters["plan"])]
    _bars(latency, bench, "latency_us", result)
    latency.set(title=f"One layer, {result.parameters['plan']} widths", ylabel="latency (us)", yscale="log")
    low, high = latency.get_ylim()
    latency.set_ylim(low, high * 20)
    latency.legend(loc="upper left", fontsize=7)
    _bars(ratio, bench, "ratio", result)
    printed = data[data["part"] == "paper"]["paper_tokens_per_s"]
    paper = float(printed.max() / printed.min())
    text = label(f"{paper:.2g}x, whole steps, A800", result, "paper_tokens_per_s")
    line = ratio.axhline(paper, color=_PAPER, linewidth=1.2, linestyle="--", label=text)
    ratio.axhline(1, color="0.35", linewidth=1, linestyle=":")
    ratio.set(title="Against reordered", ylabel=label("times the reordered latency", result, "ratio"), yscale="log")
    ratio.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ratio.minorticks_off()
    ratio.set_ylim(0.7, max([paper, *bench["ratio"].dropna()]) * 3)
    ratio.legend(handles=[line], loc="upper left", fontsize=7)
    _sectors(sectors, bench, result)
    return figure


def _bars(axes: Axes, bench: pd.DataFrame, column: str, result: Result) -> None:
    """Draw a group of bars per shape, one per arrangement."""
    shapes = list(dict.fromkeys(bench["shape"]))
    for number, (key, colour) in enumerate(_COLOURS.items()):
        rows = bench[(bench["key"] == key) & bench[column].notna()]
        if rows.empty:
            continue
        places = np.array([shapes.index(shape) for shape in rows["shape"]]) + 0.2 * (number - 1.5)
        name = str(rows["name"].iloc[0]).replace("\n", " ")
        axes.bar(places, rows[column], 0.19, color=colour, label=label(name, result, column))
        for place, height in zip(places, rows[column], strict=True):
            axes.annotate(f"{height:.3g}", (place, height), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=6.5)
    axes.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axes.grid(axis="x", visible=False)


def _sectors(axes: Axes, bench: pd.DataFrame, result: Result) -> None:
    axes.set_title("Global loads")
    rows = bench[bench["sectors_per_request"].notna()]
    if rows.empty:
        text = "the record holds no counters:\nthe caption says why.\nwqlab bench width_order\ncounts where ncu may"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=8)
        axes.set_axis_off()
        return
    at = np.arange(len(rows))
    axes.bar(at, rows["sectors_per_request"], 0.6, color=[_COLOURS[key] for key in rows["key"]])
    columns = ("sectors_per_request", "dram_mb", "counted_launches", "launches")
    for place, (height, traffic, counted, launches) in enumerate(zip(*(rows[name] for name in columns), strict=True)):
        text = f"{height:.3g}\n{traffic:.4g} MB" + (f"\n({counted:.0f} of {launches:.0f}\nlaunches)" if counted < launches else "")
        axes.annotate(text, (place, height), xytext=(0, 1), textcoords="offset points", ha="center", va="bottom", fontsize=7)
    axes.axhline(16, color="0.35", linewidth=1, linestyle=":")
    axes.set_ylim(0, max(16.0, *rows["sectors_per_request"]) * 1.4)
    axes.set_xticks([])
    axes.set_ylabel(label("32-byte sectors per request", result, "sectors_per_request"))
    axes.set_xlabel(f"{rows['shape'].iloc[0]}, colours as on the left\nMB: read from memory", fontsize=8)
    axes.grid(axis="x", visible=False)
