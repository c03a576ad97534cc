"""Fig. 8: s_i per layer, as the paper's strip of shades and as a line that can be read, for each model side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.figures import EVIDENCE_STYLE, heatmap, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@register("figure", "layer_similarity")
def draw(result: Result) -> Figure:
    """Draw a column per model: the strip above the two readings of Eq. 9."""
    import matplotlib.pyplot as plt

    tables = list(result.data.groupby("input", sort=False))
    figure, axes = plt.subplots(
        2, len(tables), figsize=(7.2 if len(tables) == 1 else 10.2, 3.9), sharex="col", sharey="row", squeeze=False,
        height_ratios=[1, 5], gridspec_kw={"hspace": 0.04},
    )  # fmt: skip
    for (strip, lines), (read, table) in zip(axes.T, tables, strict=True):
        _strip(strip, table)
        strip.set_title(f"{table['model'].iloc[0]} on {read}")
        _lines(lines, table, result)
    axes[0, 0].set_ylabel("s_i", rotation=0, labelpad=14, va="center")
    axes[1, 0].set_ylabel("cosine, before and after attention (s_i)")
    axes[1, -1].legend(loc="best")
    return figure


def _strip(axis: Axes, table: pd.DataFrame) -> None:
    heatmap(table[["s_i"]].T, axis, cmap="Blues", vmin=0, vmax=1, cbar=False, xticklabels=False, yticklabels=False)


def _lines(axis: Axes, table: pd.DataFrame, result: Result) -> None:
    x = table["layer"] + 0.5  # the centre of the strip's cell
    style = EVIDENCE_STYLE[result.evidence["s_i_residual"].kind]
    axis.plot(x, table["s_i_residual"], **style, label=label("after the residual add", result, "s_i_residual"))
    axis.plot(x, table["s_i_attention"], **style, label=label("attention output alone", result, "s_i_attention"))
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.set_xlabel("decoder layer")
    step = max(1, len(table) // 15)
    axis.set_xticks(x[::step], table["layer"][::step])
    axis.set_xlim(0, len(table))
