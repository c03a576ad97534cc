"""Every figure: evidence in legend or labels and in the caption, no torch, text that does not overlap the axes' titles."""

import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
import seaborn as sns

import wqlab
from wqlab import experiments, figures
from wqlab.errors import UnknownNameError
from wqlab.types import Evidence, Result

#: Those that need no model; the notebooks' tests draw all of them.
QUICK = [("alpha_sweep", {"similarity": "prose"}), ("kv_memory", {})]


def texts(figure):
    found = []
    for axes in figure.axes:
        found += [
            axes.get_xlabel(),
            axes.get_ylabel(),
            axes.get_title(),
            axes.get_title(loc="left"),
            *(t.get_text() for t in axes.texts),
        ]
        if axes.get_legend():
            found += [t.get_text() for t in axes.get_legend().get_texts()]
    return " ".join([*found, *(t.get_text() for t in figure.texts)])


@pytest.mark.parametrize(("stem", "given"), QUICK)
def test_every_kind_of_evidence_is_named_on_the_axes_and_in_the_caption(stem, given):
    result = wqlab.run(stem, **given)
    plain, full = figures.draw(result, with_caption=False), figures.draw(result)
    for evidence in result.evidence.values():
        assert f"({evidence.kind})" in texts(plain) or f", {evidence.kind})" in texts(plain)
        assert evidence.kind.split()[0] in figures.caption(result)
    shown = " ".join(texts(full).split())
    assert " ".join(figures.caption(result).split()) in shown


@pytest.mark.parametrize(("stem", "given"), QUICK)
def test_the_caption_lies_below_all_axes(stem, given):
    figure = figures.draw(wqlab.run(stem, **given))
    figure.canvas.draw()
    (caption,) = [t for t in figure.texts if t.get_text().startswith(figures.caption(wqlab.run(stem, **given))[:10])]
    top = caption.get_window_extent().y1
    assert all(axes.get_tightbbox().y0 >= top - 1 for axes in figure.axes)
    assert caption.get_window_extent().x1 <= figure.bbox.x1


def test_drawing_leaves_no_figure_open_and_no_style_behind():
    before, size = plt.get_fignums(), plt.rcParams["font.size"]
    figures.draw(wqlab.run("kv_memory"))
    assert plt.get_fignums() == before
    assert plt.rcParams["font.size"] == size


def test_importing_and_drawing_needs_no_torch():
    code = "import sys, wqlab; wqlab.draw(wqlab.run('kv_memory')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_every_stem_has_a_figure_and_an_unknown_one_says_so(monkeypatch):
    from wqlab import registry

    assert set(experiments.stems()) <= set(registry.names("figure"))
    result = wqlab.run("kv_memory")
    result.stem = "no_such"
    with pytest.raises(UnknownNameError, match="figure"):
        figures.draw(result)


def test_captions_name_an_evidence_once_with_all_its_columns():
    import pandas as pd

    same = Evidence(kind="simulated", source="a formula")
    result = Result("s", {}, pd.DataFrame({"a": [1], "b": [2], "c": [3]}), {"a": same, "b": same}, notes=["A note."])
    assert figures.caption(result) == "a, b: simulated: a formula. A note."


def test_bit_widths_have_colours_that_differ_in_lightness():
    """Okabe-Ito colours are told apart by colour-blind readers; in grey print lightness has to do it for the three widths."""
    from matplotlib.colors import to_rgb

    light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (to_rgb(figures.BIT_COLOURS[bits]) for bits in (16, 4, 2)))
    assert light[1] - light[0] > 0.03
    assert light[2] - light[1] > 0.1


def test_heatmaps_are_seaborns_without_its_drawing_of_the_whole_figure(monkeypatch):
    import pandas as pd
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    table = pd.DataFrame([[0.0, 1.0], [2.0, 3.0]], columns=["a", "b"])
    figure, (ours, theirs) = plt.subplots(1, 2)
    sns.heatmap(table, ax=theirs)
    canvas = figure.canvas
    with monkeypatch.context() as patch:
        patch.setattr(FigureCanvasAgg, "draw", lambda self: pytest.fail("the figure was drawn"))
        figures.heatmap(table, ours)
    assert figure.canvas is canvas
    assert ours.collections[0].get_array().tolist() == theirs.collections[0].get_array().tolist()
    assert [t.get_text() for t in ours.get_xticklabels()] == ["a", "b"]
    plt.close(figure)
