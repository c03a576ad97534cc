import numpy as np
import pytest
import torch

from wqlab import bench, records
from wqlab.bench.window_search import WindowSearchBench, latencies_us, pairwise_blas, token_order, token_plan, token_scores
from wqlab.profile import environment
from wqlab.windows.search import search
from wqlab.windows.similarity import cosine
from wqlab.windows.thresholds import thresholds


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_per_token_is_the_search_with_windows_of_one_token(dtype):
    torch.manual_seed(0)
    text, visual = torch.randn(5, 16, dtype=dtype), torch.randn(70, 16, dtype=dtype)
    importance = [0.3, 0.6, 0.9]
    plan = search(text, visual, importance, normalize="minmax", window_size=1, first_window_full=False, dtype=dtype)
    limits = torch.from_numpy(np.stack(thresholds(importance, 2.0)))[..., None].to(dtype)
    scores = token_scores(text, visual, "mean")
    widths = torch.tensor([2, 4, 16])[token_plan(scores, limits).long()]
    assert (widths != torch.as_tensor(plan.bit_widths)).float().mean() < 0.02  # a score may round to the other side of a limit
    order, begins = token_order(scores, limits)
    for layer in range(3):
        first, second = begins[:, layer].tolist()
        assert (widths[layer, order[:first]] == 2).all()
        assert (widths[layer, order[first:second]] == 4).all()
        assert (widths[layer, order[second:]] == 16).all()


def test_the_nearest_token_of_the_prompt():
    text, visual = torch.randn(5, 16), torch.randn(7, 16)
    want = torch.nn.functional.cosine_similarity(visual[:, None], text[None], dim=-1).amax(1)
    torch.testing.assert_close(token_scores(text, visual, "max"), want)


def test_the_headlines_compare_per_window_with_per_token():
    data = WindowSearchBench().measure(quick=True)
    data = data[data["device"] == "cpu"]
    found = {h.metric: h for h in WindowSearchBench().headlines(data)}
    per_token = found["search and plan for 6,400 tokens on cpu, launched one by one, against per token"]
    tokens = data[data["case"].str.startswith("token_")]["median_us"]
    assert per_token.theirs == tokens.min() / 1e3
    assert len(found) == 2  # no graph without a GPU
