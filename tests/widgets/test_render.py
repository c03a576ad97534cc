import io

import numpy as np
import pytest
from PIL import Image

from wqlab.widgets.render import Renderer

#: Recorded, so that no model runs.
PROSE = {"similarity": "prose"}


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=float)


@pytest.mark.parametrize(
    ("stem", "moves"),
    [
        ("alpha_sweep", [{"alpha": a, **PROSE} for a in (2.0, 3.0, 4.0, 9.0)]),
        ("alpha_sweep", [{"normalize": n, **PROSE} for n in ("minmax", "none", "rank", "rank")]),
        ("kv_memory", [{"seconds": s} for s in (30.0, 30.0, 30.0, 10.0)]),
        ("kv_memory", [{"seconds": 30.0, "bits": b} for b in (16, 4, 4, 2)]),
        ("occupancy_slack", [{"registers": r} for r in (90, 95, 100, 105)]),
    ],
)
def test_a_redraw_shows_what_a_fresh_drawing_shows(stem, moves):
    """With the axes at the same places; only spines and edges may be covered differently, by fractions of a pixel."""
    renderer = Renderer(stem)
    for move in moves:
        again = pixels(renderer.render(move)[0])
        fresh = pixels(Renderer(stem, shape=renderer.shape, places=renderer.places).render(move)[0])
        assert again.shape == fresh.shape
        assert np.abs(again - fresh).mean() < 1.0
        assert (np.abs(again - fresh) > 60).mean() < 0.01


def test_places_are_found_once_and_the_frame_is_kept_while_it_holds():
    renderer = Renderer("alpha_sweep")
    renderer.render({"alpha": 1.0, **PROSE})
    places = renderer.places
    assert len(places) == 5
    assert renderer.background is None
    renderer.render({"alpha": 5.0, **PROSE})
    background = renderer.background
    assert background is not None
    renderer.render({"alpha": 7.0, **PROSE})
    assert renderer.background is background
    assert renderer.places is places


def test_other_limits_are_another_frame():
    renderer = Renderer("kv_memory")
    renderer.render({"seconds": 30.0})
    renderer.render({"seconds": 30.0})
    background = renderer.background
    assert background is not None
    renderer.render({"seconds": 12.0})
    assert renderer.background is not background
