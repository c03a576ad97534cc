"""Sliders for any stem, built from the declaration of its parameters."""

from __future__ import annotations

import io
import typing
from typing import Any

from wqlab import experiments, figures
from wqlab.errors import WqlabError


def render(stem: str, parameters: dict[str, Any]) -> bytes:
    """Return the figure of `stem` as PNG bytes at screen resolution."""
    figure = figures.draw(experiments.run(stem, **parameters))
    buffer = io.BytesIO()
    figures.write(figure, buffer, format="png", dpi=100)
    return buffer.getvalue()


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
        for name, field in model.model_fields.items()
        if (control := _control(name, field, values[name], experiment.live))
    }
    image = widgets.Image(value=render(stem, values), format="png", layout=widgets.Layout(max_width="100%"))
    message = widgets.HTML()

    def redraw(change: Any) -> None:
        values.update({name: control.value for name, control in controls.items()})
        message.value = "" if experiment.live else f"{stem}: measuring ..."
        try:
            image.value = render(stem, values)
            message.value = ""
        except WqlabError as error:  # the figure stays; the reader sees why it did not follow
            message.value = f"<b>{type(error).__name__}</b>: {error}"

    for control in controls.values():
        control.observe(redraw, names="value")
    return widgets.VBox([*controls.values(), message, image])


def _control(name: str, field: Any, value: Any, live: bool) -> Any:
    import ipywidgets as widgets

    wide = {"style": {"description_width": "12em"}, "layout": widgets.Layout(width="36em")}
    extra = field.json_schema_extra or {}
    if "slider" in extra:
        limits = extra["slider"]
        kind = widgets.IntSlider if field.annotation is int else widgets.FloatSlider
        return kind(
            value=value, min=limits["low"], max=limits["high"], step=limits["step"], description=name, continuous_update=live,
            tooltip=field.description, **wide,
        )  # fmt: skip
    if typing.get_origin(field.annotation) is typing.Literal:
        return widgets.Dropdown(options=list(typing.get_args(field.annotation)), value=value, description=name, **wide)
    if field.annotation is bool and extra.get("control"):
        return widgets.Checkbox(value=value, description=name, **wide)
    return None
