"""The premise of the window search: who finds the windows that answer, in which layer, for which task, and what a plan costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.bench.premise_audit import DEVELOPMENT, FRESH
from wqlab.experiments.scorer_audit import NAMES
from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "cosine": "#0072B2", "pearson": "#56B4E9", "euclidean": "#CC79A7", "random": "0.55", "permuted_0": "0.55", "permuted_1": "0.55",
    "attention_early": "#F0A830", "attention_all": "#A06A00", "attention_best": "#D55E00", "truth": "#009E73", "inverse": "#66C2A5",
}  # fmt: skip
_PLANS = ("random", "permuted_0", "permuted_1", "cosine", "truth", "inverse", "attention_early", "attention_best")


@register("figure", "premise_audit")
def draw(result: Result) -> Figure:
    """Return four panels: AUC per scorer, per layer, per task and scorer, and KL of plans at equal memory."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10.8, 7.6), width_ratios=[1, 1.15])
    data = result.data[result.data["split"] == result.parameters["split"]]
    _scorers(axes[0, 0], data[data["part"] == "scorer"], result)
    _layers(axes[0, 1], data, result)
    _plans(axes[1, 0], data[data["part"] == "plan"], result)
    _tasks(axes[1, 1], data[data["part"] == "task"], result)
    return figure


def _chance(axes: Axes, at: float = 0.5) -> None:
    axes.axvline(at, color="0.35", linewidth=1, linestyle=":")
    axes.annotate("chance", (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -3), textcoords="offset points", fontsize=7,
                  color="0.35", va="top")  # fmt: skip


def _scorers(axes: Axes, data: pd.DataFrame, result: Result) -> None:
    data = data.set_index("scorer")
    keys = [key for key in NAMES if key in data.index]
    for place, key in enumerate(keys):
        row = data.loc[key]
        axes.hlines(place, row["auc_low"], row["auc_high"], color=COLOURS[key], linewidth=2.5)
        axes.plot(row["auc"], place, "s", color=COLOURS[key], markersize=6)
        text = f"{row['auc']:.2f}; precision {row['precision']:.2f}"
        axes.annotate(text, (max(row["auc_high"], 0.51), place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(keys)), [NAMES[key] for key in keys], fontsize=8)
    axes.set(ylim=(len(keys) - 0.4, -0.9), xlim=(0.4, 1.0))
    _chance(axes)
    axes.set_title(f"Who finds the windows that answer ({result.parameters['split']})")
    base = data["base_rate"].iloc[0]
    axes.set_xlabel(label(f"AUC; precision of chance is {base:.2f}", result, "auc"))
    axes.grid(axis="y", visible=False)


def _layers(axes: Axes, data: pd.DataFrame, result: Result) -> None:
    layers = result.data[result.data["part"] == "layer"]
    fresh = layers[(layers["stream"] == FRESH) & (layers["split"] == result.parameters["split"])]
    axes.fill_between(fresh["layer"], fresh["auc_low"], fresh["auc_high"], color="0.8", linewidth=0)
    axes.plot(fresh["layer"], fresh["auc"], "-", color="0.2", linewidth=1.4, label=label("fresh questions", result, "auc"))
    chose = layers[layers["stream"] == DEVELOPMENT]
    axes.plot(chose["layer"], chose["auc"], "--", color="0.5", linewidth=1, label=label("development (hard)", result, "auc"))
    chosen = data[data["part"] == "scorer"].set_index("scorer")["layers"]
    for key, name in (("attention_early", "early"), ("attention_best", "best")):
        picked = [int(word) for word in chosen.get(key, "").split()]
        rows = fresh[fresh["layer"].isin(picked)]
        text = f"chosen as {name}: {', '.join(map(str, picked))}"
        axes.plot(rows["layer"], rows["auc"], "s", color=COLOURS[key], markersize=7, label=text, zorder=3)
    axes.axhline(0.5, color="0.35", linewidth=1, linestyle=":")
    axes.set(title="Attention of the question, layer by layer", xlabel="layer", ylabel="AUC", ylim=(0.4, 0.98))
    axes.legend(loc="upper left", fontsize=7, ncols=2)


def _plans(axes: Axes, data: pd.DataFrame, result: Result) -> None:
    keys = [key for key in _PLANS if key in set(data["plan"])]
    for frames, shift, face in ((32, -0.16, "full"), (100, 0.16, "none")):
        rows = data[data["num_frames"] == frames].set_index("plan")
        for key in keys:
            if key not in rows.index:
                continue
            row, place = rows.loc[key], keys.index(key) + shift
            axes.hlines(place, row["kl_low"], row["kl_high"], color=COLOURS[key], linewidth=1.8)
            axes.plot(row["kl"], place, "s", color=COLOURS[key], markersize=6, fillstyle=face, markerfacecoloralt="white",
                      markerfacecolor=COLOURS[key] if face == "full" else "white")  # fmt: skip
            text = f"{row['kl']:.3f}, right {100 * row['accuracy']:.1f} %"
            axes.annotate(text, (row["kl_high"], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=6.5)
        text = label(f"{frames} frames", result, "kl") if len(rows) else f"{frames} frames: no record"
        axes.plot([], [], "s", color="0.2", markerfacecolor="0.2" if face == "full" else "white", label=text)
    low, high = axes.get_xlim()
    axes.set_xlim(0, high + 0.32 * (high - low))
    axes.set_yticks(range(len(keys)), [NAMES[key] for key in keys], fontsize=8)
    axes.set_ylim(len(keys) - 0.5, -1.35)
    axes.legend(loc="upper right", fontsize=7, ncols=2)
    bits = [f"{rows['bits_per_element'].mean():.2f}" for _, rows in data.groupby("num_frames")]
    axes.set_title("What a plan does to answers, at equal memory")
    axes.set_xlabel(f"KL to FP16 (nats); rank, alpha 2: {' and '.join(bits)} bits per element")
    axes.grid(axis="y", visible=False)


def _tasks(axes: Axes, data: pd.DataFrame, result: Result) -> None:
    from matplotlib.colors import TwoSlopeNorm

    table = data.pivot_table(index="task", columns="scorer", values="auc")
    table = table[[key for key in NAMES if key in table.columns]]
    if "attention_best" in table.columns:
        table = table.sort_values("attention_best", ascending=False)
    image = axes.imshow(table.to_numpy(), cmap="PuOr_r", norm=TwoSlopeNorm(0.5, 0, 1), aspect="auto")
    for (row, column), value in np.ndenumerate(table.to_numpy(dtype=float)):
        colour = "white" if abs(value - 0.5) > 0.33 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color=colour)
    names = [NAMES[str(key)].replace(" (Eq. 8)", "").replace(", ", ",\n").replace("m s", "m\ns") for key in table]
    axes.set_xticks(range(table.shape[1]), names, fontsize=7)
    axes.set_yticks(range(len(table)), [name.replace("_", " ") for name in table.index], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_title("AUC by task")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02)
    bar.set_label(label("AUC", result, "auc"), fontsize=8)
