import io

import ipywidgets
import numpy as np
import pytest
from PIL import Image

from wqlab import experiments
from wqlab.errors import ParameterError
from wqlab.widgets.explore import explore


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=float)


def controls(box):
    return {c.description: c for c in box.children if getattr(c, "description", "")}


def test_a_slider_redraws_and_another_value_is_another_picture():
    box = explore("alpha_sweep", similarity="prose", alpha=2.0)
    (image,) = [c for c in box.children if isinstance(c, ipywidgets.Image)]
    before = image.value
    controls(box)["alpha"].value = 6.0
    assert image.value != before
    assert np.abs(pixels(image.value) - pixels(before)).max() > 50
    controls(box)["alpha"].value = 2.0
    assert np.abs(pixels(image.value) - pixels(before)).mean() < 0.5


@pytest.mark.parametrize("stem", experiments.stems())
def test_controls_follow_the_declaration(stem):
    """Nothing is measured: controls are built from the schema alone."""
    from wqlab.widgets.explore import _control

    experiment = experiments.get(stem)
    defaults = experiments.validate(stem, {}).model_dump()
    for name, info in experiment.Parameters.model_fields.items():
        control = _control(name, info, defaults[name], experiment.live)
        if control is not None:
            assert control.value == defaults[name]
            assert control.description == name
        if "slider" in (info.json_schema_extra or {}):
            assert control.min <= control.value <= control.max


def test_the_caption_is_text_and_names_the_evidence():
    box = explore("alpha_sweep", similarity="prose")
    (text,) = [c for c in box.children if isinstance(c, ipywidgets.HTML)]
    assert "recorded" in text.value
    assert "simulated: Eq. 10 and 11" in text.value


def test_an_error_is_shown_and_the_figure_stays(monkeypatch):
    box = explore("alpha_sweep", similarity="prose")
    (image,) = [c for c in box.children if isinstance(c, ipywidgets.Image)]
    (text,) = [c for c in box.children if isinstance(c, ipywidgets.HTML)]
    before = image.value
    monkeypatch.setattr(experiments, "run", lambda *a, **k: (_ for _ in ()).throw(ParameterError("no <such> thing")))
    controls(box)["alpha"].value = 3.0
    assert "no &lt;such&gt; thing" in text.value
    assert image.value == before


def test_bad_start_values_are_refused():
    with pytest.raises(ParameterError):
        explore("alpha_sweep", alpha=-1)
    with pytest.raises(ParameterError):
        explore("alpha_sweep", alhpa=1)
