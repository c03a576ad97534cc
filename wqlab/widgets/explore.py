"""Sliders for any stem, built from the declaration of its parameters."""

from __future__ import annotations

import html
import io
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from wqlab import experiments, figures
from wqlab.errors import WqlabError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass
class Renderer:
    """Draws one stem again and again, as PNG bytes at screen resolution.

    Finding room for all labels costs matplotlib as much as drawing. The axes' places are found once and used again while the
    figure keeps its size, so that a slider is followed at once.
    """

    stem: str
    size: tuple[float, float] | None = None
    places: list[Any] = field(default_factory=list)

    def render(self, parameters: dict[str, Any]) -> tuple[bytes, str]:
        """Run the experiment and return its figure and, as text, its caption."""
        result = experiments.run(self.stem, **parameters)
        with figures.style():
            return self._paint(figures.draw(result, with_caption=False)), figures.caption(result)

    def _paint(self, figure: Figure) -> bytes:
        """Return the figure as PNG, with the axes where they were before while the size is the same."""
        size = tuple(figure.get_size_inches())
        known = size == self.size and len(self.places) == len(figure.axes)
        if known:
            figure.set_layout_engine("none")
            for axes, (place, x_label, y_label) in zip(figure.axes, self.places, strict=True):
                axes.set_position(place)
                axes.xaxis.set_label_coords(*x_label)
                axes.yaxis.set_label_coords(*y_label)
        # Not savefig: with a layout engine it draws everything twice.
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]
        if not known:
            self.size, self.places = size, [_places(axes) for axes in figure.axes]
        buffer = io.BytesIO()
        pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
        return buffer.getvalue()


def _places(axes: Axes) -> tuple[Any, Any, Any]:
    """Return where drawing put the axes, and the labels of its x and y axis in the axes' own coordinates."""
    inside = axes.transAxes.inverted()
    labels = (axes.xaxis.label, axes.yaxis.label)
    x_label, y_label = (inside.transform(label.get_transform().transform(label.get_position())) for label in labels)
    return axes.get_position(), x_label, y_label


def explore(stem: str, **given: Any) -> Any:
    """Show the figure of `stem` with a control for each parameter that declares one.

    A number declared with `wqlab.experiments.slider` becomes a slider, a choice (``Literal``) a menu, a truth value a check box.
    Moving one runs the experiment and redraws.

    Parameters
    ----------
    stem : str
        Which figure.
    **given
        Start values, and values for parameters without a control.

    Returns
    -------
    ipywidgets.VBox

    Raises
    ------
    UnknownNameError, ParameterError
        As `wqlab.run`.
    """
    import ipywidgets as widgets

    experiment = experiments.get(stem)
    model = experiment.Parameters
    values = experiments.validate(stem, given).model_dump()
    controls = {
        name: control
        for name, info in model.model_fields.items()
        if (control := _control(name, info, values[name], experiment.live))
    }
    renderer = Renderer(stem)
    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
    text = widgets.HTML()
    image.value, caption = renderer.render(values)
    text.value = _small(caption)

    def redraw(change: Any) -> None:
        values.update({name: control.value for name, control in controls.items()})
        text.value = text.value if experiment.live else f"{stem}: measuring ..."
        try:
            image.value, caption = renderer.render(values)
            text.value = _small(caption)
        except WqlabError as error:  # the figure stays; the reader sees why it did not follow
            text.value = f"<b>{type(error).__name__}</b>: {html.escape(str(error))}"

    for control in controls.values():
        control.observe(redraw, names="value")
    return widgets.VBox([*controls.values(), image, text])


def _small(caption: str) -> str:
    return f'<div style="max-width: 70em; font-size: 85%; opacity: 0.8; line-height: 1.3">{html.escape(caption)}</div>'


def _control(name: str, info: Any, value: Any, live: bool) -> Any:
    import ipywidgets as widgets

    wide = {"style": {"description_width": "12em"}, "layout": widgets.Layout(width="36em")}
    extra = info.json_schema_extra or {}
    if "slider" in extra:
        limits = extra["slider"]
        kind = widgets.IntSlider if info.annotation is int else widgets.FloatSlider
        return kind(
            value=value, min=limits["low"], max=limits["high"], step=limits["step"], description=name, continuous_update=live,
            tooltip=info.description, **wide,
        )  # fmt: skip
    if typing.get_origin(info.annotation) is typing.Literal:
        return widgets.Dropdown(options=list(typing.get_args(info.annotation)), value=value, description=name, **wide)
    if info.annotation is bool and extra.get("control"):
        return widgets.Checkbox(value=value, description=name, **wide)
    return None
