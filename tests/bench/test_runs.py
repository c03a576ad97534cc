"""Runs of one bench side by side."""

import pandas as pd
import pytest

from wqlab import records
from wqlab.bench import runs
from wqlab.errors import ParameterError


def table(latency, mix="int4"):
    return pd.DataFrame(
        {
            "batch": 8, "num_heads": 28, "num_kv_heads": 4, "seq_len": 25600, "head_dim": 128, "mix": [mix], "latency_us": latency,
            "baseline": "torch cudnn", "baseline_us": 100.0, "ratio": 100.0 / latency, "floor_us": 30.0,
            "fraction_of_floor": 30.0 / latency,
        }
    )  # fmt: skip


def test_the_spread_is_of_all_runs():
    data = runs.side_by_side([("2026-02-02", "b", table(40.0)), ("2026-01-01", "a", table(50.0)), ("2026-03-03", "c", table(45.0))])
    assert data["commit"].tolist() == ["a", "b", "c"]
    assert data["run"].tolist() == [1, 2, 3]
    assert data["spread"].tolist() == pytest.approx([0.25] * 3)
    assert data["ratio_spread"].tolist() == pytest.approx([0.25] * 3)
    assert list(data.columns) == list(runs.COLUMNS)


def test_runs_that_cannot_be_compared():
    with pytest.raises(ParameterError, match="1 run has no spread"):
        runs.side_by_side([("2026-01-01", "a", table(40.0))])
    with pytest.raises(ParameterError, match="different ones"):
        runs.side_by_side([("2026-01-01", "a", table(40.0))] * 2)
    with pytest.raises(ParameterError, match="same shapes"):
        runs.side_by_side([("2026-01-01", "a", table(40.0)), ("2026-01-02", "a", table(40.0, "int2"))])


def test_the_recorded_runs_end_with_the_record():
    """The spread is told of the very numbers that `bench show mixed_decode` prints."""
    record, seen = records.read("mixed_decode", "h200"), records.read("mixed_decode_runs", "h200").data
    last = seen[seen["run"] == seen["run"].max()].reset_index(drop=True)
    assert seen["run"].nunique() >= 2
    assert set(last["commit"]) == {record.provenance["git_commit"]}
    assert last["latency_us"].tolist() == record.data["latency_us"].tolist()
