import io

import numpy as np
import pytest
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import Bbox
from PIL import Image

from wqlab.widgets import render
from wqlab.widgets.render import Renderer, _Brush

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
    assert not renderer.backgrounds
    renderer.render({"alpha": 5.0, **PROSE})
    (background,) = renderer.backgrounds.values()
    renderer.render({"alpha": 7.0, **PROSE})
    assert list(renderer.backgrounds.values()) == [background]
    assert renderer.places is places


def test_other_limits_are_another_frame():
    renderer = Renderer("kv_memory")
    renderer.render({"seconds": 30.0})
    renderer.render({"seconds": 30.0})
    (first,) = renderer.backgrounds
    renderer.render({"seconds": 12.0})
    renderer.render({"seconds": 12.0})
    assert len(renderer.backgrounds) == 2
    shown = pixels(renderer.render({"seconds": 30.0})[0])  # a frame that was met has its picture still
    assert list(renderer.backgrounds)[-1] == first
    fresh = pixels(Renderer("kv_memory", shape=renderer.shape, places=renderer.places).render({"seconds": 30.0})[0])
    assert np.abs(shown - fresh).mean() < 1.0


def test_a_known_text_is_drawn_from_its_picture_and_looks_the_same():
    """On white, beside matplotlib's own renderer: a picture that lies over others may differ by a rounding."""
    move = {"seconds": 30.0}
    renderer = Renderer("kv_memory")
    renderer.render(move)
    first = renderer._brush
    kept = dict(first._texts)
    assert kept
    again = pixels(renderer.render(move)[0])
    assert renderer._brush is first
    assert set(kept) <= set(first._texts)
    assert all(first._texts[key] is picture for key, picture in kept.items())  # nothing was drawn anew
    plain = Renderer("kv_memory", shape=renderer.shape, places=renderer.places)
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(_Brush, "draw_text")
        wanted = pixels(plain.render(move)[0])
        assert not plain._brush._texts
    assert np.abs(again - wanted).mean() < 1.0
    assert (np.abs(again - wanted) > 60).mean() < 0.01


def test_one_text_is_where_matplotlib_puts_it_and_clipped_alike():
    clip, font = Bbox.from_bounds(10, 10, 60, 30), FontProperties(size=12)
    for angle, clipped in ((0, False), (90, False), (0, True)):
        seen = []
        for painter in (_Brush(100, 80, 100), RendererAgg(100, 80, 100)):
            for _ in range(2):
                painter.clear()
                gc = painter.new_gc()
                gc.set_foreground("tab:red")
                if clipped:
                    gc.set_clip_rectangle(clip)
                painter.draw_text(gc, 20.3, 50.6, "Text 12", font, angle)
            seen.append(np.asarray(painter.buffer_rgba()).astype(int))
        assert seen[0][..., 3].any()
        assert np.abs(seen[0] - seen[1])[..., 3].max() <= 2
        assert np.abs(seen[0] - seen[1])[seen[0][..., 3] > 64].max() <= 4


def test_old_pictures_give_way(monkeypatch):
    monkeypatch.setattr(render, "_TEXTS", 3)
    brush, font = _Brush(100, 80, 100), FontProperties(size=8)
    for text in "abcab":
        brush.draw_text(brush.new_gc(), 20, 50, text, font, 0)
    brush.draw_text(brush.new_gc(), 20, 50, " ", font, 0)  # nothing is seen, which is kept too
    assert [key[0] for key in brush._texts] == ["a", "b", " "]
