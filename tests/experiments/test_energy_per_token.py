"""energy_per_token from a synthetic record, from one without energy, and from none. The numbers are made up."""

import numpy as np
import pandas as pd
import pytest

from wqlab import experiments, figures, records
from wqlab.bench import get
from wqlab.bench.decode_caches import MIXES, cache_bytes
from wqlab.bench.energy import SHAPE
from wqlab.errors import UnknownNameError

PROVENANCE = {
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_gb": 8.0, "gpus": ["Synthetic GPU"]},
    "versions": {}, "git_commit": "0" * 40, "date": "2026-01-02T03:04:05+00:00", "command": "synthetic, a test's record",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of records without any."""
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    return tmp_path


def write(folder, **changed):
    rows = []
    for turn in range(3):
        for mix in MIXES:
            latency = 100.0 * cache_bytes(SHAPE, mix).total / SHAPE.fp16_bytes + turn
            rows.append({**SHAPE._asdict(), "mix": mix, "round": turn, "latency_us": latency, "power_w": 500.0, "idle_w": 100.0})
    data = pd.DataFrame(rows).assign(source="NVML energy counter", idle_source="NVML energy counter", note="", seed=0)
    data["energy_per_token_mj"] = data["power_w"] * data["latency_us"] / 1e3 / SHAPE.batch
    data["above_idle_per_token_mj"] = 0.8 * data["energy_per_token_mj"]
    data = data.assign(**changed)
    columns = get("energy").columns
    records.write("energy", "h200", data.reindex(columns=list(columns)), columns, PROVENANCE, folder)


def words(result, tmp_path):
    figure = figures.draw(result)
    figures.write(figure, tmp_path / "figure.png")
    legends = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    return " ".join([*legends, *(text.get_text() for axes in figure.axes for text in axes.texts)])


def test_without_a_record_it_says_what_is_missing(tmp_path):
    result = experiments.run("energy_per_token")
    assert {evidence.kind for evidence in result.evidence.values()} == {"simulated"}
    assert "energy_mj" not in result.data
    assert result.values == {}
    assert "No energy yet on h200: take data/recorded/h200/energy.*" in figures.caption(result)
    assert "wqlab bench energy" in words(result, tmp_path)
    with pytest.raises(UnknownNameError):
        experiments.run("energy_per_token", gpu="h2000")


def test_a_record_is_shown_per_token_of_all_layers(folder, tmp_path):
    write(folder)
    result = experiments.run("energy_per_token", layers=10)
    row = result.data.set_index("mix").loc["fp16"]
    np.testing.assert_allclose([row["energy_low_mj"], row["energy_mj"], row["energy_high_mj"]], [62.5, 63.125, 63.75])
    assert row["above_idle_mj"] == pytest.approx(0.8 * row["energy_mj"])
    assert row["latency_us"] == pytest.approx(1010)
    assert row[["bytes_percent", "latency_percent", "energy_percent"]].tolist() == [100, 100, 100]
    assert row["bytes_mb"] == pytest.approx(10 * SHAPE.fp16_bytes / SHAPE.batch / 1e6)
    kinds = {column: evidence.kind for column, evidence in result.evidence.items()}
    assert (kinds["bytes_percent"], kinds["energy_mj"], kinds["latency_us"]) == ("simulated", "recorded", "recorded")
    assert result.values["energy_mj_10_30_60"].unit == "mJ"
    text = words(result, tmp_path)
    assert "energy (recorded)" in text
    assert "bytes (simulated)" in text
    assert "500 W" in text
    assert "100 W that it took before" in figures.caption(result)


def test_energy_that_nvml_did_not_tell_is_no_number(folder, tmp_path):
    unknown = dict.fromkeys(("power_w", "idle_w", "energy_per_token_mj", "above_idle_per_token_mj"), np.nan)
    write(folder, **unknown, source="unavailable: MIG is on")
    result = experiments.run("energy_per_token")
    assert "energy_mj" not in result.evidence
    assert "latency_us" in result.evidence
    assert "Energy is unavailable: MIG is on." in figures.caption(result)
    assert "unavailable, see below" in words(result, tmp_path)
    assert set(result.values) == {f"latency_percent_{mix.replace('/', '_')}" for mix in MIXES}


def test_idle_power_may_be_unknown(folder, tmp_path):
    write(folder, idle_w=np.nan, above_idle_per_token_mj=np.nan, idle_source="unavailable: too short")
    result = experiments.run("energy_per_token")
    assert "idle power is unavailable: too short" in figures.caption(result)
    assert "whole GPU (recorded)" in words(result, tmp_path)
