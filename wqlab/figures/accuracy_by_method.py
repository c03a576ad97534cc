"""Table 3 on PocketBench: a metric against bits, accuracy against FP16 per protocol and as printed, and per task."""

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


#: Protocol and split -> name and colour.
_WAYS = {
    ("cache_then_ask", "easy"): ("easy, cache_then_ask", "#56B4E9"),
    ("cache_then_ask", "hard"): ("hard, cache_then_ask", "#0072B2"),
    ("multi_turn", "hard"): ("hard, multi_turn", "#009E73"),
    ("paper_literal", "hard"): ("hard, paper_literal", "#E69F00"),
}
#: Metric -> the corner that no method comes to; where WindowQuant's words stand, which are close together.
_CORNERS: dict[str, Any] = {
    "accuracy": "lower right", "accuracy_difference": "lower right", "margin_difference": "lower right",
    "kl": "lower left", "flip_rate": "upper right",
}  # fmt: skip
_BESIDE = {"none": (-9, -13), "rank": (-7, 9), "minmax": (5, -11)}
#: Rows of the panel beside Table 3, whose methods stand together.
_COMPARED = ("rtn", "smoothquant", "kivi", "skvq", "windowquant")


@register("figure", "accuracy_by_method")
def draw(result: Result) -> Figure:
    """Return a panel of the metric, the tasks beside it, and, of a record, every protocol beside the printed differences."""
    import matplotlib.pyplot as plt

    several = bool((result.data["part"] == "protocols").any())
    figure = plt.figure(figsize=(11.6, 7.6 if several else 5.2))
    grid = figure.add_gridspec(2 if several else 1, 2, width_ratios=[1.2, 1])
    _scatter(figure.add_subplot(grid[0, 0]), result)
    if several:
        _protocols(figure.add_subplot(grid[1, 0]), result)
    _heat(figure.add_subplot(grid[:, 1]), result)
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
        if column == "kl" and value <= 0:  # full precision has no place on a logarithmic axis
            continue
        hollow = row["policy"] == "published"
        text = label(_NAMES[method], result, column) if method not in seen else None
        seen.add(method)
        axes.errorbar(
            row["bits_per_element"], value, [[max(value - low, 0)], [max(high - value, 0)]], fmt="o", color=colour, capsize=2,
            linewidth=1, markersize=6, markerfacecolor="white" if hollow else colour, label=text,
        )  # fmt: skip
        if method != "fp16":
            bits = row["normalize"] if method == "windowquant" else f"{row['num_bits']:.0f}"
            beside = _BESIDE.get(row["normalize"], (5, 4))
            axes.annotate(
                bits, (row["bits_per_element"], value), xytext=beside, textcoords="offset points", fontsize=6.5, color=colour
            )
    if column == "kl":
        axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 3, 4, 5, 6, 9, 16], ["2", "3", "4", "5", "6", "9", "16"])
    axes.minorticks_off()
    axes.set(xlabel=label("bits per element, metadata included", result, "bits_per_element"), ylabel=f"{name} ({unit})")
    axes.set_title(f"{result.parameters['split']} split, {result.parameters['protocol']}")
    axes.legend(loc=_CORNERS[column], fontsize=7, title="hollow: the method's own policy", title_fontsize=7)


def _protocols(axes: Axes, result: Result) -> None:
    """Accuracy against FP16 under every protocol with its interval; diamonds are Table 3's, between the widths it may mean."""
    data = result.data
    ours = data[(data["part"] == "protocols") & data["method"].isin(_COMPARED)]
    ours = ours[(ours["policy"] == "span") & (ours["num_bits"] != 8)]
    order = sorted(ours["setting"].unique(), key=lambda s: _COMPARED.index(s.split()[0]))
    place = {setting: i for i, setting in enumerate(order)}
    rows = {s: group.iloc[0].to_dict() for s, group in ours.groupby("setting")}
    for shift, ((protocol, split), (name, colour)) in zip((-0.27, -0.09, 0.09, 0.27), _WAYS.items(), strict=True):
        found = ours[(ours["protocol"] == protocol) & (ours["split"] == split)]
        at = [place[setting] + shift for setting in found["setting"]]
        value, low, high = (100 * found[f"accuracy_difference{end}"].to_numpy() for end in ("", "_low", "_high"))
        axes.errorbar(
            value, at, xerr=[value - low, high - value], fmt="o", color=colour, markersize=3.5, linewidth=1,
            label=label(name, result, "accuracy_difference"),
        )  # fmt: skip
    for model, marker in (("LLaVA-v1.5-7B", "D"), ("LLaVA-v1.5-13B", "d")):
        printed = data[(data["part"] == "paper") & (data["model"] == model)].to_dict("records")
        at = [float(np.mean([place[s] for s in order if _stands_for(rows[s], row)])) for row in printed]
        text = label(f"Table 3, {model}", result, "paper_difference")
        axes.plot(
            [row["paper_difference"] for row in printed], at, marker, color="0.25", markersize=5, linestyle="none", label=text
        )
    axes.axvline(0, color="0.4", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(order)), [_name(rows[setting]) for setting in order], fontsize=7)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlabel("accuracy against FP16 (points)")
    axes.set_title("Every protocol, and what Table 3 prints")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", fontsize=6.5)


def _stands_for(ours: Any, printed: Any) -> bool:
    literal = ours["normalize"] in ("", "none")
    return bool(literal and ours["method"] == printed["method"] and printed["num_bits"] in (0, ours["num_bits"]))


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
