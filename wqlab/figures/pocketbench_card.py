"""The card of PocketBench: sample frames, accuracy per task and length, the training curve, and what round to nearest does."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab.figures import BIT_COLOURS, EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Samples side by side, and where things lie in a cell, in pixels of the frames.
_COLUMNS, _GAP, _BETWEEN, _TITLE, _TEXT, _LINE = 4, 3, 40, 24, 100, 19
_SUFFIX = {"window_channel": " / channel", "window": " / window"}
_CHANCE = 25
_RIGHT, _WRONG = "#1B7837", "#B2182B"
#: metric -> factor and label of its axis.
_METRICS = {
    "accuracy_difference": (100, "accuracy against FP16 (points)"),
    "kl": (1, "KL to FP16 (nats)"),
    "flip_rate": (100, "answers that flip (%)"),
    "margin_difference": (1, "margin against FP16 (nats)"),
}


@register("figure", "pocketbench_card")
def draw(result: Result) -> Figure:
    """Draw the samples on top, accuracy and training in the middle, quantization at the bottom."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 11))
    grid = figure.add_gridspec(3, 1, height_ratios=[5.0, 3.7, 1.9])
    panels = {str(name): rows for name, rows in result.data.groupby("panel")}
    _samples(figure.add_subplot(grid[0]), panels["samples"], result)
    middle = grid[1].subgridspec(1, 3, width_ratios=[1, 1, 1.15])
    easy = figure.add_subplot(middle[0])
    hard = figure.add_subplot(middle[1], sharey=easy)
    for axis, split in ((easy, "easy"), (hard, "hard")):
        _accuracy(axis, panels["accuracy"][panels["accuracy"]["split"] == split], split, result)
    easy.legend(loc="upper center", bbox_to_anchor=(0.3, -0.12), ncols=2, fontsize=7.5)
    hard.tick_params(labelleft=False)
    _training(figure.add_subplot(middle[2]), panels["training"], result)
    bottom = grid[2].subgridspec(1, len(_METRICS))
    first: Axes | None = None
    for i, metric in enumerate(_METRICS):
        axis = figure.add_subplot(bottom[i], sharey=first)
        _quantized(axis, panels["quantized"], metric, result)
        axis.tick_params(labelleft=first is None)
        first = first or axis
    if first is not None:
        _say_what_was_quantized(first, panels["quantized"], result)
    return figure


