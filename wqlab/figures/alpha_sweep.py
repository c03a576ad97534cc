"""Fig. 13b and 14: the two threshold functions, tokens per bit width per layer, and the mix against alpha."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqlab.figures import BIT_COLOURS, EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {16: "FP16", 4: "INT4", 2: "INT2"}


@register("figure", "alpha_sweep")
def draw(result: Result) -> Figure:
    """Draw f1 and f2 with the layers' s_i, stacked tokens per layer, and shares against alpha."""
    import matplotlib.pyplot as plt

    data, alpha = result.data, result.parameters["alpha"]
    figure, (curves, layers, sweep) = plt.subplots(1, 3, figsize=(10.2, 3.4), width_ratios=[1, 1.25, 1])

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

    shares = data[data["part"] == "sweep"]
    style = EVIDENCE_STYLE[result.evidence["share"].kind]
    for bits in (16, 4, 2):
        rows = shares[shares["bits"] == bits]
        sweep.plot(
            rows["alpha"], 100 * rows["share"], color=BIT_COLOURS[bits],
            linestyle=style["linestyle"], marker=style["marker"], markersize=2.5,
        )  # fmt: skip
    sweep.axvline(alpha, color="0.35", linewidth=1, linestyle=":")
    sweep.set(title="Mix over all layers", xlabel="alpha", ylabel=label("share of windows, %", result, "share"), ylim=(-3, 103))
    sweep.set_xscale("log")
    sweep.set_xticks([0.1, 0.5, 2, 10], ["0.1", "0.5", "2", "10"])
    sweep.minorticks_off()
    return figure
