"""Table 9: latency of a layer's attention, fused and unfused, at the paper's shape; and the ratio at every shape and mix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"decode": "#E69F00", "attention": "#0072B2", "whole": "0.75", "paper": "#CC79A7"}
_MIXES = {"10/30/60": "#009E73", "int4": "#E69F00", "int2": "#D55E00"}


@register("figure", "operator_fusion")
def draw(result: Result) -> Figure:
    """Return two panels: the parts of each arrangement, and what the tuned unfused one takes against the fused one."""
    import matplotlib.pyplot as plt

    figure, (parts, ratios) = plt.subplots(1, 2, figsize=(10.2, 4.0), width_ratios=[1.35, 1])
    _parts(parts, result)
    _ratios(ratios, result)
    return figure


def _parts(axes: Axes, result: Result) -> None:
    data, mix = result.data, result.parameters["mix"]
    printed = data[data["part"] == "paper"].set_index("key")
    shape = printed["shape"].iloc[0]
    here = (data["part"] == "bench") & (data["shape"] == shape) & (data["mix"] == mix)
    found = data[here & data["latency_ms"].notna()].set_index("key")
    axes.set_title(f"{shape}, {mix}")
    if found.empty:
        axes.text(
            0.5, 0.5, f"the record has no time\nat this shape and mix {mix}", ha="center", va="center", transform=axes.transAxes
        )
        axes.set_axis_off()
        return
    at = np.arange(len(found))
    axes.bar(at, found["latency_ms"], 0.62, color=_COLOURS["whole"], label=label("whole", result, "latency_ms"))
    for shift, part, text in ((-0.15, "decode", "decoding alone"), (0.15, "attention", "attention alone")):
        known = found[f"{part}_ms"].notna().to_numpy()
        if known.any():
            heights = found[f"{part}_ms"].to_numpy()[known]
            axes.bar(at[known] + shift, heights, 0.26, color=_COLOURS[part], label=label(text, result, f"{part}_ms"))
    for place, (height, ratio) in enumerate(zip(found["latency_ms"], found["ratio"], strict=True)):
        text = f"{height:.3g} ms" if np.isnan(ratio) or place == 0 else f"{height:.3g} ms\n{ratio:.2f}x"
        axes.annotate(text, (place, height), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7.5)
    stars = [(place, printed.loc[key, "paper_ms"]) for place, key in enumerate(found.index) if key in printed.index]
    if stars:
        axes.plot(*zip(*stars, strict=True), "*", color=_COLOURS["paper"], markersize=11, label=label("A800", result, "paper_ms"))
    axes.set_xticks(at, list(found["name"]), fontsize=7.5)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 3)
    axes.set_ylabel("latency of a layer's attention (ms)")
    axes.legend(loc="upper left", ncols=2)
    axes.grid(axis="x", visible=False)


def _ratios(axes: Axes, result: Result) -> None:
    data = result.data
    rows = data[(data["part"] == "bench") & (data["key"] == "unfused") & data["ratio"].notna()]
    shapes = list(dict.fromkeys(rows["shape"]))
    for number, (mix, colour) in enumerate(_MIXES.items()):
        known = rows[rows["mix"] == mix].set_index("shape")["ratio"]
        heights = [float(known.get(shape, np.nan)) for shape in shapes]
        places = np.arange(len(shapes)) + 0.26 * (number - 1)
        axes.bar(places, heights, 0.24, color=colour, label=label(mix, result, "ratio"))
        for place, height in zip(places, heights, strict=True):
            if np.isfinite(height):
                axes.annotate(f"{height:.2g}", (place, height), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=7)
    axes.axhline(1, color="0.35", linewidth=1, linestyle=":")
    printed = data.loc[data["part"] == "paper", "paper_ms"]
    paper = float(printed.max() / printed.min())
    axes.axhline(
        paper, color=_COLOURS["paper"], linewidth=1.2, linestyle="--", label=label(f"{paper:.2f}x, A800", result, "paper_ms")
    )
    axes.set_xticks(np.arange(len(shapes)), shapes, fontsize=7.5)
    axes.set(title="Decode, then SDPA, against fused", ylabel="times the fused latency")
    axes.set_ylim(0, max([paper, *rows["ratio"]]) * 1.45)
    axes.legend(loc="upper left", ncols=2)
    axes.grid(axis="x", visible=False)
