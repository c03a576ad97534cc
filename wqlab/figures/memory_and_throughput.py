"""Draw `wqlab.experiments.memory_and_throughput`: throughput and memory over batches and frames, Table 8's point, and searches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wqlab.figures import EVIDENCE_STYLE, label
from wqlab.figures.decode_latency import METHODS
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DEVICES = {"cpu": "0.6", "cuda": "#009E73", "cuda graph": "#CC79A7"}


@register("figure", "memory_and_throughput")
def draw(result: Result) -> Figure:
    """Return six panels: throughput and memory over batches, throughput over frames, largest batches, Table 8, searches."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(10.4, 6.2))
    given = result.parameters
    parts = {str(part): rows for part, rows in result.data.groupby("part", sort=False)}
    empty = result.data.iloc[:0]
    batches, frames = parts.get("batch", empty), parts.get("frames", empty)
    _lines(axes[0, 0], batches, "batch", "tokens_per_s", result)
    axes[0, 0].set(title=f"Throughput, {given['frames']} frames", xlabel="batch", ylabel="tokens/s")
    _lines(axes[0, 1], batches, "batch", "peak_memory_gb", result)
    axes[0, 1].set(title=f"Peak memory, {given['frames']} frames", xlabel="batch", ylabel="memory (GB)")
    _lines(axes[0, 2], frames, "frames", "tokens_per_s", result)
    axes[0, 2].set(title=f"Throughput, batch {given['batch']}", xlabel="frames", ylabel="tokens/s")
    _largest(axes[1, 0], parts.get("largest", empty), result)
    _table8(axes[1, 1], parts["table8"], result)
    _search(axes[1, 2], parts.get("search", empty), result)
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, x: str, y: str, result: Result) -> None:
    if rows[y].isna().all():
        _say(axes, f"the record has no {y.replace('_', ' ')} here")
        return
    style = EVIDENCE_STYLE[result.evidence[y].kind]
    for method, (colour, name) in METHODS.items():
        own = rows[(rows["method"] == method) & rows[y].notna()].sort_values(x)
        axes.plot(own[x].astype(float), own[y], color=colour, label=label(name, result, y), **style)
    axes.set_xlim(left=0)
    axes.set_ylim(0, float(rows[y].max()) * 1.3)
    axes.legend(loc="upper left")


def _largest(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    rows = rows[rows["tokens_per_s"].notna()].drop_duplicates("method").set_index("method")
    kind = result.evidence["tokens_per_s"].kind
    axes.set_title("Largest batch in equal memory")
    if not len(rows):
        _say(axes, "the record has no largest batches")
        return
    names = [method for method in METHODS if method in rows.index]
    for place, method in enumerate(names):
        row = rows.loc[method]
        axes.bar(place, row["tokens_per_s"], width=0.55, color=METHODS[method][0])
        text = f"{row['tokens_per_s']:,.0f}\nbatch {row['batch']:.0f}"
        axes.annotate(text, (place, row["tokens_per_s"]), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(range(len(names)), [METHODS[method][1] for method in names])
    axes.set(ylabel=f"tokens/s ({kind})", ylim=(0, float(rows["tokens_per_s"].max()) * 1.3))
    axes.grid(visible=False, axis="x")


def _table8(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    rows = rows.set_index("method")
    ours = result.evidence["tokens_per_s"].kind
    for place, (method, (colour, _)) in enumerate(METHODS.items()):
        row = rows.loc[method]
        if row["tokens_per_s"] == row["tokens_per_s"]:
            axes.bar(place, row["tokens_per_s"], width=0.55, color=colour, label=f"ours ({ours})" if not place else None)
            axes.annotate(
                f"{row['tokens_per_s']:,.0f}", (place, row["tokens_per_s"]), xytext=(0, 2), textcoords="offset points", ha="center",
                fontsize=7.5,
            )  # fmt: skip
        star: dict[str, Any] = {**EVIDENCE_STYLE["paper"], "markersize": 9, "color": "black", "markeredgecolor": "white"}
        axes.plot(place, row["paper_tokens_per_s"], label=None if place else "printed (paper)", zorder=3, **star)
        axes.annotate(
            f"{row['paper_tokens_per_s']:,.0f}", (place, row["paper_tokens_per_s"]), xytext=(7, -3), textcoords="offset points",
            fontsize=7.5, bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )  # fmt: skip
    highest = max([*rows["tokens_per_s"].dropna(), *rows["paper_tokens_per_s"]])
    axes.set_xticks(range(len(METHODS)), [name for _, name in METHODS.values()])
    axes.set(title="Table 8: batch 60, 5 frames", ylabel="tokens/s", ylim=(0, highest * 1.35), xlim=(-0.6, 1.6))
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper left", ncols=2, fontsize=7)


def _search(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    axes.set_title("Search and plan")
    if "search_ms" not in rows or not len(rows):
        _say(axes, "no search was recorded")
        return
    names, named = list(dict.fromkeys(rows["method"])), set[str]()
    for place, name in enumerate(names):
        for offset, (device, colour) in zip((-0.26, 0.0, 0.26), _DEVICES.items(), strict=True):
            own = rows[(rows["method"] == name) & (rows["device"] == device)]["search_ms"]
            if len(own):
                value = float(own.iloc[0])
                text = label(device, result, "search_ms") if device not in named else None
                named.add(device)
                axes.barh(place + offset, value, height=0.24, color=colour, label=text)
                axes.annotate(
                    f"{value:.3g}", (value, place + offset), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5
                )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=f"ms, {int(rows['visual_tokens'].iloc[0]):,} visual tokens", ylim=(len(names) - 0.5, -0.9))
    axes.set_xlim(0, float(rows["search_ms"].max()) * 1.25)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper right", ncols=3, fontsize=6.5, columnspacing=0.8, handlelength=1.0)


def _say(axes: Axes, text: str) -> None:
    """Say why a panel has nothing to show."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8, color="0.35", wrap=True)
    axes.set_xticks([])
    axes.set_yticks([])
