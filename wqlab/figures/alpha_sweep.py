"""Fig. 13 and 14: the two threshold functions, tokens per width per layer; bits per element, mix and latency against alpha."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab.figures import BIT_COLOURS, EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {16: "FP16", 4: "INT4", 2: "INT2"}
_TICKS = (0.1, 0.5, 2.0, 10.0)
#: normalization -> colour of its line where it is not the chosen one.
_QUIET = {"none": "#CC79A7", "minmax": "#009E73", "rank": "#56B4E9"}


@register("figure", "alpha_sweep")
def draw(result: Result) -> Figure:
    """Draw f1 and f2 with the layers' s_i, tokens per layer, and bits per element; below, shares and latency against alpha."""
    import matplotlib.pyplot as plt

    data, alpha = result.data, result.parameters["alpha"]
    figure = plt.figure(figsize=(10.2, 6.2))
    grid = figure.add_gridspec(2, 1, height_ratios=[1.15, 1])
    upper = grid[0].subgridspec(1, 3)
    curves, layers, memory = (figure.add_subplot(upper[column]) for column in range(3))
    lower = grid[1].subgridspec(1, 2, width_ratios=[2.1, 1])
    mixes, latency = figure.add_subplot(lower[0]), figure.add_subplot(lower[1])

    curve = data[data["part"] == "curve"]
    style = EVIDENCE_STYLE[result.evidence["t_low"].kind]
    curves.plot(curve["s"], curve["t_high"], color=BIT_COLOURS[16], label=label("T_high = f2(s)", result, "t_high"), **style)
    curves.plot(curve["s"], curve["t_low"], color=BIT_COLOURS[2], label=label("T_low = f1(s)", result, "t_low"), **style)
    for low, high, bits in ((curve["t_high"], 1, 16), (curve["t_low"], curve["t_high"], 4), (0, curve["t_low"], 2)):
        curves.fill_between(curve["s"], low, high, color=BIT_COLOURS[bits], alpha=0.13, linewidth=0)
    per_layer = data[data["part"] == "layers"]
    s_i = per_layer.drop_duplicates("layer")["s_i"]
    curves.plot(s_i, [0.0] * len(s_i), "|", color="black", markersize=9, clip_on=False, label=label("layers' s_i", result, "s_i"))
    curves.set(title=f"Thresholds at alpha = {alpha:g}", xlabel="s_i", ylabel="window similarity", xlim=(0, 1), ylim=(0, 1))
    curves.legend(loc="upper left", fontsize=7, frameon=True, framealpha=0.8, edgecolor="none", borderpad=0.2)

    # Stairs are one artist per width where bars are one per layer: a slider must be followed at once.
    bottom = np.zeros(len(s_i))
    edges = np.arange(len(s_i) + 1) - 0.5
    for bits in (2, 4, 16):
        top = bottom + per_layer.loc[per_layer["bits"] == bits, "tokens"].to_numpy(dtype=float)
        layers.stairs(top, edges, baseline=bottom, fill=True, color=BIT_COLOURS[bits], label=label(_NAMES[bits], result, "tokens"))
        bottom = top
    layers.set(title=f"Tokens per width ({result.parameters['normalize']})", xlabel="decoder layer", ylabel="tokens")
    layers.set_ylim(0, bottom.max() * 1.42)
    layers.legend(loc="upper center", ncols=2, fontsize=7, columnspacing=1.0, handlelength=1.2)
    layers.grid(axis="x", visible=False)

    parts = {str(part): rows for part, rows in data.groupby("part", sort=False)}
    _memory(memory, parts["sweep"], parts["prose"], result)
    memory.axvline(alpha, color="0.35", linewidth=1, linestyle=":")
    memory.set_xscale("log")
    memory.set_xlim(0.085, 14)
    memory.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    memory.minorticks_off()
    memory.set_xlabel("alpha")
    _mixes(mixes, parts["sweep"], result)
    _latency(latency, parts.get("latency"), result)
    return figure


def _memory(axis: Axes, sweep: pd.DataFrame, prose: pd.DataFrame, result: Result) -> None:
    """Draw what the mixes take, with the chosen normalization in front, and the recorded proxy's beside it."""
    chosen = result.parameters["normalize"]
    style = EVIDENCE_STYLE[result.evidence["bits_per_element"].kind] | {"marker": ""}
    found, recorded = _by_alpha(sweep, "bits_per_element"), _by_alpha(prose, "recorded_bits_per_element")
    for normalize, (alphas, cost) in found.items():
        look = {"color": "black", "linewidth": 2.2} if normalize == chosen else {"color": _QUIET[normalize]}
        axis.plot(alphas, cost[:, 0], label=normalize, **style | look)
    alphas, cost = recorded[chosen]
    style = EVIDENCE_STYLE[result.evidence["recorded_bits_per_element"].kind] | {"linestyle": "--", "marker": ""}
    text = label(f"{chosen}, prose", result, "recorded_bits_per_element")
    axis.plot(alphas, cost[:, 0], color="0.45", linewidth=1.1, label=text, **style)
    literal = np.interp(2, found["none"][0], found["none"][1][:, 0])
    axis.plot(2, literal, "D", color=_QUIET["none"], markersize=6, label="the paper's preset, literally")
    low, high = 2.8, max(4.0, *(cost.max() for _, cost in (*found.values(), *recorded.values())))
    axis.set(title="Memory of all layers", ylabel=label("bits per element", result, "bits_per_element"))
    axis.set_ylim(low, low + 1.7 * (high - low))
    axis.legend(loc="upper left", fontsize=7, frameon=True, framealpha=0.8, edgecolor="none", borderpad=0.2)


