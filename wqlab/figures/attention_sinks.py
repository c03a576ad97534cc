"""Fig. 7: attention to the first tokens, per layer before and after softmax, and per head; below, to the first visual tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.figures import EVIDENCE_STYLE, heatmap, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WINDOW = 32


@register("figure", "attention_sinks")
def draw(result: Result) -> Figure:
    """Draw a row per model: layer x position before and after softmax; then layer x head, or the first visual tokens per layer."""
    import matplotlib.pyplot as plt

    tables = list(result.data.groupby("input", sort=False))
    figure, axes = plt.subplots(
        len(tables), 3, figsize=(10.2, 4.4 if len(tables) == 1 else 8.2), width_ratios=[1, 1, 0.75], squeeze=False
    )
    for (before, after, right), (read, table) in zip(axes, tables, strict=True):
        _before(before, table, result)
        _after(after, table, result)
        before.set_title(f"{table['model'].iloc[0]} on {read}: before softmax")
        after.set_title("After softmax")
        for axis in (before, after):
            axis.tick_params(axis="x", rotation=90)
            axis.set_xlabel("key position" if read == "prose" else "key position, from the first visual token")
        if read == "prose":
            _heads(right, table, result)
        else:
            _first_visual(right, table, result)
        for axis in (before, after, right):
            axis.tick_params(axis="y", rotation=0)
    return figure


def _key_name(start: int, end: int, opening: int) -> str:
    """Return the name of a group of keys; text before a video, which begins at position `opening`, has negative positions."""
    if start < 0:
        return "text " + _key_name(start - opening, end - opening, 0)
    return str(start) if end - start == 1 else f"{start}–{end - 1}"


def _by_layer(data: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return [layer, key group], the mean over heads, groups named by their positions in order."""
    groups = data[["key_start", "key_end"]].drop_duplicates().sort_values("key_start")
    table = data.pivot_table(index="layer", columns="key_start", values=column, aggfunc="mean")
    opening = int(groups["key_start"].min())
    return table.set_axis([_key_name(a, b, opening) for a, b in groups.itertuples(index=False)], axis=1)


def _step(data: pd.DataFrame) -> int:
    return max(1, data["layer"].nunique() // 10)


def _before(axis: Axes, data: pd.DataFrame, result: Result) -> None:
    bar = {"label": label("mean logit, Eq. 2", result, "logit")}
    heatmap(_by_layer(data, "logit"), axis, cmap="RdBu_r", center=0, xticklabels=True, yticklabels=_step(data), cbar_kws=bar)
    axis.set_ylabel("decoder layer")
    axis.grid(False)


def _after(axis: Axes, data: pd.DataFrame, result: Result) -> None:
    from matplotlib.colors import LogNorm

    mass = _by_layer(data, "mass_per_key").clip(lower=1e-6)
    bar = {"label": label("mean weight per key", result, "mass_per_key")}
    heatmap(mass, axis, cmap="viridis", norm=LogNorm(), xticklabels=True, yticklabels=_step(data), cbar_kws=bar)
    axis.set_ylabel("")
    axis.grid(False)


def _heads(axis: Axes, data: pd.DataFrame, result: Result) -> None:
    column = "logit" if result.parameters["stage"] == "before_softmax" else "mass"
    first = data[data["key_end"] == 1].pivot(index="layer", columns="head", values=column)
    colours = {"cmap": "RdBu_r", "center": 0} if column == "logit" else {"cmap": "viridis", "vmin": 0, "vmax": 1}
    bar = {"label": label(f"{'logit' if column == 'logit' else 'weight'} of token 0", result, column)}
    heatmap(first, axis, yticklabels=_step(data), cbar_kws=bar, **colours)
    axis.set(title="First token, per head", xlabel="query head", ylabel="")
    axis.grid(False)


def _first_visual(axis: Axes, data: pd.DataFrame, result: Result) -> None:
    """Draw what a key gets against a visual token behind the first window, per layer, mean over heads."""
    per_key = data.assign(keys=data["key_end"] - data["key_start"])
    totals = per_key.groupby(["layer", "key_start", "key_end"], as_index=False)[["mass", "keys"]].mean()
    rest = totals[totals["key_start"] >= _WINDOW].groupby("layer")[["mass", "keys"]].sum()
    uniform = rest["mass"] / rest["keys"]
    shown = {
        "first text token": totals["key_start"] == totals["key_start"].min(),
        "first visual token": totals["key_start"] == 0,
        f"first {_WINDOW} visual tokens": (totals["key_start"] >= 0) & (totals["key_end"] <= _WINDOW),
    }
    style = EVIDENCE_STYLE[result.evidence["mass_per_key"].kind]
    for (name, chosen), colour in zip(shown.items(), ("0.55", "#E69F00", "#0072B2"), strict=True):
        group = totals[chosen].groupby("layer")[["mass", "keys"]].sum()
        axis.plot(group["mass"] / group["keys"] / uniform, group.index + 0.5, label=name, color=colour, **style)
    axis.axvline(1, color="0.35", linewidth=1, linestyle=":")
    layers = data["layer"].nunique()
    ticks = list(range(0, layers, _step(data)))
    axis.set_yticks([layer + 0.5 for layer in ticks], [str(layer) for layer in ticks])
    axis.set_ylim(layers, 0)
    axis.set_xscale("log")
    axis.set(title="Against later visual tokens", xlabel=label("weight per key, multiple", result, "mass_per_key"))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=7.5)
