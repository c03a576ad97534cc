"""Draw `wqlab.experiments.decode_latency`: latency against KV size with fitted lines, and the speed-up below its ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from wqlab.figures import EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: method -> colour (Okabe-Ito) and name.
METHODS = {"fp16": ("#0072B2", "FP16"), "windowquant": ("#D55E00", "WindowQuant")}
#: The one point of which the paper prints a throughput.
TABLE8_BATCH, TABLE8_FRAMES = 60, 5
_SIZES = {"fp16": "KV cache in 16 bits (GB)", "held": "KV cache as it is held (GB)"}


@register("figure", "decode_latency")
def draw(result: Result) -> Figure:
    """Return two panels: latency, and speed-up with its ceilings, both against the size of the cache."""
    import matplotlib.pyplot as plt

    figure, (latency, gain) = plt.subplots(1, 2, figsize=(9.2, 3.7), width_ratios=[1.25, 1])
    _latency(latency, result)
    _gain(gain, result)
    latency.set_xlim(left=0)
    for axes in (latency, gain):
        axes.set_xlabel(_SIZES[result.parameters["size"]])
    return figure


def _latency(axes: Axes, result: Result) -> None:
    style = EVIDENCE_STYLE[result.evidence["latency_ms"].kind] | {"linestyle": "none"}
    for method, (colour, name) in METHODS.items():
        rows = result.data[result.data["method"] == method].sort_values("size_gb")
        text = label(name, result, "latency_ms")
        if rows["size_gb"].nunique() > 2:
            slope, intercept = np.polyfit(rows["size_gb"], rows["latency_ms"], 1)
            ends = np.array([0.0, rows["size_gb"].max()])
            axes.plot(ends, intercept + slope * ends, color=colour, linewidth=1.0, alpha=0.6)
            text += f": {intercept:.3g} ms + {slope:.2g} ms/GB"
        axes.plot(rows["size_gb"], rows["latency_ms"], color=colour, label=text, **style)
    floor = float(result.data["weight_floor_ms"].iloc[0])
    axes.axhline(floor, color="0.45", linewidth=1.0, linestyle=":")
    axes.annotate(
        f"reading the weights: {floor:.3g} ms", (1, floor), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", ha="right", va="top", fontsize=7.5, color="0.35",
    )  # fmt: skip
    axes.set_ylim(0, float(result.data["latency_ms"].max()) * 1.2)
    axes.set_ylabel("latency (ms)")
    axes.set_title("A decode step: one token for every row")
    axes.legend(loc="upper left")


def _gain(axes: Axes, result: Result) -> None:
    from matplotlib.ticker import LogLocator

    data: pd.DataFrame = result.data
    rows = data[(data["method"] == "windowquant") & data["speedup"].notna()].sort_values("size_gb")
    kind = result.evidence["speedup"].kind
    style = EVIDENCE_STYLE[kind] | {"linestyle": "none"}
    axes.plot(
        rows["size_gb"], rows["speedup"], color=METHODS["windowquant"][0], label=label("speed-up", result, "speedup"), **style
    )
    axes.plot(
        rows["size_gb"], rows["ceiling"], color="0.3", marker="_", markersize=9, linestyle="none",
        label=label("ceiling: attention for nothing", result, "ceiling"),
    )  # fmt: skip
    axes.axhline(1, color="0.45", linewidth=1.0, linestyle=":")
    best = rows.nlargest(1, "speedup")
    for row in best.itertuples():
        _name(axes, row, (4, 9), "right")
    printed = rows[(rows["batch"] == TABLE8_BATCH) & (rows["frames"] == TABLE8_FRAMES)]
    for row in printed[~printed.index.isin(best.index)].itertuples():
        _name(axes, row, (0, 34), "center")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0.8, max([1.0, *rows["speedup"], *rows["ceiling"].dropna()]) * 1.25)
    axes.set_ylabel("speed-up over FP16")
    axes.set_title("WindowQuant against FP16")
    axes.legend(loc="upper left")


def _name(axes: Axes, row: Any, offset: tuple[int, int], side: Literal["center", "right"]) -> None:
    """Write beside a point whose it is."""
    axes.annotate(
        f"batch {row.batch}, {row.frames} frames: {row.speedup:.2f}x", (row.size_gb, row.speedup), xytext=offset,
        textcoords="offset points", ha=side, fontsize=7.5,
        arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkB": 4} if side == "center" else None,
    )  # fmt: skip
