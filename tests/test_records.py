import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wqlab import records
from wqlab.errors import OutputError, RecordError, UnknownNameError
from wqlab.profile import environment

COLUMNS = {"layer": "decoder layer", "latency_us": "microseconds"}


@pytest.fixture
def table():
    return pd.DataFrame({"layer": [0, 1, 2], "latency_us": [1.5, 2.25, 1 / 3]})


@pytest.fixture
def written(tmp_path, table):
    records.write("demo", "h200", table, COLUMNS, environment.provenance("wqlab bench demo"), tmp_path)
    return tmp_path


def test_round_trip_with_evidence(written, table):
    record = records.read("demo", "h200", written)
    pd.testing.assert_frame_equal(record.data, table)
    evidence = record.evidence()
    assert evidence.kind == "recorded"
    assert evidence.file == "data/recorded/h200/demo.csv"
    assert evidence.commit == environment.git_commit()
    assert record.input().sha256 == records.sha256_file(record.path)


def test_large_tables_become_parquet(tmp_path):
    large = pd.DataFrame({"layer": np.arange(30_000), "latency_us": np.arange(30_000) / 7})
    path = records.write("demo", "cpu", large, COLUMNS, environment.provenance("x"), tmp_path)
    assert path.suffix == ".parquet"
    pd.testing.assert_frame_equal(records.read("demo", "cpu", tmp_path).data, large)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=20))
def test_any_change_of_the_table_is_noticed(written, extra):
    path = written / "h200" / "demo.csv"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole + extra)
        with pytest.raises(RecordError, match="does not match the sha256"):
            records.read("demo", "h200", written)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("damage", ["sha256", "columns", "hardware", "date"])
def test_a_json_that_lacks_a_field_is_refused(written, damage):
    path = written / "h200" / "demo.json"
    entry = json.loads(path.read_text())
    del entry[damage]
    path.write_text(json.dumps(entry))
    with pytest.raises(RecordError, match=damage):
        records.read("demo", "h200", written)


def test_a_json_that_describes_other_columns_is_refused(written):
    path = written / "h200" / "demo.json"
    entry = json.loads(path.read_text())
    entry["columns"]["extra"] = {"dtype": "int64", "description": "none"}
    path.write_text(json.dumps(entry))
    with pytest.raises(RecordError, match="describes"):
        records.read("demo", "h200", written)


def test_a_half_written_json_is_refused(written):
    path = written / "h200" / "demo.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(RecordError, match="not JSON"):
        records.read("demo", "h200", written)


def test_unknown_gpu_and_record(written):
    with pytest.raises(UnknownNameError, match="did you mean h200"):
        records.read("demo", "h20", written)
    with pytest.raises(UnknownNameError, match="known: demo"):
        records.read("demos", "h200", written)


def test_refuses_what_it_cannot_describe(tmp_path, table):
    with pytest.raises(RecordError, match="not those described"):
        records.write("demo", "cpu", table, {"layer": "decoder layer"}, environment.provenance("x"), tmp_path)
    with pytest.raises(RecordError, match="empty"):
        records.write("demo", "cpu", table[:0], COLUMNS, environment.provenance("x"), tmp_path)
    assert not list(tmp_path.rglob("*.*"))


def test_a_failed_write_keeps_the_old_record(written, table, monkeypatch):
    before = (written / "h200" / "demo.csv").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(OutputError, match="No space left"):
        records.write("demo", "h200", table * 2, COLUMNS, environment.provenance("x"), written)
    assert (written / "h200" / "demo.csv").read_bytes() == before
    assert not [p for p in (written / "h200").iterdir() if ".tmp" in p.name]


def test_committed_records_are_whole():
    found = [(p.parent.name, p.stem) for p in records.root().glob("*/*.json")]
    assert ("cpu", "layer_importance") in found
    for gpu, name in found:
        assert not records.read(name, gpu).data.empty


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3), np.bool_(True), np.array(2.0)])
def test_json_takes_numpy_scalars(value):
    assert json.loads(records.dump_json({"v": value}))["v"] == value.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan")])
def test_json_is_strict(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.dump_json({"v": value})
