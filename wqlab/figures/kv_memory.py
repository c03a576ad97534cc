"""Draw `wqlab.experiments.kv_memory`: the bars of Fig. 1b, the bytes against video length, and the audit of the printed number."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from wqlab.figures import EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: part -> colour (Okabe-Ito, with a neutral grey for what never grows).
_COLOURS = {"weights": "#8C8C8C", "visual KV": "#0072B2", "text KV": "#E69F00"}
_PRINTED = "#D55E00"


@register("figure", "kv_memory")
def draw(result: Result) -> Figure:
    """Return three panels: stacked bars at the shortest and longest video, lines over length, the audit."""
    import matplotlib.pyplot as plt

    length = result.data[result.data["part_of"] == "length"]
    figure = plt.figure(figsize=(9.6, 3.5))
    grid = figure.add_gridspec(1, 3, width_ratios=[0.75, 1.35, 1.75])
    bars = figure.add_subplot(grid[0])
    lines = figure.add_subplot(grid[1], sharey=bars)
    _bars(bars, length, float(result.parameters["seconds"]))
    _lines(lines, length, result)
    _audit(figure.add_subplot(grid[2]), result)
    return figure


def _bars(axes: Axes, length: pd.DataFrame, longest: float) -> None:
    ends = sorted({min(0.5, longest), longest})
    for place, seconds in enumerate(ends):
        sizes = length[length["seconds"] == seconds].set_index("part")["gb"]
        bottom = 0.0
        for part, colour in _COLOURS.items():
            axes.bar(place, sizes[part], bottom=bottom, color=colour, width=0.62, edgecolor="white", linewidth=0.8)
            bottom += sizes[part]
        axes.text(place, bottom, f"{bottom:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(ends)), [f"{seconds:g} s" for seconds in ends])
    axes.set_xlim(-0.6, len(ends) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylabel("memory (GB)")
    axes.grid(visible=False, axis="x")
    axes.set_title(f"{length['case'].iloc[0]}: bytes against video length")  # runs on over the lines, which share the axis


def _lines(axes: Axes, length: pd.DataFrame, result: Result) -> None:
    for part, colour in _COLOURS.items():
        rows = length[length["part"] == part].sort_values("seconds")
        axes.plot(rows["seconds"], rows["gb"], color=colour, label=label(part, result, "gb"), **EVIDENCE_STYLE["simulated"])
    table = length.pivot_table(index="seconds", columns="part", values="gb")
    above = table[table["visual KV"] > table["weights"]]
    if 0 < len(above) < len(table):
        crossing, level = above.index[0], table["weights"].iloc[0]
        axes.plot(crossing, level, marker="o", color="black", markersize=4, linestyle="none")
        text = f"equal at about {crossing:.3g} s"
        axes.annotate(text, (crossing, level), xytext=(6, -12), textcoords="offset points", fontsize=7.5, color="0.2")
    axes.set_xlim(0, length["seconds"].max() * 1.02)
    axes.set_xlabel("video length (s)")
    axes.tick_params(labelleft=False)
    axes.legend(loc="best")


def _audit(axes: Axes, result: Result) -> None:
    audit = result.data[result.data["part_of"] == "audit"]
    computed = audit[audit["gb"].notna()].reset_index(drop=True)
    printed = float(audit["paper_gb"].dropna().iloc[0])
    axes.axvline(printed, color=_PRINTED, linewidth=1.2)
    top = -0.62
    axes.plot(printed, top, color=_PRINTED, **{**EVIDENCE_STYLE["paper"], "markersize": 10}, clip_on=False)
    axes.text(printed - 0.6, top, f"printed: {printed:g} GB (paper)", ha="right", va="center", color="#B04A00", fontsize=8)
    for place, (size, mib) in enumerate(zip(computed["gb"], computed["mib"], strict=True)):
        axes.barh(place, size, color=_COLOURS["visual KV"], height=0.5)
        inside = size > 0.4 * printed
        where, side, colour = (min(size, printed) - 0.5, "right", "white") if inside else (size + 0.5, "left", "0.15")
        axes.text(where, place, f"{size:.1f} GB = {mib:,.0f} MiB", ha=side, va="center", color=colour, fontsize=8)
    axes.set_yticks(range(len(computed)), ["\n".join(textwrap.wrap(case, 21)) for case in computed["case"]])
    axes.set_ylim(len(computed) - 0.5, -0.95)
    axes.set_xlim(0, max(printed, computed["gb"].max()) * 1.06)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"visual KV cache (GB, {result.evidence['gb'].kind}),\n30 s, 30 frames/s, 256 tokens each")
    axes.set_title(f"Whose {printed:g} GB?")
