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

#: Device or way of a search -> colour and name.
_DEVICES = {"cpu": ("0.6", "CPU"), "cuda": ("#009E73", "GPU"), "cuda graph": ("#CC79A7", "GPU, CUDA graph")}


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
        more = f" ({row['speedup']:.2f}x)" if place and row["speedup"] == row["speedup"] else ""
        text = f"{row['tokens_per_s']:,.0f}{more}\nbatch {row['batch']:.0f}"
        axes.annotate(text, (place, row["tokens_per_s"]), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(range(len(names)), [METHODS[method][1] for method in names])
    axes.set_xlabel(" and ".join(f"{frames:,.0f}" for frames in dict.fromkeys(rows["frames"])) + " frames each")
    axes.set(ylabel=f"tokens/s ({kind})", ylim=(0, float(rows["tokens_per_s"].max()) * 1.3))
    axes.grid(visible=False, axis="x")


def _table8(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    """Draw a line from FP16 to WindowQuant for each source: on a logarithmic axis its steepness is the ratio."""
    rows = rows.set_index("method").loc[list(METHODS)]
    for column, name, colour in (("tokens_per_s", "ours", "#009E73"), ("paper_tokens_per_s", "printed", "black")):
        values = [float(value) for value in rows[column]]
        style: dict[str, Any] = EVIDENCE_STYLE[result.evidence[column].kind] | {"linestyle": "-", "linewidth": 1.2}
        size = 9 if style["marker"] == "*" else 6
        axes.plot((0, 1), values, color=colour, markersize=size, label=label(name, result, column), **style)
        for place, value in enumerate(values):
            if value == value:
                side, offset = ("right", -9) if not place else ("left", 9)
                axes.annotate(
                    f"{value:,.0f}", (place, value), xytext=(offset, 0), textcoords="offset points", ha=side, va="center",
                    fontsize=7.5,
                )  # fmt: skip
        if values[1] / values[0] == values[1] / values[0]:
            text = f"{values[1] / values[0]:.2f}x"
            ceiling = rows["ceiling"].iloc[1] if "ceiling" in rows else float("nan")
            if column == "tokens_per_s" and ceiling == ceiling:
                text += f"\n(attention for nothing: {ceiling:.2f}x)"
            axes.annotate(
                text, (0.5, (values[0] * values[1]) ** 0.5), xytext=(0, -5), textcoords="offset points", ha="center", va="top",
                fontsize=7.5, color=colour,
            )  # fmt: skip
    shown = [*rows["tokens_per_s"].dropna(), *rows["paper_tokens_per_s"]]
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xticks((0, 1), [name for _, name in METHODS.values()])
    axes.set(title="Table 8: batch 60, 5 frames", ylabel="tokens/s", ylim=(min(shown) / 2, max(shown) * 6), xlim=(-0.5, 1.5))
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper left")


def _search(axes: Axes, rows: pd.DataFrame, result: Result) -> None:
    axes.set_title("Search and plan")
    if "search_ms" not in rows or not len(rows):
        _say(axes, "no search was recorded")
        return
    place, places, names = 0.0, [], []
    for (tokens, method), group in rows.groupby(["visual_tokens", "method"], sort=False):
        first = place
        for device, (colour, name) in _DEVICES.items():
            for value in group[group["device"] == device]["search_ms"].head(1):
                axes.barh(place, value, height=0.85, color=colour)
                axes.annotate(
                    f"{value:.3f}  {name}", (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
                )
                place += 1
        places.append((first + place - 1) / 2)
        names.append(f"{method}\n{tokens:,.0f}")
        place += 0.7
    axes.set_yticks(places, names)
    axes.set(xlabel=f"ms ({result.evidence['search_ms'].kind}), visual tokens on the left", ylim=(place - 0.7, -0.9))
    axes.set_xlim(0, float(rows["search_ms"].max()) * 1.65)
    axes.grid(visible=False, axis="y")


def _say(axes: Axes, text: str) -> None:
    """Say why a panel has nothing to show."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8, color="0.35", wrap=True)
    axes.set_xticks([])
    axes.set_yticks([])
