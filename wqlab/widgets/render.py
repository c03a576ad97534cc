"""Draw one stem's figure again and again, fast enough to follow a slider.

Most of matplotlib's time goes into text and ticks, which a slider seldom changes: where the axes lie is found once, and while axis
limits and labels stay as they were, their picture is kept and only what shows data is drawn over it. Of texts in the data the
pictures are kept too, because most of them say the same at the same place after a move.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from PIL import Image

from wqlab import experiments, figures

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Pictures of texts that are kept; one takes about 10 KB.
_TEXTS = 512
#: Pictures of frames that are kept; one takes about 2 MB.
_FRAMES = 8


class _Brush(RendererAgg):
    """matplotlib's renderer, which is kept from figure to figure and draws a text that it knows from its picture."""

    def __init__(self, width: float, height: float, dpi: float) -> None:
        super().__init__(width, height, dpi)  # type: ignore[no-untyped-call]
        self._texts: OrderedDict[tuple[Any, ...], tuple[int, int, Any] | None] = OrderedDict()
        self._paper: Any = RendererAgg(width, height, dpi)  # type: ignore[no-untyped-call]

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        clip, (clip_path, _) = gc.get_clip_rectangle(), gc.get_clip_path()
        if clip_path is not None:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)  # type: ignore[no-untyped-call]
            return
        look = s, hash(prop), angle, ismath, gc.get_rgb(), gc.get_alpha(), gc.get_antialiased()
        key = *look, x, y, None if clip is None else clip.bounds
        if key in self._texts:
            self._texts.move_to_end(key)
        else:
            self._texts[key] = self._picture(gc, x, y, s, prop, angle, ismath, mtext)
            if len(self._texts) > _TEXTS:
                self._texts.popitem(last=False)
        if (found := self._texts[key]) is not None:
            left, bottom, picture = found
            self.draw_image(self.new_gc(), left, bottom, picture)

    def _picture(self, *text: Any) -> tuple[int, int, Any] | None:
        """Return where a text lies, pixels from the left and from the bottom, and its pixels; None where nothing is seen."""
        self._paper.clear()
        self._paper.draw_text(*text)
        pixels = np.asarray(self._paper.buffer_rgba())
        seen = pixels[..., 3] > 0
        rows, columns = np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))
        if not len(rows):
            return None
        part = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return int(columns[0]), int(self.height) - int(rows[-1]) - 1, part[::-1].copy()


class _Canvas(FigureCanvasAgg):
    """A canvas that draws with a given brush."""

    def __init__(self, figure: Figure, brush: _Brush) -> None:
        super().__init__(figure)
        self.renderer = brush

    def get_renderer(self) -> Any:
        return self.renderer


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
    backgrounds : dict
        Frame -> its picture without data, for the frames met last; the first is made when a figure is drawn for the second time.
    """

    stem: str
    shape: tuple[float, ...] = ()
    places: list[Any] = field(default_factory=list)
    frame: tuple[Any, ...] | None = None
    backgrounds: OrderedDict[tuple[Any, ...], Any] = field(default_factory=OrderedDict, repr=False)
    _brush: _Brush | None = field(default=None, repr=False)

    def render(self, parameters: dict[str, Any]) -> tuple[bytes, str]:
        """Run the experiment and return its figure as PNG and its caption as text."""
        result = experiments.run(self.stem, **parameters)
        with figures.style():
            return self._paint(figures.draw(result, with_caption=False)), figures.caption(result)

    def _paint(self, figure: Figure) -> bytes:
        canvas: Any = _Canvas(figure, self._brush_for(figure))
        brush = canvas.get_renderer()
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
            if frame not in self.backgrounds:
                self.backgrounds[frame] = _without_data(figure, canvas)
                if len(self.backgrounds) > _FRAMES:
                    self.backgrounds.popitem(last=False)
            self.backgrounds.move_to_end(frame)
            brush.restore_region(self.backgrounds[frame])
            for artist in _data(figure):
                artist.draw(brush)
        else:
            canvas.draw()
            self.backgrounds.clear()
        if not placed:
            self.shape, self.places = shape, [_places(axes) for axes in figure.axes]
        self.frame = frame
        buffer = io.BytesIO()
        # The page behind is opaque: three colours compress faster than four channels.
        Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(buffer, format="png", compress_level=1)
        return buffer.getvalue()

    def _brush_for(self, figure: Figure) -> _Brush:
        width, height = figure.canvas.get_width_height(physical=True)
        if self._brush is None or (self._brush.width, self._brush.height, self._brush.dpi) != (width, height, figure.dpi):
            self._brush = _Brush(width, height, figure.dpi)
        return self._brush


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
