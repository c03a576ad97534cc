"""Fig. 3: windows x prompts with the frames below them; then who finds the windows that answer, and what the scores vary with."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab.figures import EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Most thumbnails under a heatmap, how many lie there without larger gaps, and pixels between two of them.
_THUMBNAILS, _DENSE, _GAP = 12, 8, 3
#: Inches: a heatmap's row with a label of one and of more lines, and the least height; the last row; a heatmap's width or more.
_ROW, _TALL_ROW, _LEAST, _LAST, _WIDTH = 0.24, 0.4, 1.2, 2.0, 6.7
_PART_COLOURS = {"window": "#0072B2", "prompt": "#E69F00", "interaction": "#009E73"}
_TEXT_NAMES = {"prompt": "question and options", "question": "question", "right answer": "right answer"}


@register("figure", "similarity_heatmap")
def draw(result: Result) -> Figure:
    """Draw the clip, the PocketBench video, and below them AUC and shares of the variance."""
    import matplotlib.pyplot as plt

    panels = {str(name): rows for name, rows in result.data.groupby("panel")}
    upper, lower = panels["clip"], panels["pocketbench"]
    strips = [_WIDTH / max(_DENSE, min(_THUMBNAILS, len(result.pictures[name]))) for name in ("clip", "pocketbench")]
    heats = [max(_LEAST, row * (rows["row"].max() + 1)) for row, rows in ((_ROW, upper), (_TALL_ROW, lower))]
    heights = [heats[0], strips[0], heats[1], strips[1], _LAST]
    figure = plt.figure(figsize=(10.2, sum(heights) + 1.2))
    grid = figure.add_gridspec(5, 2, height_ratios=heights, width_ratios=[1, 0.014])
    for at, rows, name in ((0, upper, "clip"), (2, lower, "pocketbench")):
        heat = figure.add_subplot(grid[at, 0])
        _heatmap(heat, figure.add_subplot(grid[at, 1]), rows, result)
        heat.set_title(_title(name, rows, result))
        _strip(figure.add_subplot(grid[at + 1, 0]), rows, result.pictures[name])
    last = grid[4, :].subgridspec(1, 2, wspace=0.08)
    _auc(figure.add_subplot(last[0]), _chosen(panels["auc"]), result)
    _variance(figure.add_subplot(last[1]), _chosen(panels["variance"]), result)
    return figure


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["windows"] == "chosen"]


def _title(name: str, rows: pd.DataFrame, result: Result) -> str:
    p = result.parameters
    if name == "pocketbench":
        return f"PocketBench, {p['split']} split; outlined: the windows that answer ({result.evidence['relevant'].kind})"
    clip = next(i.name for i in result.inputs if i.name.startswith("clip ")).removeprefix("clip ")
    unit = ("visual token" if p["window_unit"] == "tokens" else "frame") + "s" * (p["window_size"] > 1)
    return f"{textwrap.shorten(clip, 40)}: {rows['window'].max() + 1} windows of {p['window_size']} {unit}"


def _heatmap(axis: Axes, bar: Axes, rows: pd.DataFrame, result: Result) -> None:
    column = str(result.parameters["show"])
    table = rows.pivot(index="row", columns="window", values=column).to_numpy(dtype=float)
    reach = np.abs(table).max()
    colours = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach} if column == "interaction" else {"cmap": "viridis"}
    # Window w reaches from w to w + 1, row r around r.
    image = axis.imshow(
        table, aspect="auto", interpolation="nearest", extent=(0, table.shape[1], len(table) - 0.5, -0.5), **colours
    )
    name = str(result.parameters["scorer"]) if column == "similarity" else column
    axis.figure.colorbar(image, cax=bar).set_label(label(name, result, column), fontsize=8)
    bar.tick_params(labelsize=7)
    first = rows[rows["window"] == 0]
    axis.set_yticks(range(len(table)), [_row_name(row) for row in first.to_dict("records")])
    axis.tick_params(axis="both", length=0, labelbottom=False)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    if "relevant" in rows:
        for row, cells in rows[rows["relevant"].fillna(False).astype(bool)].groupby("row"):
            _outline(axis, int(str(row)), cells["window"].tolist())


def _row_name(row: Any) -> str:
    """Return a prompt as a label of at most two lines, and what a reader must know of it."""
    if row["panel"] == "clip":
        shown = textwrap.shorten(row["prompt"], 46, placeholder=" ...")
        return shown if row.get("shown") is not False else f"{shown} (not shown)"
    lines = textwrap.wrap(row["prompt"], 44, max_lines=2, placeholder=" ...")
    return "\n".join([*lines, f"answer: {textwrap.shorten(row['answer'], 36, placeholder=' ...')}"])


def _outline(axis: Axes, row: int, windows: list[int]) -> None:
    """Draw a frame around each run of neighbouring windows of a row."""
    from matplotlib.patches import Rectangle

    for _, run in groupby(enumerate(windows), key=lambda pair: pair[1] - pair[0]):
        found = [window for _, window in run]
        box = (found[0], row - 0.43), found[-1] + 1 - found[0], 0.86
        for colour, wide in (("black", 2.6), ("white", 1.2)):
            axis.add_patch(Rectangle(*box, fill=False, edgecolor=colour, linewidth=wide))


def _strip(axis: Axes, rows: pd.DataFrame, frames: np.ndarray[Any, Any]) -> None:
    """Draw the middle frame of each of equal parts of the video below the windows of that part, as one picture."""
    shown = min(_THUMBNAILS, len(frames))
    at = [(2 * i + 1) * len(frames) // (2 * shown) for i in range(shown)]
    height, width = frames.shape[1:3]
    cell = (width + _GAP) * max(_DENSE, shown) // shown
    canvas = np.full((height, shown * cell, 3), 255, dtype=np.uint8)
    for i, frame in enumerate(at):
        left = i * cell + (cell - width) // 2
        canvas[:, left : left + width] = frames[frame]
    axis.imshow(canvas, interpolation="antialiased", aspect="equal")
    axis.set_anchor("N")
    if "time_s" in rows and rows["time_s"].notna().all():
        times = dict(zip(rows["frame_start"], rows["time_s"], strict=True))
        names = [f"{times[frame]:.1f} s" if frame in times else "" for frame in at]
    else:
        names = [f"frame {frame + 1}" for frame in at]
    axis.set_xticks([(i + 0.5) * cell for i in range(shown)], names)
    axis.tick_params(length=0, labelsize=7, pad=1)
    axis.set_yticks([])
    axis.grid(False)
    axis.spines[:].set_visible(False)


def _auc(axis: Axes, rows: pd.DataFrame, result: Result) -> None:
    """Draw, per text that is compared, the question's own AUC and that of questions about other videos."""
    style = EVIDENCE_STYLE[result.evidence["value"].kind]
    for part, name, colour, shift in (
        ("auc", "about this video", "#0072B2", -0.13),
        ("auc_of_others", "about other videos", "0.55", 0.13),
    ):
        found = rows[rows["part"] == part].set_index("text").loc[list(_TEXT_NAMES)]
        y = np.arange(len(found)) + shift
        axis.hlines(y, found["low"], found["high"], color=colour, linewidth=1.6)
        axis.plot(found["value"], y, color=colour, **style | {"linestyle": "none"}, label=label(name, result, "value"))
    axis.axvline(0.5, color="0.35", linewidth=1, linestyle=":")
    axis.set_yticks(range(len(_TEXT_NAMES)), list(_TEXT_NAMES.values()))
    axis.set_ylim(len(_TEXT_NAMES) - 0.5, -0.5)
    own = rows[rows["part"] == "auc"]
    axis.set_title(f"Finds the windows that answer? ({own['n'].iloc[0]} videos)")
    axis.set_xlabel("AUC; 0.5: chance")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, 0), borderaxespad=4.2, ncols=2, fontsize=7.5)


def _variance(axis: Axes, rows: pd.DataFrame, result: Result) -> None:
    """Draw what the scores vary with, as one stacked bar per input."""
    text = str(result.parameters["text"])
    bars = {
        "clip": rows[rows["input"] == "clip"],
        f"PocketBench,\n{_TEXT_NAMES[text]}": rows[(rows["input"] == "pocketbench") & (rows["text"] == text)],
    }
    for y, found in enumerate(bars.values()):
        left = 0.0
        shares = found.set_index("part")["value"]
        for part, colour in _PART_COLOURS.items():
            share = 100 * float(shares[part])
            axis.barh(y, share, left=left, height=0.55, color=colour, label=label(part, result, "value") if y == 0 else None)
            if share >= 7:
                axis.text(left + share / 2, y, f"{share:.0f} %", ha="center", va="center", color="white", fontsize=7.5)
            left += share
    axis.set_yticks(range(len(bars)), list(bars))
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.set_xlim(0, 100)
    axis.set_title("What does the similarity vary with?")
    axis.set_xlabel("share of the variance (%)")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, 0), borderaxespad=4.2, ncols=3, fontsize=7.5)
