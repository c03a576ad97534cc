"""Energy of a token's attention per mix, and bytes, latency and energy as shares of FP16's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"bytes": "0.65", "latency": "#0072B2", "energy": "#D55E00", "idle": "#F2C8A0"}
_NAMES = {"fp16": "FP16", "int4": "INT4", "int2": "INT2", "10/30/60": "10/30/60\n16/4/2 bits"}


@register("figure", "energy_per_token")
def draw(result: Result) -> Figure:
    """Return two panels; without a record the first says what is missing, and the second has the bytes alone."""
    import matplotlib.pyplot as plt

    figure, (energy, shares) = plt.subplots(1, 2, figsize=(9.6, 3.9), width_ratios=[1, 1.25])
    _energy(energy, result)
    _shares(shares, result)
    return figure


def _energy(axes: Axes, result: Result) -> None:
    gpu, layers = result.parameters["gpu"], result.parameters["layers"]
    axes.set_title(f"Attention of one token, {layers} layers")
    if "energy_mj" not in result.evidence:
        why = "no record yet" if "latency_us" not in result.evidence else "unavailable, see below"
        text = f"energy on {gpu}: {why};\non such a GPU: wqlab bench energy"
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=8, transform=axes.transAxes)
        axes.set_axis_off()
        return
    rows = result.data[result.data["energy_mj"].notna()]
    at, height = np.arange(len(rows)), rows["energy_mj"].to_numpy()
    if "above_idle_mj" in rows:
        axes.bar(at, height, 0.62, color=_COLOURS["idle"], label=label("idle power", result, "energy_mj"))
        axes.bar(at, rows["above_idle_mj"], 0.62, color=_COLOURS["energy"], label=label("above idle", result, "above_idle_mj"))
    else:
        axes.bar(at, height, 0.62, color=_COLOURS["energy"], label=label("whole GPU", result, "energy_mj"))
    spread = [height - rows["energy_low_mj"], rows["energy_high_mj"] - height]
    axes.errorbar(at, height, spread, fmt="none", ecolor="0.2", capsize=4, linewidth=1)
    for place, (mj, watts) in enumerate(zip(height, rows["power_w"], strict=True)):
        text = f"{mj:.3g} mJ\n{watts:.0f} W"
        axes.annotate(text, (place, mj), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(at, [_NAMES[mix] for mix in rows["mix"]], fontsize=8)
    axes.set(ylabel="energy per token (mJ)", ylim=(0, 1.3 * height.max()))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right")


def _shares(axes: Axes, result: Result) -> None:
    data = result.data
    names = [name for name in ("bytes", "latency", "energy") if f"{name}_percent" in result.evidence]
    at, width = np.arange(len(data)), 0.8 / len(names)
    for number, name in enumerate(names):
        height = data[f"{name}_percent"].to_numpy(dtype=float)
        places = at + width * (number - (len(names) - 1) / 2)
        axes.bar(places, height, 0.92 * width, color=_COLOURS[name], label=label(name, result, f"{name}_percent"))
        for place, value in zip(places, height, strict=True):
            if np.isfinite(value):
                axes.annotate(f"{value:.0f}", (place, value), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(at, [_NAMES[mix] for mix in data["mix"]], fontsize=8)
    axes.set(title="Against FP16: bytes, latency, energy", ylabel="percent of FP16", ylim=(0, 125))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right", ncols=len(names))
