"""Tables 1 and 2: gain of WindowQuant over full precision, measured with intervals, and as printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


@register("figure", "accuracy_by_model")
def draw(result: Result) -> Figure:
    """Return two panels on one scale of points."""
    import matplotlib.pyplot as plt

    figure, (ours, paper) = plt.subplots(1, 2, figsize=(10.4, 4.2), width_ratios=[1, 1.3], sharex=True)
    rows = result.data[result.data["part"] == "recorded"].to_dict("records")
    for place, row in enumerate(rows):
        ours.hlines(
            place, 100 * row["accuracy_difference_low"], 100 * row["accuracy_difference_high"], color="#0072B2", linewidth=2
        )
        ours.plot(100 * row["accuracy_difference"], place, "o", color="#0072B2", markersize=6)
        before, after = 100 * row["accuracy_fp16"], 100 * row["accuracy"]
        text = f"FP16 {before:.1f} %, WindowQuant {after:.1f} %, {row['bits_per_element']:.2f} bits"
        # At the right edge, because the marks stand close to zero.
        ours.annotate(text, (1, place), xycoords=("axes fraction", "data"), xytext=(-2, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=7)  # fmt: skip
    ours.set_yticks(range(len(rows)), [row["benchmark"] for row in rows])
    ours.set_ylim(len(rows) - 0.5, -0.7)
    ours.set_title("Pocket VLM on PocketBench")
    ours.set_xlabel(label("points against FP16", result, "accuracy_difference"))
    printed = result.data[result.data["part"] == "paper"]
    models = list(dict.fromkeys(printed["model"]))
    names = []
    for place, row in enumerate(printed.to_dict("records")):
        colour = _COLOURS[models.index(row["model"]) % len(_COLOURS)]
        face = "white" if row["garbled"] else colour
        paper.plot([0, row["paper_gain"]], [place, place], color=colour, linewidth=1, linestyle=":" if row["garbled"] else "-")
        paper.plot(row["paper_gain"], place, "D", color=colour, markersize=5, markerfacecolor=face)
        names.append(f"{row['model']}: {row['benchmark']}")
    paper.set_yticks(range(len(names)), names, fontsize=6)
    paper.set_ylim(len(names) - 0.5, -0.7)
    paper.set_title("What Tables 1 and 2 print")
    paper.set_xlabel(label("points against FP16", result, "paper_gain"))
    for axes in (ours, paper):
        axes.axvline(0, color="0.4", linewidth=1, linestyle=":")
        axes.grid(axis="y", visible=False)
    return figure
