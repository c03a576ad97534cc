"""vq_quality against plain arithmetic on the records and brute force on the keys."""

import numpy as np
import pytest

from wqlab import experiments, figures, records
from wqlab.errors import MissingPartError, ParameterError, UnknownNameError
from wqlab.experiments import vq_quality

QUICK = {"quick": True, "layer": 1, "head": 0, "pair": 3}


@pytest.fixture(scope="module")
def caches():
    return records.read("vq_caches", "h200").data


def test_values_are_those_of_the_records(caches):
    result = experiments.run("vq_quality", **QUICK)
    for metric, exam, name in (
        ("nll_difference", "prose", "nll_difference_cache_cq_2_before"),
        ("accuracy", "pocketbench hard", "accuracy_cache_rtn_2_hard"),
        ("kl", "pocketbench easy", "kl_cache_cq_4_after_easy"),
        ("nll_difference", "prose", "nll_difference_cache_kivi_2_own_policy"),
    ):
        words = name.split("cache_")[1]
        setting = {
            "cq_2_before": "cq 2 bits, keys before RoPE, plain", "rtn_2_hard": "rtn 2 bits",
            "cq_4_after_easy": "cq 4 bits, keys after RoPE, plain", "kivi_2_own_policy": "kivi 2 bits, own policy",
        }[words]  # fmt: skip
        row = caches[(caches["setting"] == setting) & (caches["exam"] == exam) & (caches["metric"] == metric)]
        assert result.values[name].value == pytest.approx(row["value"].item())
    full = caches[(caches["setting"] == "fp16") & (caches["metric"] == "nll")]["value"].item()
    assert result.values["perplexity_fp16"].value == pytest.approx(np.exp(full))
    keys = records.read("vq_keys", "h200").data
    own = keys[(keys["keys"] == "mrope") & (keys["method"] == "cq") & (keys["num_bits"] == 2)]["error"].mean()
    assert result.values["error_key_mrope_cq_2"].value == pytest.approx(own)
    assert result.evidence["value"].kind == result.evidence["key_error"].kind == "recorded"
    assert result.evidence["x"].kind == "measured"


@pytest.mark.parametrize("num_bits", [2, 4])
def test_points_and_errors_are_those_of_the_nearest(num_bits):
    data = experiments.run("vq_quality", num_bits=num_bits, **QUICK).data
    x, grid, entries = (data[data["part"] == part][["x", "y"]].to_numpy() for part in ("keys", "rtn points", "cq points"))
    assert len(grid) == len(entries) == 4**num_bits
    np.testing.assert_allclose(grid.min(0), x.min(0), rtol=1e-6)
    np.testing.assert_allclose(grid.max(0), x.max(0), rtol=1e-6)
    errors = data[data["part"] == "error"].set_index("method")["mse"]
    for method, points in (("rtn", grid), ("cq", entries)):
        nearest = [min(((p - q) ** 2).sum() for q in points) / 2 for p in x]
        assert errors[method] == pytest.approx(np.mean(nearest), rel=1e-5)


@pytest.mark.parametrize("exam", list(vq_quality.METRICS))
def test_every_exam_is_drawn(exam):
    result = experiments.run("vq_quality", exam=exam, **QUICK)
    figure = figures.draw(result)
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    assert "KV cache" in titles
    assert any("texts of English prose" in note if exam == "prose" else "questions" in note for note in result.notes)


def test_what_is_not_there_is_named(monkeypatch):
    for name, value in (("layer", 30), ("head", 3), ("pair", 32)):
        with pytest.raises(ParameterError, match=f"{name} = {value} is too large: smollm2 has {value}, numbered from 0"):
            experiments.run("vq_quality", **QUICK | {name: value})
    with pytest.raises(MissingPartError, match=r"no record of accuracy .* on a40: .*wqlab bench vq_caches"):
        experiments.run("vq_quality", gpu="a40", **QUICK)
    with pytest.raises(UnknownNameError, match="h20"):
        experiments.run("vq_quality", gpu="h20", **QUICK)
    real = records.read
    monkeypatch.setattr(records, "read", lambda name, gpu, *rest: real("vq_none" if name != "vq_caches" else name, gpu, *rest))
    result = experiments.run("vq_quality", **QUICK)
    said = " ".join(result.notes)
    assert "vq_weights was not recorded on h200" in said
    assert "Errors before and behind rotary positions are missing" in said
    figures.draw(result)
