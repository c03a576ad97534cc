"""Simulated against counted wavefronts and conflicts per load, and simulated against the driver's blocks per multiprocessor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Width of a load -> colour and marker.
_LOOKS = {4: ("#0072B2", "o"), 8: ("#E69F00", "s"), 16: ("#D55E00", "^")}


@register("figure", "simulator_validation")
def draw(result: Result) -> Figure:
    """Return three panels; one without a record shows what is simulated, or says what is missing."""
    import matplotlib.pyplot as plt

    figure, (wavefronts, conflicts, blocks) = plt.subplots(1, 3, figsize=(10.4, 3.7))
    parts = {str(part): rows for part, rows in result.data.groupby("part", sort=False)}
    cases = parts["bank_conflicts"]
    _against(wavefronts, cases, "wavefronts", result)
    _against(conflicts, cases, "conflicts", result)
    _blocks(blocks, parts.get("occupancy"), result)
    return figure


def _against(axes: Axes, rows: pd.DataFrame, what: str, result: Result) -> None:
    loads = rows["loads"].to_numpy(dtype=float)
    predicted = rows[f"simulated_{what}"].to_numpy(dtype=float) / loads
    if what not in result.evidence:
        _only_simulated(axes, predicted, rows, what, result)
        return
    counted = rows[what].to_numpy(dtype=float) / loads
    # Conflict-free cases have no place on a logarithmic axis of conflicts: near zero it is linear.
    scale: dict[str, Any] = (
        {"value": "log", "base": 2} if what == "wavefronts" else {"value": "symlog", "base": 2, "linthresh": 0.25}
    )
    axes.set_xscale(**scale)
    axes.set_yscale(**scale)
    top = 1.4 * max(np.nanmax(counted), predicted.max())
    low = 0.8 if what == "wavefronts" else -0.05
    ends = np.geomspace(max(low, 0.01), top, 100)
    axes.fill_between(ends, 0.95 * ends, 1.05 * ends, color="0.86", linewidth=0, label="within 5 %")
    axes.plot([low, top], [low, top], color="0.5", linewidth=1, linestyle=":")
    for width, (colour, marker) in _LOOKS.items():
        mine = (rows["access_bytes"] == width).to_numpy()
        axes.plot(counted[mine], predicted[mine], marker, color=colour, markersize=4.5, alpha=0.75, label=f"{width}-byte loads")
    axes.set(xlim=(low, top), ylim=(low, top), title=f"{what.capitalize()} per load")
    axes.set_xlabel(label("ncu", result, what))
    axes.set_ylabel(label("predicted", result, f"simulated_{what}"))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    error = "wavefront_error" if what == "wavefronts" else "conflict_error"
    text = f"{np.isfinite(counted).sum()} cases, largest error {100 * rows[error].abs().max():.2g} %"
    axes.text(0.97, 0.04, text, ha="right", transform=axes.transAxes, fontsize=8)
    axes.legend(loc="upper left", fontsize=7.5)


def _only_simulated(axes: Axes, predicted: np.ndarray[Any, Any], rows: pd.DataFrame, what: str, result: Result) -> None:
    for width, (colour, marker) in _LOOKS.items():
        mine = (rows["access_bytes"] == width).to_numpy()
        axes.plot(np.flatnonzero(mine), predicted[mine], marker, color=colour, markersize=4, label=f"{width}-byte loads")
    top = float(predicted.max())
    axes.set(xlabel="case of the bench", title=f"{what.capitalize()} per load", ylim=(-0.03 * top, 1.45 * top))
    axes.set_ylabel(label("predicted", result, f"simulated_{what}"))
    text = f"not counted on {result.parameters['gpu']} yet;\non such a GPU: wqlab bench bank_conflicts"
    axes.text(0.97, 0.95, text, ha="right", va="top", fontsize=7.5, transform=axes.transAxes)
    axes.legend(loc="upper left", fontsize=7, bbox_to_anchor=(0, 0.86))


def _blocks(axes: Axes, rows: pd.DataFrame | None, result: Result) -> None:
    axes.set_title("Blocks per multiprocessor")
    if rows is None:
        text = f"not asked on {result.parameters['gpu']} yet;\non such a GPU, run\nwqlab bench occupancy"
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=8, transform=axes.transAxes)
        axes.set_axis_off()
        return
    counts = rows["configurations"].to_numpy(dtype=float)
    same = (rows["simulated_blocks"] == rows["driver_blocks"]).to_numpy()
    top = 1.1 * float(rows[["simulated_blocks", "driver_blocks"]].max().max())
    axes.plot([0, top], [0, top], color="0.5", linewidth=1, linestyle=":", zorder=0)
    for chosen, colour, text in ((same, "#009E73", "equal"), (~same, "#D55E00", "different")):
        if chosen.any():
            found = rows[chosen]
            axes.scatter(
                found["driver_blocks"], found["simulated_blocks"], s=8 + 120 * counts[chosen] / counts.max(), color=colour,
                alpha=0.6, linewidth=0, label=f"{text}: {counts[chosen].sum():,.0f}",
            )  # fmt: skip
    axes.set(xlim=(-1, top), ylim=(-1, top))
    axes.set_xlabel(label("driver", result, "driver_blocks"))
    axes.set_ylabel(label("predicted", result, "simulated_blocks"))
    axes.legend(loc="upper left", fontsize=7.5, title="configurations (by area)", title_fontsize=7.5, markerscale=0.6)
