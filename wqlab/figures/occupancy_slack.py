"""Fig. 10: resident warps against registers and shared memory with the slack shaded, and the slack on every GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FixedFormatter, FixedLocator

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REGISTERS, _SHARED = "#0072B2", "#E69F00"


@register("figure", "occupancy_slack")
def draw(result: Result) -> Figure:
    """Return four panels: two curves, and the two kinds of slack per GPU."""
    import matplotlib.pyplot as plt

    parts = {str(part): rows for part, rows in result.data.groupby("part", sort=False)}
    p, slack = result.parameters, parts["gpu"].set_index("gpu")
    here = slack.loc[p["gpu"]]
    figure = plt.figure(figsize=(10.2, 5.6))
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 1.05])
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _curve(left, parts["registers"], "registers", p["registers"], here["register_slack"], here, result)
    left.set(xlabel="registers per thread", xlim=(0, 257))
    # A locator: `set_xticks` would make every tick at once, though a slider's redraw shows none anew.
    left.xaxis.set_major_locator(FixedLocator(range(0, 257, 32)))
    _curve(right, parts["shared memory"], "shared_kb", p["shared_kb"], here["shared_slack_kb"], here, result)
    right.set(xlabel="shared memory per block (KB)")
    right.set_xlim(0, 1.01 * float(parts["shared memory"]["shared_kb"].max()))
    places = np.arange(len(slack))[::-1]
    below = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _bars(below[0], slack, places, ("register_slack", "entries_in_registers", _REGISTERS), result)
    below[0].set_xlabel(label("registers per thread", result, "register_slack"))
    below[0].set_title("Register slack (and entries it holds)")
    _bars(below[1], slack, places, ("shared_slack_kb", "entries_in_shared", _SHARED), result)
    below[1].set_xlabel(label("KB per block", result, "shared_slack_kb"))
    below[1].set_title("Shared-memory slack (and entries it holds)")
    return figure


def _curve(axes: Axes, rows: pd.DataFrame, column: str, value: float, slack: float, here: Any, result: Result) -> None:
    colour = _REGISTERS if column == "registers" else _SHARED
    # The warps of a point hold for all values above the point before.
    axes.step(rows[column], rows["warps"], where="pre", color=colour, label=label("warps", result, "warps"))
    axes.axhline(here["max_warps"], color="0.35", linewidth=1, linestyle=":")
    if here["blocks"]:
        axes.axvspan(value, value + slack, color=colour, alpha=0.22, linewidth=0, label=f"slack: {slack:g}")
    axes.plot(value, here["warps"], "o", color="black", markersize=6, label=f"the kernel: {here['blocks']:.0f} blocks")
    axes.set(ylabel="resident warps per SM", ylim=(0, 1.1 * here["max_warps"]))
    axes.set_title(f"{str(here['name']).split(',')[0]}: limited by {here['limiter']}")
    axes.legend(loc="upper right", fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none")


def _bars(axes: Axes, slack: pd.DataFrame, places: Any, what: tuple[str, str, str], result: Result) -> None:
    column, entries, colour = what
    widths = slack[column].to_numpy(dtype=float)
    chosen = slack.index == result.parameters["gpu"]
    # One collection instead of a patch per bar, and limits that seldom change: a slider then redraws the data alone.
    axes.hlines(places, 0, np.nan_to_num(widths), color=[colour if own else "0.72" for own in chosen], linewidth=13)
    most = 2 ** np.ceil(np.log2(max(32.0, float(np.nanmax(widths, initial=0)))))
    for place, width, count, blocks, limiter in zip(places, widths, slack[entries], slack["blocks"], slack["limiter"], strict=True):
        if np.isnan(width):
            text = limiter
        elif not blocks:
            text = "no block can be launched"
        else:
            text = f"{width:.4g}  ({count:,.0f} entries)"
        axes.text((0 if np.isnan(width) else width) + 0.015 * most, place, text, va="center", fontsize=7.5)
    axes.yaxis.set_major_locator(FixedLocator(places.tolist()))
    axes.yaxis.set_major_formatter(FixedFormatter(list(slack.index)))
    axes.set_xlim(0, 1.45 * most)
    axes.set_ylim(-0.6, len(slack) - 0.4)
    axes.grid(axis="y", visible=False)
