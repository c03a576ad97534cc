"""codebook_access against plain counts of made-up indices, its figure, and what it says where a record is missing."""

import numpy as np
import pandas as pd
import pytest

from wqlab import claims, experiments, figures, records
from wqlab.bench.codebook_access import CQ_BITS, LINEARS, METHODS, CodebookAccessBench, _rows
from wqlab.claims.schema import printed
from wqlab.errors import MissingPartError, ParameterError, UnknownNameError
from wqlab.profile import environment

#: method -> books, entries, bytes of an entry as the methods store it.
STORED = {"quip": (2, 256, 8.0), "aqlm": (2, 512, 16.0), "gptvq": (9, 256, 8.0), "cq_4": (96, 256, 4.0), "cq_2": (48, 256, 8.0)}


def made_up():
    """Return (method, tensor) -> indices, some entries of which are read far more often than others."""
    rng = np.random.default_rng(0)
    found = {}
    for method, (books, entries, _) in STORED.items():
        for tensor in ("key", "value") if method.startswith("cq") else LINEARS:
            chances = rng.dirichlet(np.full(entries, 0.6))
            found[method, tensor] = rng.choice(entries, (books, 2400), p=chances)
    found["gptvq", LINEARS[0]][-1, 600:] = -1  # a smaller tile
    return found


def write(folder, indices):
    rows = [row for (method, tensor), one in indices.items() for row in _rows(method, tensor, one, *STORED[method][1:])]
    data = pd.DataFrame(rows, columns=list(CodebookAccessBench.columns))
    whole = ["rank", "part", "count", "books", "entries", "accesses", "hot", "unused"]
    data[whole] = data[whole].astype("Int64")
    about = environment.provenance("wqlab bench codebook_access")
    records.write("codebook_access", "cpu", data, CodebookAccessBench.columns, about, folder)


@pytest.fixture(scope="module")
def indices():
    return made_up()


@pytest.fixture
def recorded(indices, tmp_path, monkeypatch):
    write(tmp_path, indices)
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    return indices


def by_hand(books, entries):
    """Hot entries, entries below the mean and never read, and share of hot reads, per book."""
    found = []
    for book in books:
        counts = np.bincount(book[book >= 0], minlength=entries)
        hot = counts > counts.mean() + 3 * counts.std()
        found.append((hot.sum(), (counts < counts.mean()).mean(), counts[hot].sum() / counts.sum(), (counts == 0).sum()))
    return np.array(found, dtype=float)


def test_values_are_means_over_the_whole_books_of_all_tensors(recorded):
    result = experiments.run("codebook_access", gpu="cpu")
    for method, (_, entries, _) in STORED.items():
        whole = [one[(one >= 0).all(1)] for (m, _), one in recorded.items() if m == method]  # without the smaller tile
        every = np.concatenate([by_hand(books, entries) for books in whole])
        names = [f"{name}_{method}" for name in ("hot", "below_mean", "hot_share", "unused")]
        assert [result.values[name].value for name in names] == pytest.approx(every.mean(0))
    rows = result.data[result.data["part"] == "methods"].set_index("method")
    assert result.values["below_mean_least"].value == rows["below_mean"].min()
    assert (rows["hot_low"] <= rows["hot"]).all()
    assert (rows["hot"] <= rows["hot_high"]).all()
    # Positions are drawn alike everywhere: shuffling them changes nothing but chance.
    assert result.values["part_correlation_kept_least"].value == pytest.approx(1, abs=0.05)


def test_curves_and_heatmap_are_of_the_chosen_tensors(recorded):
    result = experiments.run("codebook_access", gpu="cpu", method="cq_2", weight="mlp.gate_proj", cache="value")
    data = result.data
    assert set(data["tensor"].dropna()) == {"mlp.gate_proj", "value"}
    counts = np.sort(np.bincount(recorded["quip", "mlp.gate_proj"][0], minlength=256))[::-1]
    curve = data[(data["part"] == "sorted") & (data["method"] == "quip") & (data["book"] == 0)]
    assert curve["count"].tolist() == counts[curve["rank"].astype(int)].tolist()
    assert curve["relative"].tolist() == pytest.approx((curve["count"] / counts.mean()).tolist())
    hottest = data[data["part"] == "heatmap"]
    book = recorded["cq_2", "value"][0]
    entry = np.bincount(book, minlength=256).argmax()
    first = hottest[hottest["rank"] == 0].sort_values("run")
    assert first["relative"].tolist() == pytest.approx([(run == entry).sum() * 256 / 200 for run in np.split(book, 12)])


def test_bytes_of_a_block_are_table_vs(recorded):
    values = experiments.run("codebook_access", gpu="cpu").values
    for method, name in (("quip", "QuiP#-4"), ("gptvq", "GPTVQ-2"), ("cq_2", "CQ-2")):
        assert values[f"codebook_kb_{method}"].value == printed(f"vqllm_table5 | {name} | codebook per block").value
    # A made-up codebook of 512 entries in place of 4,096.
    assert values["codebook_kb_aqlm"].value * 8 == printed("vqllm_table5 | AQLM-3 | codebook per block").value
    rows = experiments.run("codebook_access", gpu="cpu", weight="self_attn.q_proj").data.query("part == 'methods'")
    here = rows.set_index("method")["kb_here"]
    assert here["gptvq"] == 3 * 2  # 576 inputs touch three tiles
    assert here["cq_2"] == here["cq_4"] == 32


def test_every_value_that_the_ledger_asks_for_is_there(recorded):
    values = experiments.run("codebook_access", gpu="cpu").values
    asked = {c.evidence.value: c.unit for c in claims.ledger("vqllm") if c.stem == "codebook_access"}
    assert len(asked) > 8
    assert {name: values[name].unit for name in asked} == asked


@pytest.mark.parametrize("method", list(STORED))
def test_the_figure_shows_every_kind_of_evidence(recorded, method):
    result = experiments.run("codebook_access", gpu="cpu", method=method)
    figure = figures.draw(result)
    shown = " ".join(t.get_text() for axes in figure.axes if axes.get_legend() for t in axes.get_legend().get_texts()) + " ".join(
        axes.get_ylabel() for axes in figure.axes
    )
    for kind in ("recorded", "simulated", "paper"):
        assert f"({kind})" in shown
    assert len(figure.axes) == 6  # five panels and the heatmap's scale


def test_without_a_record_it_says_how_to_get_one(tmp_path, monkeypatch, indices):
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    with pytest.raises(MissingPartError, match="wqlab bench codebook_access"):
        experiments.run("codebook_access")
    with pytest.raises(UnknownNameError, match="h200"):
        experiments.run("codebook_access", gpu="h20")
    with pytest.raises(ParameterError, match="weight"):
        experiments.run("codebook_access", weight="lm_head")
    write(tmp_path, {key: one for key, one in indices.items() if key[0] != "aqlm"})
    with pytest.raises(MissingPartError, match=r"lacks aqlm.*wqlab bench codebook_access"):
        experiments.run("codebook_access", gpu="cpu", method="aqlm")
    partial = experiments.run("codebook_access", gpu="cpu", method="quip")
    assert "hot_aqlm" not in partial.values
    assert "hot_gptvq" in partial.values
    assert partial.notes[0] == "Not in this record, and in none of the means: AQLM-3."
    figures.draw(partial)


def test_the_made_up_record_has_the_methods_of_the_bench():
    assert set(STORED) >= {*METHODS, *(f"cq_{bits}" for bits in CQ_BITS)}
