import sys

import numpy as np
import pytest
import torch

from wqlab import bench, records, registry
from wqlab.bench import house
from wqlab.bench.layer_importance import measure
from wqlab.errors import MissingPartError, OutputError, UnknownNameError
from wqlab.profile import environment


@pytest.mark.parametrize("name", registry.names("bench"))
def test_every_bench_describes_itself(name):
    found = bench.get(name)
    assert found.name == name
    assert found.description
    assert all(found.columns.values())


def test_a_quick_run_writes_a_record_that_reads_back(tmp_path):
    path = bench.run("window_similarity", tmp_path, quick=True)
    record = records.read("window_similarity", environment.gpu_key(), tmp_path)
    assert record.path == path
    assert record.provenance["command"] == "wqlab bench window_similarity --quick"
    assert record.data["similarity"].between(-1, 1).all()


def test_the_committed_similarities_are_eq8_of_the_real_embeddings():
    """The twin: the pairwise definition on the first windows of the prose."""
    from wqlab.bench.window_similarity import QUESTIONS
    from wqlab.models import load, prose

    record = records.read("window_similarity", "cpu").data
    loaded = load("smollm2")
    embed = loaded.model.get_input_embeddings().weight.detach().double()
    ids, _ = prose(loaded.tokenizer, 96)
    for number in (0, len(QUESTIONS) - 1):
        text = embed[loaded.tokenizer(QUESTIONS[number], add_special_tokens=False).input_ids]
        cosine = torch.nn.functional.cosine_similarity(text[:, None], embed[ids[0]][None], dim=-1)
        want = cosine.reshape(len(text), 3, 32).mean(dim=(0, 2))
        got = record[(record["question"] == number) & (record["window"] < 3)].sort_values("window")["similarity"]
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_calibration_is_one_number_per_layer():
    found = measure("smollm2", 64)
    assert len(found.after_residual) == len(found.attention_output) == 30
    assert all(-1 <= s <= 1 for s in found.after_residual)


def test_unknown_benches_and_bad_folders_measure_nothing(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="did you mean house"):
        bench.run("hous", tmp_path)
    monkeypatch.setattr(house.HouseBench, "measure", lambda self, quick=False: pytest.fail("it measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        bench.run("house", tmp_path / "file")


def test_timed_sees_the_time_the_memory_of_children_and_the_output():
    child = "x = bytearray(200_000_000); import time; time.sleep(0.5); print('done')"
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    seconds, peak_gb, output = house.timed([sys.executable, "-c", code])
    assert seconds > 0.5
    assert 0.2 < peak_gb < 1
    assert output == "done\n"


def test_what_fails_has_no_time():
    with pytest.raises(MissingPartError, match="exit code 3: on purpose"):
        house.timed([sys.executable, "-c", "print('on purpose'); raise SystemExit(3)"])


def test_memory_that_was_not_sampled_is_missing_and_not_zero(monkeypatch):
    monkeypatch.setattr(house, "timed", lambda command: (1.5, 0.5, "0.25\n0.5\n"))
    table = house.HouseBench().measure(quick=True)
    assert list(table.columns) == list(house.HouseBench.columns)
    sampled = table["case"].str.startswith("make")
    assert (table.loc[sampled, "peak_memory_gb"] == 0.5).all()
    assert table.loc[~sampled, "peak_memory_gb"].isna().all()
