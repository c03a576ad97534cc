"""Fig. 7: attention to the first tokens, per layer before and after softmax, and per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.figures import label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def _key_name(start: int, end: int) -> str:
    return str(start) if end - start == 1 else f"{start}–{end - 1}"


def _by_layer(data: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return [layer, key group], the mean over heads, groups named by their positions in order."""
    groups = data[["key_start", "key_end"]].drop_duplicates().sort_values("key_start")
    table = data.pivot_table(index="layer", columns="key_start", values=column, aggfunc="mean")
    return table.set_axis([_key_name(a, b) for a, b in groups.itertuples(index=False)], axis=1)


@register("figure", "attention_sinks")
def draw(result: Result) -> Figure:
    """Draw layer x position before softmax, layer x position after, and layer x head on the first token."""
    import matplotlib.pyplot as plt
    import seaborn as sns
    from matplotlib.colors import LogNorm

    data = result.data
    figure, (before, after, heads) = plt.subplots(1, 3, figsize=(10.2, 4.4), width_ratios=[1, 1, 0.75])
    step = max(1, data["layer"].nunique() // 10)
    logits = _by_layer(data, "logit")
    sns.heatmap(
        logits,
        ax=before,
        cmap="RdBu_r",
        center=0,
        yticklabels=step,
        cbar_kws={"label": f"mean logit ({result.evidence['logit'].kind})"},
    )
    before.set(title="Before softmax (Eq. 2)", xlabel="key position", ylabel="decoder layer")
    mass = _by_layer(data, "mass_per_key")
    sns.heatmap(
        mass.clip(lower=1e-6), ax=after, cmap="viridis", norm=LogNorm(), yticklabels=step,
        cbar_kws={"label": f"mean weight per key ({result.evidence['mass_per_key'].kind})"},
    )  # fmt: skip
    after.set(title="After softmax", xlabel="key position", ylabel="")
    column = "logit" if result.parameters["stage"] == "before_softmax" else "mass"
    first = data[data["key_end"] == 1].pivot(index="layer", columns="head", values=column)
    colours = {"cmap": "RdBu_r", "center": 0} if column == "logit" else {"cmap": "viridis", "vmin": 0, "vmax": 1}
    name = "logit" if column == "logit" else "weight"
    sns.heatmap(first, ax=heads, yticklabels=step, cbar_kws={"label": label(f"{name} of token 0", result, column)}, **colours)
    heads.set(title="First token, per head", xlabel="query head", ylabel="")
    for axis in (before, after, heads):
        axis.tick_params(axis="x", rotation=90 if axis is not heads else 0)
        axis.tick_params(axis="y", rotation=0)
        axis.grid(False)
    figure.suptitle(
        f"Attention to the first tokens: {result.parameters['model']}", x=0.01, ha="left", fontweight="bold", fontsize=10
    )
    return figure
