"""Draw `wqlab.experiments.decode_latency`: latency against KV size with fitted lines, and the speed-up below its ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
_SIZES = {"fp16": "KV cache in 16 bits (GB)", "held": "KV cache as it is held (GB)"}


@register("figure", "decode_latency")
def draw(result: Result) -> Figure:
    """Return two panels: latency, and speed-up with its ceilings, both against the size of the cache."""
    import matplotlib.pyplot as plt

    figure, (latency, gain) = plt.subplots(1, 2, figsize=(9.2, 3.7), width_ratios=[1.25, 1])
    _latency(latency, result)
    _gain(gain, result)
    for axes in (latency, gain):
        axes.set_xlabel(_SIZES[result.parameters["size"]])
        axes.set_xlim(left=0)
    return figure


def _latency(axes: Axes, result: Result) -> None:
    style = EVIDENCE_STYLE[result.evidence["latency_ms"].kind] | {"linestyle": "none"}
    for method, (colour, name) in METHODS.items():
        rows = result.data[result.data["method"] == method].sort_values("size_gb")
        axes.plot(rows["size_gb"], rows["latency_ms"], color=colour, label=label(name, result, "latency_ms"), **style)
        if rows["size_gb"].nunique() > 2:
            slope, intercept = np.polyfit(rows["size_gb"], rows["latency_ms"], 1)
            ends = np.array([0.0, rows["size_gb"].max()])
            axes.plot(ends, intercept + slope * ends, color=colour, linewidth=1.0, alpha=0.6)
    floor = float(result.data["weight_floor_ms"].iloc[0])
    axes.axhline(floor, color="0.45", linewidth=1.0, linestyle=":")
    axes.annotate(
        f"reading the weights: {floor:.3g} ms", (1, floor), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", ha="right", va="top", fontsize=7.5, color="0.35",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("latency of a decode step (ms)")
    axes.set_title("One token for every row")
    axes.legend(loc="upper left")


def _gain(axes: Axes, result: Result) -> None:
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
    for row in rows.nlargest(1, "speedup").itertuples():
        text = f"batch {row.batch}, {row.frames} frames: {row.speedup:.2f}x"
        axes.annotate(text, (row.size_gb, row.speedup), xytext=(-4, -11), textcoords="offset points", ha="right", fontsize=7.5)
    axes.set_ylim(0.8, max([1.0, *rows["speedup"], *rows["ceiling"].dropna()]) * 1.25)
    axes.set_ylabel("speed-up over FP16")
    axes.set_title("WindowQuant against FP16")
    axes.legend(loc="upper left")
