"""Draw one stem's figure again and again, fast enough to follow a slider.

Most of matplotlib's time goes into text and ticks, which a slider seldom changes: where the axes lie is found once, and while axis
limits and labels stay as they were, their picture is kept and only what shows data is drawn over it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from wqlab import experiments, figures

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass
class Renderer:
    """Renders one stem at screen resolution.

    Parameters
    ----------
    stem : str
        Which figure.

    Attributes
    ----------
    places : list
        Per axes, where the first drawing put it and its two labels; good for figures of the same size and number of axes.
    frame : tuple or None
        Limits, scales, labels and fixed ticks of the last figure.
    background : object or None
        Picture of that frame without data, made when a figure is drawn for the second time and when its frame changes.
    """

    stem: str
    shape: tuple[float, ...] = ()
    places: list[Any] = field(default_factory=list)
    frame: tuple[Any, ...] | None = None
    background: Any = None

    def render(self, parameters: dict[str, Any]) -> tuple[bytes, str]:
        """Run the experiment and return its figure as PNG and its caption as text."""
        result = experiments.run(self.stem, **parameters)
        with figures.style():
            return self._paint(figures.draw(result, with_caption=False)), figures.caption(result)

    def _paint(self, figure: Figure) -> bytes:
        canvas: Any = FigureCanvasAgg(figure)
        shape = (*figure.get_size_inches(), len(figure.axes))
        placed = shape == self.shape
        if placed:
            figure.set_layout_engine("none")
            for axes, (place, x_label, y_label) in zip(figure.axes, self.places, strict=True):
                axes.set_position(place)
                axes.xaxis.set_label_coords(*x_label)
                axes.yaxis.set_label_coords(*y_label)
        frame = _frame(figure)
        if placed and self.frame is not None:
            # A frame that was met may come again, and its picture costs hardly more than drawing all once.
            if self.background is None or frame != self.frame:
                self.background = _without_data(figure, canvas)
            canvas.get_renderer().restore_region(self.background)
            for artist in _data(figure):
                artist.draw(canvas.get_renderer())
        else:
            canvas.draw()
            self.background = None
        if not placed:
            self.shape, self.places = shape, [_places(axes) for axes in figure.axes]
        self.frame = frame
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(canvas.buffer_rgba())).save(buffer, format="png", compress_level=1)
        return buffer.getvalue()


def _places(axes: Axes) -> tuple[Any, Any, Any]:
    """Return where drawing put the axes, and the labels of its x and y axis in the axes' own coordinates."""
    inside = axes.transAxes.inverted()
    labels = (axes.xaxis.label, axes.yaxis.label)
    x_label, y_label = (inside.transform(label.get_transform().transform(label.get_position())) for label in labels)
    return axes.get_position(), x_label, y_label


def _frame(figure: Figure) -> tuple[Any, ...]:
    """Return everything that decides how the axes look without data; equal frames have equal pictures."""
    found: list[Any] = []
    for axes in figure.axes:
        found += [axes.get_xlim(), axes.get_ylim(), axes.axison]
        for axis in (axes.xaxis, axes.yaxis):
            # Only fixed ticks can differ under equal limits.
            ticks = (tuple(getattr(axis.get_major_locator(), "locs", ())), tuple(getattr(axis.get_major_formatter(), "seq", ())))
            found += [axis.get_scale(), axis.get_label_text(), axis.get_visible(), ticks]
    return tuple(found)


def _data(figure: Figure) -> Iterator[Artist]:
    """Yield what a slider may change, in drawing order: data, titles, legends and free text."""
    for axes in figure.axes:
        legend = axes.get_legend()
        titles = (axes.title, axes._left_title, axes._right_title)  # type: ignore[attr-defined]
        parts = [*axes.images, *axes.collections, *axes.patches, *axes.lines, *axes.texts, *titles, *([legend] if legend else [])]
        yield from sorted(parts, key=lambda artist: artist.get_zorder())
    yield from figure.texts


def _without_data(figure: Figure, canvas: Any) -> Any:
    """Draw the figure without its data and return the picture."""
    hidden = [artist for artist in _data(figure) if artist.get_visible()]
    for artist in hidden:
        artist.set_visible(False)
    canvas.draw()
    for artist in hidden:
        artist.set_visible(True)
    return canvas.copy_from_bbox(figure.bbox)
