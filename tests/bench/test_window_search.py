import torch

from wqlab import bench, records
from wqlab.bench.window_search import WindowSearchBench, latencies_us, pairwise_blas
from wqlab.profile import environment
from wqlab.windows.similarity import cosine


def test_both_forms_compute_the_same():
    text, windows = torch.randn(1, 5, 16, dtype=torch.float64), torch.randn(1, 7, 4, 16, dtype=torch.float64)
    torch.testing.assert_close(pairwise_blas(text, windows), cosine(text, windows), rtol=1e-12, atol=1e-14)


def test_the_cases_take_turns_and_the_first_rounds_do_not_count():
    calls = []
    times = latencies_us({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, lambda: calls.append("wait"))
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}
    assert calls == ["wait", "a", "wait", "wait", "b", "wait"] * 5


def test_a_quick_record_has_every_case(tmp_path):
    bench.run("window_search", tmp_path, quick=True)
    data = records.read("window_search", environment.gpu_key(), tmp_path).data
    assert list(data.columns) == list(WindowSearchBench.columns)
    assert len(data) == data[["device", "dtype", "case"]].drop_duplicates().shape[0]
    assert (data["p10_us"] <= data["median_us"]).all()
    assert data.loc[data["case"].str.contains("plan"), "num_layers"].eq(30).all()
    assert data.loc[data["device"] == "cpu", "waits_for_device"].isna().all()
