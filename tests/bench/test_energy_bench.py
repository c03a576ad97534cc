import types

import numpy as np
import pytest
import torch

from wqlab import bench
from wqlab.bench import energy
from wqlab.bench.decode_caches import MIXES
from wqlab.bench.energy import EnergyBench
from wqlab.errors import MissingPartError
from wqlab.profile import power
from wqlab.profile.power import Energy


def test_without_a_gpu_only_a_quick_run_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPartError, match="--quick"):
        EnergyBench().measure()


def test_a_quick_run_on_a_cpu_has_no_energy_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = EnergyBench().measure(quick=True)
    assert list(data.columns) == list(EnergyBench.columns)
    assert list(data["mix"]) == list(MIXES)
    assert (data["latency_us"] > 0).all()
    assert (data["rel_error"] < 1e-2).all()
    assert data[["power_w", "idle_w", "energy_per_call_mj", "energy_per_token_mj", "above_idle_per_token_mj"]].isna().all(axis=None)
    assert data["source"].str.startswith("unavailable: ").all()
    assert EnergyBench().headlines(data) == []


def test_energy_is_power_times_time(monkeypatch):
    """Of a made-up GPU that takes 100 W idle and 300 W at work."""

    def measured(work, device):
        result = work()
        watts = 300.0 if isinstance(result, int) else 100.0
        return result, Energy(2.0, 2.0 * watts, watts, watts, 1980.0, 20, "NVML energy counter")

    monkeypatch.setattr(power, "measured", measured)
    data = EnergyBench().measure(quick=True)
    np.testing.assert_allclose(data["latency_us"] * data["calls"].astype(float), 2e6)
    np.testing.assert_allclose(data["energy_per_call_mj"] * data["calls"].astype(float), 600e3)
    np.testing.assert_allclose(data["energy_per_token_mj"] * data["batch"], data["energy_per_call_mj"])
    np.testing.assert_allclose(data["above_idle_per_token_mj"] / data["energy_per_token_mj"], 2 / 3)
    assert [line.unit for line in EnergyBench().headlines(data)] == ["mJ"] * len(MIXES)


def test_a_mix_that_fails_leaves_the_others(monkeypatch, tmp_path):
    launches = energy._launches

    def failing(shape, mix, device):
        if mix == "int4":
            raise RuntimeError("out of\nmemory")
        found, error = launches(shape, mix, device)
        return found, 1.0 if mix == "int2" else error

    monkeypatch.setattr(energy, "_launches", failing)
    bench.run("energy", tmp_path, quick=True)
    data = EnergyBench().measure(quick=True).set_index("mix")
    assert data.loc["int4", "note"] == "RuntimeError: out of memory"
    assert "relative error is 1, above 0.01" in data.loc["int2", "note"]
    assert data["latency_us"].isna().to_dict() == {"fp16": False, "int4": True, "int2": True, "10/30/60": False}


def test_calls_are_counted_and_waited_for(monkeypatch):
    runs = []
    load = energy._Load(lambda: runs.append(1), 24, 0.0, 2)
    monkeypatch.setattr(energy, "time", types.SimpleNamespace(perf_counter=iter(np.arange(1000.0) / 1e3).__next__))
    assert energy._run(load, torch.device("cpu"), 0.05) == 24 * len(runs) > 24
