"""Where the words of a codebook lie: bank x entry, the load of each bank, wavefronts per load, and the rate that is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedFormatter, FixedLocator

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"contiguous": "#D55E00", "padded": "#E69F00", "swizzled": "#56B4E9", "replicated": "#009E73"}
#: FP16 elements that 32 banks of 4 bytes give per clock.
_LIMIT = 64
#: Ticks are given as locators: `set_ticks` would make every tick at once, though a slider's redraw shows none anew.
_BANKS = (0, 8, 16, 24, 31)


@register("figure", "bank_conflicts")
def draw(result: Result) -> Figure:
    """Return four panels: heat map, load per bank, histogram, rates."""
    import matplotlib.pyplot as plt

    parts = {str(part): rows for part, rows in result.data.groupby("part", sort=False)}
    figure = plt.figure(figsize=(10.4, 5.6))
    grid = figure.add_gridspec(2, 2, height_ratios=[1.2, 1], width_ratios=[2.4, 1])
    _heat(figure.add_subplot(grid[0, 0]), parts["entry"], result)
    _banks(figure.add_subplot(grid[0, 1]), parts["bank"], result)
    _histogram(figure.add_subplot(grid[1, 0]), parts["wavefronts"], result)
    _rates(figure.add_subplot(grid[1, 1]), parts["layout"], result)
    return figure


def _heat(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    p = result.parameters
    share = 100 * rows["share"].to_numpy(dtype=float).reshape(-1, 32).T
    # Entries that nobody loads from here stay white.
    axes.imshow(np.where(share > 0, share, np.nan), aspect="auto", interpolation="nearest", cmap="viridis_r", origin="lower")
    axes.set(xlabel="entry, the most frequent first", ylabel="bank")
    axes.yaxis.set_major_locator(FixedLocator(_BANKS))
    axes.set_title(f"{p['scheme']}: {p['num_entries']:,} entries of {p['entry_bytes']} bytes (dark: looked up often)")
    axes.grid(False)
    if p["n_reg"]:
        held = min(p["n_reg"], share.shape[1])
        axes.axvspan(-0.5, held - 0.5, color="0.88")
        text = f"{p['n_reg']} in registers" if held > 8 else "regs"
        axes.text(held / 2 - 0.5, 15.5, text, ha="center", va="center", fontsize=8, rotation=90)


def _banks(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    share = 100 * rows["share"].to_numpy(dtype=float)
    axes.stairs(share, np.arange(33) - 0.5, orientation="horizontal", fill=True, color=COLOURS[result.parameters["scheme"]])
    axes.axvline(100 / 32, color="0.35", linewidth=1, linestyle=":")
    axes.set(ylim=(-0.5, 31.5), ylabel="bank")
    axes.yaxis.set_major_locator(FixedLocator(_BANKS))
    axes.set_xlim(0, _rounded(share.max(), 6.25))
    axes.set_xlabel(label("share of the loaded words, %", result, "share"))
    axes.set_title("Load of each bank (dotted: even)")
    axes.grid(axis="y", visible=False)


def _rounded(most: float, least: float) -> float:
    """Return `least`, doubled until it holds `most`: limits that seldom change let a slider redraw the data alone."""
    return float(least * 2 ** max(0, np.ceil(np.log2(max(most, 1e-9) / least))))


def _histogram(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    means = result.data[result.data["part"] == "layout"].set_index("scheme")
    schemes = list(means.index)
    most = _rounded(float(rows["wavefronts"].max()), 16)
    step = 0.8 / len(schemes)
    for number, scheme in enumerate(schemes):
        found = rows[rows["scheme"] == scheme]
        heights = 100 * found["loads"].to_numpy(dtype=float)
        places = found["wavefronts"].to_numpy(dtype=float) + (number - (len(schemes) - 1) / 2) * step
        text = f"{scheme}, {means.loc[scheme, 'access_bytes']:.0f}-byte loads"
        if scheme == "replicated":
            text += f", {means.loc[scheme, 'copies']:.0f} copies"
        # One collection per layout instead of a patch per bar; the panel is about 430 points wide.
        axes.vlines(places, 0, heights, color=COLOURS[scheme], linewidth=430 * step / (most + 1), capstyle="butt", label=text)
    axes.set(xlabel="wavefronts of a warp's load", xlim=(-0.5, most + 0.5), ylim=(0, 105))
    axes.xaxis.set_major_locator(FixedLocator([most / 8 * tick for tick in range(9)]))
    axes.set_ylabel(label("loads, %", result, "loads"))
    axes.set_title("How often a load is served in how many wavefronts")
    for handle in axes.legend(loc="upper right", fontsize=7.5).legend_handles:
        handle.set_linewidth(5)  # type: ignore[union-attr]
    axes.grid(axis="x", visible=False)


def _rates(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    places = np.arange(len(rows))[::-1]
    heights = rows["elements_per_clock"].to_numpy(dtype=float)
    axes.hlines(places, 0, np.nan_to_num(heights), color=[COLOURS[scheme] for scheme in rows["scheme"]], linewidth=14)
    for place, height, wavefronts in zip(places, heights, rows["wavefronts_per_lookup"], strict=True):
        text = f" {height:.3g}  ({wavefronts:.3g} wavefronts)" if np.isfinite(height) else " all from registers"
        axes.text(0, place + 0.42, text, va="center", fontsize=7.5)
    axes.axvline(_LIMIT, color="0.35", linewidth=1, linestyle=":")
    axes.yaxis.set_major_locator(FixedLocator(places.tolist()))
    axes.yaxis.set_major_formatter(FixedFormatter(list(rows["scheme"])))
    axes.set_ylim(-0.5, len(rows) - 0.3)
    axes.set_xlim(0, 1.1 * max(_LIMIT, np.nanmax(heights, initial=0)))
    axes.set_xlabel(label("elements / clock / SM", result, "elements_per_clock"))
    axes.set_title("Rate (dotted: all banks busy)")
    axes.grid(axis="y", visible=False)
