import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wqlab
from wqlab import records
from wqlab.errors import RecordError
from wqlab.experiments import alpha_sweep
from wqlab.windows.plan import assign_bit_widths
from wqlab.windows.thresholds import thresholds


@given(st.floats(0.1, 12), st.sampled_from(["none", "minmax", "rank"]), st.sampled_from(["prose", "uniform"]))
def test_tokens_add_up_in_every_layer(alpha, normalize, similarity):
    data = wqlab.run("alpha_sweep", alpha=alpha, normalize=normalize, similarity=similarity).data
    layers = data[data["part"] == "layers"]
    np.testing.assert_allclose(layers.groupby("layer")["tokens"].sum(), 4096)
    shares = data[data["part"] == "sweep"].groupby("alpha")["share"].sum()
    np.testing.assert_allclose(shares, 1)


def test_tokens_follow_from_the_records_by_the_formulas():
    """The twin: plain loops over the recorded tables."""
    importance = records.read("layer_importance", "cpu").data
    similarity = records.read("window_similarity", "cpu").data
    low, high = thresholds(importance["s_i_residual"], 3.0)
    want = np.zeros(len(importance))
    for _, question in similarity.groupby("question"):
        scores = question.sort_values("window")["similarity"].to_numpy()
        scores = (scores - scores.min()) / (scores.max() - scores.min())
        want += (assign_bit_widths(scores, low, high) == 4).sum(axis=1) * 32 / similarity["question"].nunique()
    layers = wqlab.run("alpha_sweep", alpha=3.0, normalize="minmax").data.query("part == 'layers' and bits == 4")
    np.testing.assert_allclose(layers["tokens"], want)


def test_evidence_is_per_column_and_honest():
    prose, uniform = wqlab.run("alpha_sweep"), wqlab.run("alpha_sweep", similarity="uniform")
    assert prose.evidence["tokens"].kind == "recorded"
    assert uniform.evidence["tokens"].kind == "simulated"
    assert prose.evidence["s_i"].file == "data/recorded/cpu/layer_importance.csv"
    assert {i.name for i in prose.inputs} == {"data/recorded/cpu/layer_importance.csv", "data/recorded/cpu/window_similarity.csv"}


def test_what_the_ledger_judges_does_not_depend_on_what_is_shown():
    assert wqlab.run("alpha_sweep").values == wqlab.run("alpha_sweep", alpha=7.0, normalize="rank", similarity="uniform").values


def test_a_damaged_record_is_named(monkeypatch, tmp_path):
    alpha_sweep._recorded.cache_clear()
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "layer_importance.json").write_text("{")
    try:
        with pytest.raises(RecordError, match="wqlab bench layer_importance"):
            wqlab.run("alpha_sweep")
    finally:
        alpha_sweep._recorded.cache_clear()
