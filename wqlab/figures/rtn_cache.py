"""RTN in a real generation: what each width costs in perplexity, what it saves in bytes, and what the answers look like."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from wqlab.figures import BIT_COLOURS, EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIX = {"none": "", "window_channel": " / channel", "window": " / window"}


@register("figure", "rtn_cache")
def draw(result: Result) -> Figure:
    """Draw perplexity and bytes with one row per setting, and the answers below in the same order."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9.2, 4.7))
    grid = figure.add_gridspec(2, 2, height_ratios=[2.4, 1.35])
    scores = figure.add_subplot(grid[0, 0])
    _scores(scores, result)
    _bytes(figure.add_subplot(grid[0, 1], sharey=scores), result)
    _answers(figure.add_subplot(grid[1, :]), result)
    return figure


def _names(result: Result) -> list[str]:
    return [f"{row['method']}{_SUFFIX[row['granularity']]}" for row in result.data.to_dict("records")]


def _colours(result: Result) -> list[str]:
    return [BIT_COLOURS[bits] for bits in result.data["num_bits"]]


def _scores(axis: Axes, result: Result) -> None:
    """Draw how far each perplexity lies from FP16's, on a logarithmic axis."""
    values, names = result.data["perplexity"], _names(result)
    marker = EVIDENCE_STYLE[result.evidence["perplexity"].kind]["marker"]
    axis.axvline(values.iloc[0], color="0.55", linewidth=0.9, linestyle=":", label="FP16")
    axis.hlines(names, values.iloc[0], values, color=_colours(result), linewidth=1.6)
    axis.scatter(values, names, c=_colours(result), marker=marker, s=42, zorder=3)
    axis.scatter([], [], c="0.4", marker=marker, s=30, label=label("each cache", result, "perplexity"))
    for name, value in zip(names, values, strict=True):
        text = f"{value:.2f}" if value < 1000 else f"{value:,.0f}"
        axis.annotate(text, (value, name), (7, 0), textcoords="offset points", va="center", fontsize=7.5)
    axis.set_xscale("log")
    axis.set_xlim(values.min() * 0.75, values.max() * max(2.0, (values.max() / values.min()) ** 0.3))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="perplexity (logarithmic)")
    axis.set_title("Quality")
    axis.legend(loc="upper right")


def _bytes(axis: Axes, result: Result) -> None:
    """Draw bytes held, the cache's own report as a tick on top, and the bits per element."""
    data, names = result.data, _names(result)
    held, reported = data["bytes_per_token_held"] / 1024, data["bytes_per_token_reported"] / 1024
    text = label("held", result, "bytes_per_token_held")
    bars = axis.barh(names, held, color=_colours(result), height=0.6, label=text)
    text = label("reported", result, "bytes_per_token_reported")
    axis.plot(reported, names, linestyle="none", marker="|", markersize=12, color="black", markeredgewidth=1.4, label=text)
    shown = [
        f"{bits:.2f} bits" + (f", {held.iloc[0] / kib:.1f}x less" if i else "")
        for i, (bits, kib) in enumerate(zip(data["bits_per_element"], held, strict=True))
    ]
    axis.bar_label(bars, shown, padding=5, fontsize=7.5)
    axis.tick_params(labelleft=False)
    axis.grid(axis="y", visible=False)
    axis.set_xlim(0, held.max() * 1.32)
    axis.set(xlabel="KiB per token, K and V of all layers")
    axis.set_title("Memory")
    # Below FP16's long bar and right of the shorter ones there is room whatever the settings give.
    axis.legend(loc="center right", bbox_to_anchor=(1.0, 0.42))


def _answers(axis: Axes, result: Result) -> None:
    """Write one line per setting: how many first tokens equal FP16's, and the answer."""
    axis.axis("off")
    axis.set_title(f"Greedy answers ({result.evidence['answer'].kind}), and how many first tokens equal FP16's")
    rows = result.data.to_dict("records")
    for i, (row, name, colour) in enumerate(zip(rows, _names(result), _colours(result), strict=True)):
        y = 1 - (i + 0.5) / len(rows)
        # A dollar would start a formula, and the house font has no glyph for every script.
        answer = row["answer"].encode("ascii", "replace").decode().replace("$", r"\$")
        axis.text(0.0, y, name, color=colour, weight="bold", transform=axis.transAxes, va="center", fontsize=7.5)
        axis.text(0.155, y, str(row["first_tokens_equal"]), ha="right", transform=axis.transAxes, va="center", fontsize=7.5)
        shown = textwrap.shorten(answer, 118, placeholder=" ...") or "(nothing)"
        axis.text(0.17, y, shown, transform=axis.transAxes, va="center", fontsize=7.5)
