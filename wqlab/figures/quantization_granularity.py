"""Table 10: metadata per granularity beside the printed numbers, what an element costs, and what each choice loses in answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.figures import BIT_COLOURS, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"window_channel": "window,\nchannel", "window_head": "window,\nhead", "window": "window"}
_COLOURS = {"window_channel": "#009E73", "window_head": "#56B4E9", "window": "#CC79A7"}
_PRINTED = {"per-tensor": "--", "group": ":"}


@register("figure", "quantization_granularity")
def draw(result: Result) -> Figure:
    """Return three panels."""
    import matplotlib.pyplot as plt

    figure, (metadata, bits, answers) = plt.subplots(1, 3, figsize=(10.6, 3.7), width_ratios=[1.1, 1, 1.25])
    _metadata(metadata, result)
    _bits(bits, result)
    _answers(answers, result)
    return figure


def _metadata(axes: Axes, result: Result) -> None:
    data = result.data
    rows = data[data["part"] == "metadata"]
    at = np.arange(len(rows))
    bars = axes.bar(at, rows["metadata_mb"], 0.6, color=[_COLOURS[g] for g in rows["granularity"]])
    axes.bar_label(bars, [f"{value:,.3g}" for value in rows["metadata_mb"]], padding=2, fontsize=8)
    for row in data[data["part"] == "paper"].to_dict("records"):
        text = label(f'"{row["label"]}", {row["paper_metadata_mb"]:g} MB', result, "paper_metadata_mb")
        axes.axhline(row["paper_metadata_mb"], color="0.25", linewidth=1.1, linestyle=_PRINTED[row["label"]], label=text)
    axes.set(yscale="log", title="Metadata of one video", ylabel=label("MB", result, "metadata_mb"))
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 12)
    axes.set_xticks(at, [_NAMES[g] for g in rows["granularity"]])
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right", fontsize=7)


def _bits(axes: Axes, result: Result) -> None:
    rows = result.data[result.data["part"] == "metadata"]
    at, codes = np.arange(len(rows)), float(result.parameters["num_bits"])
    axes.bar(at, codes, 0.6, color="0.75", label="codes")
    above = rows["bits_per_element"] - codes
    bars = axes.bar(at, above, 0.6, bottom=codes, color=[_COLOURS[g] for g in rows["granularity"]], label="scales and minima")
    axes.bar_label(bars, [f"{value:.4g}" for value in rows["bits_per_element"]], padding=2, fontsize=8)
    axes.set(title=f"INT{int(codes)} with metadata", ylabel=label("bits per element", result, "bits_per_element"))
    axes.set_ylim(0, float(rows["bits_per_element"].max()) * 1.45)
    axes.set_xticks(at, [_NAMES[g] for g in rows["granularity"]])
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right", fontsize=7)


def _answers(axes: Axes, result: Result) -> None:
    rows = result.data[result.data["part"] == "answers"]
    axes.set_title(f"Answers, {result.parameters['split']} split")
    if rows.empty:
        text = "no record of answers\non this GPU: the caption\nsays how to get one"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=8)
        axes.set_axis_off()
        return
    settings = [(f"INT{int(bits)}", rows[(rows["method"] == "rtn") & (rows["num_bits"] == bits)]) for bits in (4, 2)]
    settings.append(("WindowQuant", rows[rows["method"] == "windowquant"]))
    for number, (name, found) in enumerate(settings):
        found = found.set_index("granularity").reindex(list(_NAMES))
        places = np.arange(len(_NAMES)) + 0.22 * (number - 1)
        error = np.abs(found[["accuracy_low", "accuracy_high"]].to_numpy().T - found["accuracy"].to_numpy())
        colour = "#000000" if name == "WindowQuant" else BIT_COLOURS[4 if name == "INT4" else 2]
        text = label(name, result, "accuracy")
        axes.errorbar(places, 100 * found["accuracy"], 100 * error, fmt="o", color=colour, capsize=2, linewidth=1.2, label=text)
        for place, accuracy, kl in zip(places, found["accuracy"], found["kl"], strict=True):
            if np.isfinite(accuracy):
                axes.annotate(f"{kl:.2g}", (place, 100 * accuracy), xytext=(4, 3), textcoords="offset points", fontsize=6)
    full = float(rows["accuracy_fp16"].iloc[0])
    axes.axhline(100 * full, color="0.45", linewidth=1, linestyle=":", label="FP16")
    axes.set_xticks(range(len(_NAMES)), list(_NAMES.values()))
    axes.set_ylabel("accuracy in %, 95 % intervals\n(small numbers: KL to FP16 in nats)")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower left", fontsize=7)
