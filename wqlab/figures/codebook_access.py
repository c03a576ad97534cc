"""Fig. 8, Fig. 9 and Table V: entries sorted by use, hot entries in the parts of a tensor, hot entries and bytes per method."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.figures import heatmap, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"quip": "QuIP#-4", "aqlm": "AQLM-3", "gptvq": "GPTVQ-2", "cq_4": "CQ-4", "cq_2": "CQ-2"}
_COLOURS = {"quip": "#0072B2", "aqlm": "#D55E00", "gptvq": "#009E73", "cq_4": "#E69F00", "cq_2": "#CC79A7"}
#: Least relative count that is drawn: entries that are never read have no place on a logarithmic axis.
_FLOOR = 0.01


@register("figure", "codebook_access")
def draw(result: Result) -> Figure:
    """Return five panels: curves and heatmap above, three bars of Table V below."""
    import matplotlib.pyplot as plt

    parts = {str(part): rows for part, rows in result.data.groupby("part", sort=False)}
    figure = plt.figure(figsize=(10.8, 7.4))
    grid = figure.add_gridspec(2, 6, height_ratios=[1.15, 1])
    _curves(figure.add_subplot(grid[0, :3]), parts["sorted"], parts["books"], result)
    _heatmap(figure.add_subplot(grid[0, 3:]), parts["heatmap"], parts["books"], result)
    methods = parts["methods"]
    _hot(figure.add_subplot(grid[1, :2]), methods, result)
    _below(figure.add_subplot(grid[1, 2:4]), methods, result)
    _bytes(figure.add_subplot(grid[1, 4:]), methods, result)
    return figure


def _curves(axes: Axes, rows: pd.DataFrame, books: pd.DataFrame, result: Result) -> None:
    for (name, book), curve in rows.groupby(["method", "book"], sort=False):
        method = str(name)
        about = books[(books["method"] == method) & (books["book"] == book)].iloc[0]
        # A row holds up to the next one, the last one to the end of the codebook.
        ranks = np.append(curve["rank"].to_numpy(dtype=float) + 1, float(about["entries"]) + 1)
        heights = curve["relative"].to_numpy(dtype=float)
        heights = np.append(heights, heights[-1])
        first = book == 0
        axes.step(
            ranks, heights, where="post", color=_COLOURS[method], linewidth=1.6 if first else 0.6, alpha=1 if first else 0.35,
            label=label(_NAMES[method], result, "count") if first else None,
        )  # fmt: skip
        if first:
            limit = 1 + 3 * float(about["sigma"]) / float(about["mean"])
            at = float(about["hot"]) + 1
            axes.plot(at, limit, marker="_", markersize=15, markeredgewidth=2.2, color=_COLOURS[method], linestyle="none")
    axes.plot([], [], "_", color="0.3", markersize=11, markeredgewidth=2.2, linestyle="none", label="mean + 3 sigma of that book")
    axes.axhline(1, color="0.35", linewidth=1, linestyle=":", label="mean")
    axes.set(xscale="log", yscale="log", xlabel="entries, sorted by use", ylabel="reads of an entry over the mean")
    axes.set_ylim(bottom=max(_FLOOR, axes.get_ylim()[0]))
    axes.set_title(f"{result.parameters['weight']}; {result.parameters['cache']} cache (thick: book 0)")
    axes.legend(loc="lower left", fontsize=7)


def _heatmap(axes: Axes, rows: pd.DataFrame, books: pd.DataFrame, result: Result) -> None:
    method = result.parameters["method"]
    about = books[(books["method"] == method) & (books["book"] == 0)].iloc[0]
    table = rows.pivot_table(index="rank", columns="run", values="relative")
    table.index, table.columns = (i.astype(int) + 1 for i in (table.index, table.columns))
    bar = {"label": label("reads over the part's mean", result, "relative")}
    heatmap(table, axes, cmap="viridis", vmin=0, cbar_kws=bar, yticklabels=4)
    axes.tick_params(axis="both", rotation=0)
    tensor = str(about["tensor"])
    what = "rows" if tensor == result.parameters["weight"] else "tokens"
    axes.set(xlabel=f"part of the tensor, in the order of its {what}", ylabel="entry of book 0, hottest first")
    axes.set_title(
        f"{_NAMES[method]}, {tensor}: rank correlation of parts {about['correlation']:.2f}\n"
        f"({about['correlation_shuffled']:.2f} with shuffled positions)"
    )


def _places(axes: Axes, methods: pd.DataFrame) -> np.ndarray:
    places = np.arange(len(methods))
    axes.set_xticks(places, [_NAMES[m] for m in methods["method"]], fontsize=8)
    axes.grid(axis="x", visible=False)
    return places


def _bars(axes: Axes, methods: pd.DataFrame, column: str, form: str, result: Result) -> np.ndarray:
    places, heights = _places(axes, methods), methods[column].to_numpy(dtype=float)
    ends = methods[[f"{column}_low", f"{column}_high"]].to_numpy(dtype=float).T
    colours = [_COLOURS[m] for m in methods["method"]]
    axes.bar(places - 0.14, heights, 0.5, color=colours, yerr=np.abs(ends - heights), ecolor="0.4", capsize=2)
    for place, height, top in zip(places, heights, ends[1], strict=True):
        axes.annotate(form.format(height), (place - 0.14, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7)
    return places


def _hot(axes: Axes, methods: pd.DataFrame, result: Result) -> None:
    places = _bars(axes, methods, "hot", "{:.2g}", result)
    low, high = (methods[c].to_numpy(dtype=float) for c in ("paper_hot_low", "paper_hot_high"))
    shown = np.isfinite(high)
    middle, half = (low + high)[shown] / 2, (high - low)[shown] / 2
    text = label("Table V", result, "paper_hot_low")
    axes.errorbar(places[shown] + 0.28, middle, half, fmt="none", ecolor="black", elinewidth=3, capsize=4, label=text)
    axes.set_title("Hot entries of a codebook")
    axes.set_ylabel(label("entries above mean + 3 sigma", result, "hot"))
    axes.set_yscale("symlog", linthresh=2)
    top = float(np.nanmax([methods["hot_high"].max(), np.nanmax(high, initial=1)]))
    axes.set_ylim(0, top * 4)
    axes.set_yticks([t for t in (0, 1, 2, 5, 10, 20, 50, 100, 200) if t <= top * 4])
    axes.set_yticklabels([f"{t:g}" for t in axes.get_yticks()])
    axes.minorticks_off()
    axes.legend(loc="upper right", fontsize=7)


def _below(axes: Axes, methods: pd.DataFrame, result: Result) -> None:
    _bars(axes, methods.assign(**{c: 100 * methods[c] for c in ("below_mean", "below_mean_low", "below_mean_high")}),
          "below_mean", "{:.0f}", result)  # fmt: skip
    axes.axhline(50, color="0.25", linewidth=1, linestyle="--")
    axes.set_title("Entries read less often than the mean")
    axes.set_ylabel(label("% of the entries", result, "below_mean"))
    axes.set_ylim(0, 110)


def _bytes(axes: Axes, methods: pd.DataFrame, result: Result) -> None:
    places = _places(axes, methods)
    for shift, column, face, name in ((-0.27, "kb", None, "ours, Llama-7B's sizes"), (0.0, "kb_here", "0.8", "ours, this layer")):
        colours = [face or _COLOURS[m] for m in methods["method"]]
        bars = axes.bar(places + shift, methods[column], 0.25, color=colours, label=label(name, result, column))
        axes.bar_label(bars, [f"{v:g}" for v in methods[column]], padding=1, fontsize=6.5)
    shown = methods["paper_kb"].notna().to_numpy()
    text = label("Table V", result, "paper_kb")
    axes.plot(places[shown] + 0.27, methods["paper_kb"][shown], "*", color="black", markersize=8, label=text)
    for place, value in zip(places[shown], methods["paper_kb"][shown], strict=True):
        axes.annotate(f"{value:g}", (place + 0.27, value), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=6.5)
    axes.set(yscale="log", ylabel="KB", title="Codebooks of a block")
    axes.set_ylim(0.7, 128 * 20)
    axes.set_yticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    axes.minorticks_off()
    axes.legend(loc="upper right", fontsize=7)
