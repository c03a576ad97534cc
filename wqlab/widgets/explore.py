"""Sliders for any stem, built from the declaration of its parameters."""

from __future__ import annotations

import html
import typing
from typing import Any

from wqlab import experiments
from wqlab.errors import WqlabError
from wqlab.widgets.render import Renderer


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
