"""Table 11: what each similarity function finds, what its plan does to answers at equal memory, and how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.experiments.scorer_audit import NAMES
from wqlab.experiments.similarity_functions import FUNCTIONS
from wqlab.figures import label
from wqlab.figures.premise_audit import COLOURS
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAPER = "#222222"


@register("figure", "similarity_functions")
def draw(result: Result) -> Figure:
    """Return four panels with a row per function: AUC, accuracy beside the printed one, KL, and latency beside the printed one."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(12.6, 4.2), width_ratios=[1, 1.1, 1, 1.15], sharey=True)
    _find(axes[0], result)
    _answers(axes[1], result, "accuracy", 100, "Right answers, equal memory", "%")
    _answers(axes[2], result, "kl", 1, "KL to FP16, equal memory", "nats")
    _latency(axes[3], result)
    axes[0].set_yticks(range(len(FUNCTIONS)), [NAMES[key] for key in FUNCTIONS], fontsize=8.5)
    axes[0].set_ylim(len(FUNCTIONS) - 0.5, -1.9)
    for one in axes:
        one.grid(axis="y", visible=False)
    for one in axes[:3]:
        one.legend(loc="upper left", fontsize=6.5, handletextpad=0.3, frameon=True, framealpha=1, edgecolor="white")
    return figure


def _find(axes: Axes, result: Result) -> None:
    data = result.data[result.data["part"] == "find"].set_index("function")
    for place, key in enumerate(FUNCTIONS):
        if key not in data.index:
            continue
        row = data.loc[key]
        axes.hlines(place - 0.14, row["auc_low"], row["auc_high"], color=COLOURS[key], linewidth=2)
        axes.plot(row["auc"], place - 0.14, "s", color=COLOURS[key], markersize=6)
        axes.hlines(place + 0.14, row["precision_low"], row["precision_high"], color=COLOURS[key], linewidth=2)
        axes.plot(row["precision"], place + 0.14, "D", color=COLOURS[key], markerfacecolor="white", markersize=5)
    axes.axvline(0.5, color="0.35", linewidth=1, linestyle=":")
    base = data["base_rate"].iloc[0]
    axes.axvline(base, color="0.35", linewidth=1, linestyle="--")
    axes.plot([], [], "s", color="0.2", markersize=5, label=label("AUC, chance dotted", result, "auc"))
    text = label(f"precision, chance {base:.2f} dashed", result, "precision")
    axes.plot([], [], "D", color="0.2", markerfacecolor="white", markersize=4.5, label=text)
    axes.set(xlim=(0, 1), xlabel="AUC and precision")
    axes.set_title(f"Finding what answers ({result.parameters['split']})", fontsize=9.5)


def _answers(axes: Axes, result: Result, metric: str, factor: int, title: str, unit: str) -> None:
    data = result.data[result.data["part"] == "plan"]
    for frames, shift, filled in ((32, -0.16, True), (100, 0.16, False)):
        rows = data[data["num_frames"] == frames].set_index("function")
        for place, key in enumerate(FUNCTIONS):
            if key not in rows.index:
                continue
            row, face = rows.loc[key], COLOURS[key] if filled else "white"
            ends = factor * row[f"{metric}_low"], factor * row[f"{metric}_high"]
            axes.hlines(place + shift, *ends, color=COLOURS[key], linewidth=1.8)
            axes.plot(factor * row[metric], place + shift, "s", color=COLOURS[key], markerfacecolor=face, markersize=6)
            text = f"{factor * row[metric]:.1f}" if metric == "accuracy" else f"{row[metric]:.3f}"
            axes.annotate(text, (ends[1], place + shift), xytext=(3, 0), textcoords="offset points", va="center", fontsize=6.5)
        text = label(f"{frames} frames", result, metric) if len(rows) else f"{frames} frames: no record"
        axes.plot([], [], "s", color="0.2", markerfacecolor="0.2" if filled else "white", markersize=5, label=text)
    if metric == "accuracy":
        printed = result.data[result.data["part"] == "paper"]
        for function, value in zip(printed["function"], printed["paper_accuracy"], strict=True):
            place = FUNCTIONS.index(function)
            axes.plot(value, place, "*", color=_PAPER, markersize=8)
            axes.annotate(f"{value:g}", (value, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=6.5)
        axes.plot([], [], "*", color=_PAPER, markersize=7, label=label("other model, 100 frames", result, "paper_accuracy"))
    low, high = axes.get_xlim()
    axes.set_xlim(0 if metric == "kl" else low, high + 0.15 * (high - low))
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=9.5)


def _latency(axes: Axes, result: Result) -> None:
    data = result.data[result.data["part"] == "latency"]
    looks = {
        ("cuda", False): ("s", "GPU", -0.24), ("cuda", True): ("D", "GPU, all pairs by BLAS", -0.08),
        ("cpu", False): ("o", "CPU", 0.1), ("cpu", True): ("v", "CPU, all pairs by BLAS", 0.26),
    }  # fmt: skip
    for (device, blas), (marker, text, shift) in looks.items():
        rows = data[(data["device"] == device) & ((data["way"] == "all pairs by BLAS") == blas)]
        for row in rows.to_dict("records"):
            place, colour = FUNCTIONS.index(row["function"]) + shift, COLOURS[row["function"]]
            axes.hlines(place, row["p10_us"] / 1e3, row["p90_us"] / 1e3, color=colour, linewidth=1.8)
            axes.plot(row["latency_us"] / 1e3, place, marker, color=colour, markersize=5.5)
            at, said = (row["p90_us"] / 1e3, place), f"{row['latency_us'] / 1e3:.2g}"
            axes.annotate(said, at, xytext=(4, 0), textcoords="offset points", va="center", fontsize=6.5)
        if len(rows):
            axes.plot([], [], marker, color="0.2", linestyle="none", markersize=5, label=label(text, result, "latency_us"))
    printed = result.data[result.data["part"] == "paper"]
    for function, value in zip(printed["function"], printed["paper_ms"], strict=True):
        place = FUNCTIONS.index(function)
        axes.plot(value, place, "*", color=_PAPER, markersize=8)
        axes.annotate(f"{value:g}", (value, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=6.5)
    axes.plot([], [], "*", color=_PAPER, linestyle="none", markersize=7, label=label("one A800, parts unsaid", result, "paper_ms"))
    axes.legend(
        loc="lower left", fontsize=6.5, handletextpad=0.3, title="random: no work; attention: not timed", title_fontsize=6.5
    )
    axes.set(xscale="log", xlim=(0.07, 250))
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_xlabel("ms")
    axes.set_title(f"Time to score 100 frames ({result.parameters['dtype']})", fontsize=9.5)
