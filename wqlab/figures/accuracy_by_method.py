"""Table 3 on PocketBench: a metric against bits per element, and accuracy lost per task and method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab.experiments.answers import AXES
from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "fp16": "#000000", "fp8": "#999999", "rtn": "#E69F00", "kivi": "#009E73", "smoothquant": "#CC79A7", "qoq": "#56B4E9",
    "skvq": "#D55E00", "transformers hqq": "#7A5195", "transformers quanto": "#9A9F3B", "windowquant": "#0072B2",
}  # fmt: skip
_NAMES = {
    "fp16": "FP16", "fp8": "FP8", "rtn": "RTN", "kivi": "KIVI", "smoothquant": "SmoothQuant", "qoq": "QoQ", "skvq": "SKVQ",
    "transformers hqq": "HQQ", "transformers quanto": "quanto", "windowquant": "WindowQuant",
}  # fmt: skip


@register("figure", "accuracy_by_method")
def draw(result: Result) -> Figure:
    """Return two panels."""
    import matplotlib.pyplot as plt

    figure, (scatter, heat) = plt.subplots(1, 2, figsize=(11.4, 4.9), width_ratios=[1.25, 1])
    _scatter(scatter, result)
    _heat(heat, result)
    return figure


def _name(row: Any) -> str:
    if row["method"] == "windowquant":
        return f"WindowQuant, {row['normalize']}"
    if row["method"] in ("fp16", "fp8"):
        return _NAMES[row["method"]]
    own = " *" if row["policy"] == "published" and row["method"] in ("kivi", "skvq") else ""
    return f"{_NAMES[row['method']]} {row['num_bits']:.0f}{own}"


def _scatter(axes: Axes, result: Result) -> None:
    column = result.parameters["metric"]
    name, factor, unit = AXES[column]
    rows = result.data[result.data["part"] == "methods"].to_dict("records")
    seen: set[str] = set()
    for row in rows:
        method, colour = row["method"], _COLOURS[row["method"]]
        value, low, high = (factor * row[c] for c in (column, f"{column}_low", f"{column}_high"))
        hollow = row["policy"] == "published"
        text = label(_NAMES[method], result, column) if method not in seen else None
        seen.add(method)
        axes.errorbar(
            row["bits_per_element"], value, [[max(value - low, 0)], [max(high - value, 0)]], fmt="o", color=colour, capsize=2,
            linewidth=1, markersize=6, markerfacecolor="white" if hollow else colour, label=text,
        )  # fmt: skip
        if method != "fp16":
            bits = row["normalize"] if method == "windowquant" else f"{row['num_bits']:.0f}"
            axes.annotate(
                bits, (row["bits_per_element"], value), xytext=(5, 4), textcoords="offset points", fontsize=6.5, color=colour
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 3, 4, 5, 6, 9, 16], ["2", "3", "4", "5", "6", "9", "16"])
    axes.minorticks_off()
    axes.set(xlabel=label("bits per element, metadata included", result, "bits_per_element"), ylabel=f"{name} ({unit})")
    axes.set_title(f"{result.parameters['split']} split, {result.parameters['protocol']}")
    axes.legend(loc="best", fontsize=7, title="hollow: the method's own policy", title_fontsize=7)


def _heat(axes: Axes, result: Result) -> None:
    rows = result.data[result.data["part"] == "tasks"]
    names = {setting: _name(group.iloc[0].to_dict()) for setting, group in rows.groupby("setting", sort=False)}
    table = rows.pivot_table(index="setting", columns="task", values="task_accuracy", sort=False)
    lost = 100 * (table - table.loc["fp16"])
    image = axes.imshow(lost, cmap="RdBu", vmin=-40, vmax=40, aspect="auto")
    for (i, j), value in np.ndenumerate(lost.to_numpy()):
        if abs(value) >= 0.5:
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=6, color="white" if abs(value) > 25 else "0.2")
    axes.set_yticks(range(len(lost)), [names[setting] for setting in lost.index], fontsize=7)
    axes.set_xticks(
        range(len(lost.columns)), [str(task).replace("_", " ") for task in lost.columns], rotation=60, ha="right", fontsize=7
    )
    axes.grid(visible=False)
    axes.set_title("Accuracy against FP16, points")
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label=label("points", result, "task_accuracy"))
