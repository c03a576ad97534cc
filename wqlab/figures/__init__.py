"""Figures: a result's tidy table -> a matplotlib Figure. No torch here; one file per stem; one style sheet.

Each module registers ``draw(result) -> Figure`` under its stem. Evidence is shown three ways: by marker and line
(`EVIDENCE_STYLE`), in the legend (`label`), and in the caption that `draw` adds under every figure.
"""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from wqlab import registry
from wqlab.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")

#: kind of evidence -> how its lines and points look, the same in every figure.
EVIDENCE_STYLE: dict[str, dict[str, Any]] = {
    "measured": {"linestyle": "-", "marker": "o"},
    "recorded": {"linestyle": "-", "marker": "s"},
    "simulated": {"linestyle": "--", "marker": ""},
    "paper": {"linestyle": "none", "marker": "*"},
}

#: bits -> colour (Okabe-Ito, told apart by colour-blind readers and in grey). 16 is full precision.
BIT_COLOURS = {16: "#0072B2", 8: "#56B4E9", 4: "#E69F00", 2: "#D55E00"}


def label(text: str, result: Result, column: str) -> str:
    """Return a legend entry that names the evidence: ``"INT4 (measured)"``."""
    return f"{text} ({result.evidence[column].kind})"


def caption(result: Result) -> str:
    """Return the caption: for each evidence once, its columns; then the notes."""
    by_evidence: dict[str, list[str]] = {}
    for column, evidence in result.evidence.items():
        by_evidence.setdefault(evidence.caption(), []).append(column)
    lines = [f"{', '.join(columns)}: {text}." for text, columns in by_evidence.items()]
    return " ".join([*lines, *result.notes])


def style() -> AbstractContextManager[None]:
    """Return the house style as a context: ticks and texts take the style that holds when they are made."""
    import matplotlib.pyplot as plt

    return plt.style.context(STYLE)


def draw(result: Result, with_caption: bool = True) -> Figure:
    """Draw the figure of `result.stem` in the house style.

    Parameters
    ----------
    result : Result
        From `wqlab.run`.
    with_caption : bool
        Write the caption below. A saved figure always has it; a page that shows the caption as text may do without.

    Raises
    ------
    UnknownNameError
        When no figure is registered for the stem.
    """
    import matplotlib.pyplot as plt

    function = registry.lookup("figure", result.stem)
    with style():
        figure: Figure = function(result)
        if with_caption:
            _add_caption(figure, caption(result))
            # Ticks are made when a figure is first laid out, in the style of that moment: a notebook shows it later, without ours.
            figure.draw_without_rendering()
    plt.close(figure)  # the caller owns it; pyplot must not show it a second time in a notebook
    return figure


def heatmap(table: pd.DataFrame, axis: Axes, **options: Any) -> None:
    """Draw seaborn's heatmap of `table` on `axis`, in a small part of its time.

    seaborn draws and lays out the whole figure each time, to see whether tick labels overlap. On a canvas that draws nothing it
    takes their places as they are then, so whoever cares how labels are turned says so afterwards.
    """
    import seaborn as sns
    from matplotlib.backend_bases import FigureCanvasBase

    figure: Any = axis.figure  # never a part of one: stems draw no subfigures
    canvas = figure.canvas
    FigureCanvasBase(figure)  # puts itself in the other's place
    try:
        sns.heatmap(table, ax=axis, **options)
    finally:
        figure.set_canvas(canvas)


def write(figure: Figure, target: Path | IO[bytes], **options: Any) -> None:
    """Save `figure` in the house style; the same figure then gives the same bytes.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        From `draw`.
    target : path or binary file
        Where to.
    **options
        For ``Figure.savefig``.
    """
    with style():  # the salt of SVG ids is read when the file is written
        figure.savefig(target, **options)


def _add_caption(figure: Figure, text: str) -> None:
    """Grow the figure downward and write the caption there, so that it never covers an axis."""
    width, height = figure.get_size_inches()
    wrapped = textwrap.wrap(text, width=int(width * 17.5))
    extra = 0.145 * len(wrapped) + 0.12
    figure.set_size_inches(width, height + extra)
    engine = figure.get_layout_engine()
    bottom = extra / (height + extra)
    if engine is not None:
        engine.set(rect=(0, bottom, 1, 1 - bottom))  # type: ignore[call-arg]
    figure.text(
        0.012, 0.06 / (height + extra), "\n".join(wrapped), fontsize=7, color="0.25", va="bottom", ha="left", linespacing=1.25
    )
