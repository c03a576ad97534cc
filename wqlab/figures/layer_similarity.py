"""Fig. 8: s_i per layer, as the paper's strip of shades and as a line that can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.figures import EVIDENCE_STYLE, label
from wqlab.registry import register
from wqlab.types import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@register("figure", "layer_similarity")
def draw(result: Result) -> Figure:
    """Draw the strip above the two readings of Eq. 9."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    data = result.data
    figure, (strip, lines) = plt.subplots(2, 1, figsize=(7.2, 3.9), sharex=True, height_ratios=[1, 5], gridspec_kw={"hspace": 0.04})
    sns.heatmap(data[["s_i"]].T, ax=strip, cmap="Blues", vmin=0, vmax=1, cbar=False, xticklabels=False, yticklabels=False)
    strip.set_ylabel("s_i", rotation=0, labelpad=14, va="center")
    strip.set_title(f"How little attention turns the hidden state: {result.parameters['model']}")
    x = data["layer"] + 0.5  # the centre of the strip's cell
    style = EVIDENCE_STYLE[result.evidence["s_i_residual"].kind]
    lines.plot(x, data["s_i_residual"], **style, label=label("after the residual add", result, "s_i_residual"))
    lines.plot(x, data["s_i_attention"], **style, label=label("attention output alone", result, "s_i_attention"))
    lines.axhline(0, color="0.6", linewidth=0.8)
    lines.set(xlabel="decoder layer", ylabel="cosine, before and after attention (s_i)")
    step = max(1, len(data) // 15)
    lines.set_xticks(x[::step], data["layer"][::step])
    lines.set_xlim(0, len(data))
    lines.legend(loc="best")
    return figure
