import json

import numpy as np
import pytest

from wqlab import bench, paths, records
from wqlab.bench import alpha_latency
from wqlab.bench.alpha_latency import ALPHAS, AlphaLatencyBench, whole_windows
from wqlab.bench.decode_caches import Tokens, cache_bytes
from wqlab.errors import ParameterError, RecordError
from wqlab.profile import environment


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "cache"))


def test_a_quick_record_has_a_row_per_alpha_and_source(tmp_path):
    bench.run("alpha_latency", tmp_path, quick=True)
    data = records.read("alpha_latency", environment.gpu_key(), tmp_path).data
    assert list(data.columns) == list(AlphaLatencyBench.columns)
    assert len(data) == 2 * 3 * len(alpha_latency.QUICK_ALPHAS)
    assert set(data["similarity"]) == {"video", "prose"}
    assert (data["latency_us"] > 0).all()
    assert (data["rel_error"] < 1e-3).all()
    assert data["note"].isna().all()
    assert (data["windows_16"] + data["windows_4"] + data["windows_2"] == 20).all()
    # One measurement for one mix.
    assert (data.groupby(["windows_16", "windows_4"])["latency_us"].nunique() == 1).all()


def test_every_alpha_has_the_plan_of_the_figure():
    points = AlphaLatencyBench().points(quick=False)
    cases = {case: point for point in points for case in point.cases}
    assert len(cases) == 2 * 3 * len(ALPHAS)
    assert len(points) == len({point.tokens for point in points})
    assert points[0].cases[0][:2] == ("video", "minmax")
    values = json.loads((paths.shipped("figures") / "alpha_sweep.json").read_text())["values"]
    for name, alpha in (("0_5", 0.5), ("2", 2.0), ("8", 8.0)):
        (tokens,) = {p.tokens for c, p in cases.items() if c[:2] == ("video", "minmax") and np.isclose(c.alpha, alpha)}
        for width, share in zip(("fp16", "int4", "int2"), np.array(tokens) / 25600, strict=True):
            assert share == pytest.approx(values[f"pocket_vlm_{width}_share_minmax_alpha_{name}"]["value"], abs=0.5 / 800 * 2)


def test_shares_become_whole_windows():
    assert whole_windows((0.1, 0.3, 0.6), 640) == Tokens(64, 192, 384)
    assert whole_windows((0.5, 0.5, 0.0), 96) == Tokens(64, 32, 0)
    with pytest.raises(ParameterError, match="make 96 together"):
        cache_bytes(alpha_latency.QUICK._replace(seq_len=96), Tokens(32, 32, 16))


def test_plans_that_are_not_the_defaults_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(alpha_latency, "_table", lambda: tmp_path / "alpha_sweep.csv")
    with pytest.raises(RecordError, match="reproduce alpha_sweep"):
        AlphaLatencyBench().points(quick=True)
    original = paths.shipped("figures") / "alpha_sweep.csv"
    (tmp_path / "alpha_sweep.csv").write_bytes(original.read_bytes())
    (tmp_path / "alpha_sweep.json").write_text(json.dumps({"parameters": {"similarity": "prose", "quick": False}}))
    with pytest.raises(RecordError, match="similarity = 'prose'"):
        AlphaLatencyBench().points(quick=True)


def test_a_mix_that_fails_leaves_the_others(monkeypatch):
    times = iter([RuntimeError("on purpose")])

    def measure(*_):
        for failure in times:
            raise failure
        return {"latency_us": 1.0, "rel_error": 0.0}

    monkeypatch.setattr(alpha_latency, "_measure", measure)
    data = AlphaLatencyBench().measure(quick=True)
    assert 0 < data["latency_us"].isna().sum() < len(data)
    assert (data.loc[data["latency_us"].isna(), "note"] == "RuntimeError: on purpose").all()