def _by_alpha(rows: pd.DataFrame, column: str) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return per normalization the alphas and `column` [alphas, widths]; rows come alpha by alpha, widths from 16 down."""
    # Plain arrays, because many small selections from a table would be half of a slider's redraw.
    normalize, alpha, values = (rows[name].to_numpy() for name in ("normalize", "alpha", column))
    found = {}
    for name in _QUIET:
        mine = normalize == name
        found[name] = alpha[mine][:: len(_NAMES)], values[mine].reshape(-1, len(_NAMES))
    return found


def _mixes(axis: Axes, sweep: pd.DataFrame, result: Result) -> None:
    """Draw the shares under each normalization, side by side on one axes: three axes would cost a slider a third more."""
    style = EVIDENCE_STYLE[result.evidence["share"].kind] | {"markersize": 3, "markevery": 3}
    chosen, alpha = result.parameters["normalize"], result.parameters["alpha"]
    places: list[float] = []
    for start, (normalize, (alphas, shares)) in zip((0, 1.1, 2.2), _by_alpha(sweep, "share").items(), strict=True):
        for bits, share in zip(_NAMES, shares.T, strict=True):
            axis.plot(start + _place(alphas), 100 * share, color=BIT_COLOURS[bits], **style)
        if alphas[0] <= alpha <= alphas[-1]:
            axis.vlines(start + _place(alpha), 0, 100, color="0.35", linewidth=1, linestyle=":")
        weight = "bold" if normalize == chosen else "normal"
        axis.text(start + 0.5, 108, normalize, ha="center", va="center", fontsize=9, fontweight=weight)
        places += [float(start + _place(tick)) for tick in _TICKS]
    axis.set_xticks(places, [f"{tick:g}" for tick in _TICKS] * len(_QUIET))
    axis.set(
        title="Mix over all layers, by normalization", xlabel="alpha", ylabel=label("share of windows, %", result, "share"),
        xlim=(-0.05, 3.25), ylim=(-3, 114), yticks=(0, 25, 50, 75, 100),
    )  # fmt: skip


def _latency(axis: Axes, rows: pd.DataFrame | None, result: Result) -> None:
    """Draw the recorded latencies with the chosen normalization, or say what is missing."""
    gpu, chosen, alpha = (result.parameters[name] for name in ("gpu", "normalize", "alpha"))
    axis.set_title(f"Latency of attention ({chosen})")
    if rows is None:
        text = f"not recorded on {gpu};\non such a GPU, run\nwqlab bench alpha_latency"
        axis.text(0.5, 0.5, text, ha="center", va="center", fontsize=8, transform=axis.transAxes)
        axis.set_axis_off()
        return
    style, top = EVIDENCE_STYLE[result.evidence["latency_us"].kind] | {"markersize": 4}, 0.0
    for similarity, colour in (("video", "black"), ("prose", "0.55")):
        own = rows[(rows["normalize"] == chosen) & (rows["similarity"] == similarity)].sort_values("alpha")
        if own.empty:
            continue
        times = own[["latency_us", "p10_us", "p90_us"]].to_numpy(dtype=float)
        alphas, top = own["alpha"].to_numpy(dtype=float), max(top, float(np.nanmax(times)))
        axis.plot(alphas, times[:, 0], color=colour, label=label(similarity, result, "latency_us"), **style)
        axis.fill_between(alphas, times[:, 1], times[:, 2], color=colour, alpha=0.15, linewidth=0)
    axis.axvline(alpha, color="0.35", linewidth=1, linestyle=":")
    axis.set_xscale("log")
    axis.set_xlim(0.085, 14)
    axis.set_ylim(0, 1.35 * top)
    axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axis.minorticks_off()
    axis.set(xlabel="alpha", ylabel="one layer, us")
    axis.legend(loc="upper left", fontsize=7)


def _place(alpha: Any) -> Any:
    """Return where an alpha of the sweep lies between its ends, in [0, 1], logarithmically."""
    return np.log(alpha / 0.1) / np.log(12 / 0.1)