def _samples(axis: Axes, rows: pd.DataFrame, result: Result) -> None:
    """Draw all frames as one picture with the words in its gaps: one artist where one axes per task would be slow."""
    frames = result.pictures["frames"]
    tasks, shown, height, side, _ = frames.shape
    width = shown * side + (shown - 1) * _GAP
    cell = _TITLE + height + _TEXT
    lines = -(-tasks // _COLUMNS)
    canvas = np.full((lines * cell, _COLUMNS * width + (_COLUMNS - 1) * _BETWEEN, 3), 255, dtype=np.uint8)
    for i, (_, answers) in enumerate(rows.groupby("index")):
        top, left = i // _COLUMNS * cell, i % _COLUMNS * (width + _BETWEEN)
        for j in range(shown):
            start = left + j * (side + _GAP)
            canvas[top + _TITLE : top + _TITLE + height, start : start + side] = frames[i, j]
        _words(axis, answers, left, top, height, width)
    axis.imshow(canvas, interpolation="antialiased", aspect="equal")
    axis.set_anchor("NW")
    axis.axis("off")
    p = result.parameters
    axis.set_title(
        f"Questions of the {p['split']} split, with three of their {p['num_frames']} frames "
        f"({result.evidence['question'].kind}), and who answers right ({result.evidence['chosen'].kind})"
    )


def _words(axis: Axes, answers: pd.DataFrame, left: int, top: int, height: int, width: int) -> None:
    """Write a sample's task and frames above it; question, options and who chose the right one below."""
    first = answers.iloc[0]
    y = top + _TITLE - 3
    axis.text(left, y, first["task"].replace("_", " "), va="bottom", fontsize=7, weight="bold")
    axis.text(left + width, y, f"frames {first['frames']}", va="bottom", fontsize=7, ha="right", color="0.45")
    y = top + _TITLE + height + 3
    question = textwrap.wrap(first["question"], 46)
    for text in question:
        axis.text(left, y, text, va="top", fontsize=7)
        y += _LINE
    axis.text(left, y, first["right_answer"], va="top", fontsize=7, weight="bold", color=_RIGHT)
    wrong = textwrap.shorten(f"not: {first['wrong_answers']}", 57, placeholder=" ...")
    axis.text(left, y + _LINE, wrong, va="top", fontsize=6, color="0.45")
    for i, (name, chosen) in enumerate(_chosen(answers)):
        right = chosen == first["right_answer"]
        colour = _RIGHT if right else _WRONG
        axis.text(
            left + i * width * 0.33, y + 2 * _LINE - 2, f"{name} {'✓' if right else '✗'}", va="top", fontsize=6.5, color=colour
        )


def _chosen(answers: pd.DataFrame) -> list[tuple[str, str]]:
    """Return what was chosen in full precision and at 2 bits, with names."""
    return [
        ("FP16" if row["num_bits"] == 16 else _name(row), row["chosen"])
        for row in answers.sort_values(["num_bits", "granularity"], ascending=[False, False]).to_dict("records")
        if row["num_bits"] in (16, 2)
    ]


def _name(row: Any) -> str:
    return f"INT{row['num_bits']}{_SUFFIX[row['granularity']]}"


def _accuracy(axis: Axes, rows: pd.DataFrame, split: str, result: Result) -> None:
    """Draw one line per task: full precision at each length, and text alone."""
    tasks = ["all", *sorted(set(rows["task"]) - {"all"})]
    marker = EVIDENCE_STYLE[result.evidence["value"].kind]["marker"]
    lengths = sorted(rows.loc[~rows["blind"], "num_frames"].unique())
    for i, length in enumerate(lengths):
        found = rows[~rows["blind"] & (rows["num_frames"] == length)].set_index("task").loc[tasks]
        y = np.arange(len(tasks)) + 0.3 * (i - (len(lengths) - 1) / 2)
        colour = (BIT_COLOURS[16], BIT_COLOURS[8])[i % 2]
        text = label(f"{length} frames", result, "value")
        axis.hlines(y, 100 * found["low"], 100 * found["high"], color=colour, linewidth=1.1)
        axis.plot(100 * found["value"], y, linestyle="none", marker=marker, markersize=4, color=colour, label=text)
    for length in sorted(rows.loc[rows["blind"], "num_frames"].unique()):
        found = rows[rows["blind"] & (rows["num_frames"] == length)].set_index("task").loc[tasks]
        text = label(f"blind, {length} frames", result, "value")
        axis.plot(100 * found["value"], range(len(tasks)), linestyle="none", marker="x", color="0.45", label=text)
    axis.axvline(_CHANCE, color="0.35", linewidth=1, linestyle=":", label="chance")
    axis.axhline(0.5, color="0.8", linewidth=0.8)
    axis.set_yticks(range(len(tasks)), [task.replace("_", " ") for task in tasks])
    axis.set_ylim(len(tasks) - 0.4, -0.6)
    axis.set_xlim(0, 102)
    axis.set(title=f"Full precision, {split} split", xlabel="accuracy (%)")


def _training(axis: Axes, rows: pd.DataFrame, result: Result) -> None:
    """Draw one smoothed line per kind of training step over the faint values; lengths of a kind are averaged by their steps."""
    column = str(result.parameters["curve"])
    rows = rows.assign(weighted=rows[column] * rows["steps"])
    for kind, found in rows.groupby("kind"):
        sums = found.groupby("step")[["weighted", "steps"]].sum().astype(float)
        mean = sums["weighted"] / sums["steps"]
        wide = 2.0 if kind == "questions" else 1.1
        (line,) = axis.plot(mean.index, mean.rolling(9, center=True, min_periods=1).mean(), linewidth=wide, label=str(kind))
        axis.plot(mean.index, mean, linestyle="none", marker=".", markersize=1.5, color=line.get_color(), alpha=0.3)
    for began in rows.groupby("run")["step"].min().iloc[1:]:
        axis.axvline(began, color="0.35", linewidth=1, linestyle=":")
    axis.set(title="Training, by kind of step", xlabel="step", ylabel=label(column.replace("_", " "), result, column))
    if column == "loss":
        axis.set_yscale("log")
    else:
        axis.set_ylim(top=1.01)
    axis.legend(loc="best", ncols=2, fontsize=7.5)


def _quantized(axis: Axes, rows: pd.DataFrame, metric: str, result: Result) -> None:
    """Draw one metric of every setting against full precision, with its paired interval."""
    from matplotlib.patheffects import withStroke

    factor, name = _METRICS[metric]
    found = rows[(rows["metric"] == metric) & (rows["num_bits"] < 16)].sort_values(["granularity", "num_bits"], ascending=False)
    marker = EVIDENCE_STYLE[result.evidence["value"].kind]["marker"]
    absolute = rows[rows["metric"] == "accuracy"].set_index("setting")["value"]
    for y, row in enumerate(found.to_dict("records")):
        low, value, high = (factor * row[name] for name in ("low", "value", "high"))
        colour = BIT_COLOURS[row["num_bits"]]
        axis.plot([low, high], [y, y], color=colour, linewidth=1.6)
        axis.plot(value, y, linestyle="none", marker=marker, markersize=5, color=colour)
        said = f"{value:.1f}" if factor == 100 else f"{value:.2g}"
        if metric == "accuracy_difference":
            said += f", to {absolute[row['setting']]:.1%}"
        text = axis.annotate(said, (value, y), (0, 5), textcoords="offset points", ha="center", fontsize=7)
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
    if metric == "kl" and (found["low"] > 0).all():
        axis.set_xscale("log")
    else:
        axis.axvline(0, color="0.35", linewidth=1, linestyle=":")
    axis.margins(x=0.15)
    axis.set_yticks(range(len(found)), [f"{_name(row)}\n{row['bits_per_element']:.2f} bits" for row in found.to_dict("records")])
    axis.set_ylim(len(found) - 0.5, -0.75)
    axis.set_xlabel(name)
    axis.set_title(" ")  # the room that the row's one title needs


def _say_what_was_quantized(axis: Axes, rows: pd.DataFrame, result: Result) -> None:
    full = rows[(rows["metric"] == "accuracy") & (rows["num_bits"] == 16)].iloc[0]
    p = result.parameters
    # No title of the axes: the layout would make room for its width.
    axis.annotate(
        f"Round to nearest, {p['split']} split, {p['num_frames']} frames, {p['protocol']} ({result.evidence['value'].kind}); "
        f"FP16 answers {full['value']:.1%} of {full['n']}",
        (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=10, weight="bold",
    ).set_in_layout(False)  # fmt: skip
