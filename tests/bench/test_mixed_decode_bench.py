import math

import numpy as np
import pandas as pd
import pytest
import torch

from wqlab import bench, paths, records
from wqlab.bench import attention_baselines, mixed_decode
from wqlab.bench.decode_caches import MIXES, Shape, cache_bytes, random_cache, relative_error, split_tokens
from wqlab.bench.mixed_decode import SHAPES, MixedDecodeBench, summary, with_floor
from wqlab.errors import MissingPartError, ParameterError
from wqlab.ops.mixed_decode import mixed_decode as attend
from wqlab.profile import environment, timing

SMALL = Shape(2, 4, 2, 320, 64)


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_quick_record_has_a_row_per_mix(tmp_path, cache_folder):
    bench.run("mixed_decode", tmp_path, quick=True)
    key = environment.gpu_key()
    data = records.read("mixed_decode", key, tmp_path).data
    assert list(data.columns) == list(MixedDecodeBench.columns)
    assert list(data["mix"]) == list(MIXES)
    assert (data["latency_us"] > 0).all()
    assert (data["p10_us"] <= data["p90_us"]).all()
    assert (data["rel_error"] < 1e-3).all()
    assert data["note"].isna().all()
    np.testing.assert_allclose(data["ratio"] * data["latency_us"], data["baseline_us"])
    np.testing.assert_allclose(data["fraction_of_floor"] * data["latency_us"], data["floor_us"])
    np.testing.assert_allclose(data["floor_us"] * data["read_bandwidth_tb_s"] * 1e6, data["bytes"])
    assert data["baseline"].isin(attention_baselines.FP16).all()
    lacking = data[[f"{name.replace(' ', '_')}_us" for name in attention_baselines.NAMES]].isna().any(axis=1)
    assert (lacking == data["unavailable"].notna()).all()
    assert data["provenance"].str.contains("commit").all()
    # What was measured before the run ended lies in the cache folder, as a whole record.
    assert paths.cache_dir() == cache_folder
    pd.testing.assert_frame_equal(records.read("mixed_decode", key, cache_folder / "bench").data, data)


def test_without_a_gpu_only_a_quick_run_is_made(cache_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPartError, match="--quick"):
        MixedDecodeBench().measure()


def test_shapes_are_left_out_when_the_time_is_used_up(cache_folder, monkeypatch, caplog):
    monkeypatch.setattr(mixed_decode, "QUICK", (SMALL, SMALL._replace(batch=1)))
    monkeypatch.setenv("WQLAB_BENCH_SECONDS", "0")
    data = MixedDecodeBench().measure(quick=True)
    assert set(data["batch"]) == {2}
    assert "not measured: (1, 4, 2, 320, 64)" in caplog.text
    assert data["unavailable"].str.contains("time was used up").all()
    assert (data["baseline"] == "").all()
    monkeypatch.setenv("WQLAB_BENCH_SECONDS", "soon")
    with pytest.raises(ParameterError, match="soon"):
        MixedDecodeBench().measure(quick=True)


def test_a_mix_that_fails_leaves_the_others(cache_folder, monkeypatch):
    def fail(self, repeats):
        raise ParameterError("on purpose")

    monkeypatch.setattr(mixed_decode._Case, "times", fail)
    data = MixedDecodeBench().measure(quick=True)
    assert len(data) == len(MIXES)
    assert (data["note"] == "on purpose").all()
    assert data[["latency_us", "ratio", "num_splits"]].isna().all(axis=None)


def test_a_wrong_result_has_no_time(cache_folder, monkeypatch):
    errors = iter([0.02, math.inf, 1e-4, 1e-4])
    monkeypatch.setattr(mixed_decode, "relative_error", lambda *_: next(errors))
    data = MixedDecodeBench().measure(quick=True)
    assert data["latency_us"].isna().tolist() == data["ratio"].isna().tolist() == [True, True, False, False]
    assert "rel_error is above 0.01" in data["note"][0]
    assert "not finite" in data["note"][1]


@pytest.mark.parametrize("fragments", [True, False])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", [SMALL, Shape(1, 6, 2, 96, 128)])
def test_bytes_are_those_of_the_tensors(shape, mix, fragments):
    cache = random_cache(shape, mix, torch.Generator().manual_seed(0), fragments)
    assert sum(x.numel() * x.element_size() for x in cache.tensors()) == cache_bytes(shape, mix).total
    assert sum(s.tokens for s in cache.all()) == shape.seq_len
    query = torch.randn(shape.batch, shape.num_heads, 1, shape.head_dim).half()
    output = attend(query, cache, backend="reference")
    assert relative_error(output, query, cache) < 1e-3
    output[-1, -1, 0, 3] += 1
    assert relative_error(output, query, cache) > 1e-2
    output[0, -1, 0, 0] = math.nan
    assert relative_error(output, query, cache) == math.inf


def test_bits_per_element_are_16_5_and_3():
    shape = SHAPES[0]
    bits = {mix: 8 * cache_bytes(shape, mix).total / (2 * shape.elements) for mix in MIXES}
    assert bits == pytest.approx({"fp16": 16, "int4": 5, "int2": 3, "10/30/60": 0.1 * 16 + 0.3 * 5 + 0.6 * 3})
    assert cache_bytes(shape, "int4").total / 4.45e6 == pytest.approx(29.5, abs=0.05)  # us at 4.45 TB/s
    assert cache_bytes(shape, "int4").metadata * 4 == cache_bytes(shape, "int4").codes


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_holds_whole_windows_of_every_width(shape):
    for mix, shares in MIXES.items():
        tokens = split_tokens(shape.seq_len, mix)
        assert sum(tokens) == shape.seq_len
        assert all(n % 32 == 0 and abs(n - share * shape.seq_len) <= 32 for n, share in zip(tokens, shares, strict=True))


def test_what_is_no_mix_or_length_is_said():
    with pytest.raises(ParameterError, match="whole windows of 32"):
        split_tokens(100, "int4")
    with pytest.raises(ParameterError, match="10/30/60"):
        split_tokens(64, "int8")


def table(**columns):
    rows = {
        "mix": ["a", "a", "b"],
        "bytes": [4e9, 2e9, 1e9],
        "bytes_fp16": [1e8, 6.4e7, 6.3e7],
        "latency_us": [2000.0, 1000.0, 10.0],
    }
    times = {f"{name.replace(' ', '_')}_us": [math.nan] * 3 for name in attention_baselines.NAMES}
    return pd.DataFrame({**rows, **times, **columns})


def test_the_floor_and_the_fastest_baseline():
    found = with_floor(
        table(torch_flash_us=[5000, math.nan, math.nan], torch_cudnn_us=[4000, 9000, math.nan], flashinfer_fp8_us=[1.0, 1.0, 1.0]),
        4e12,
    )
    assert list(found["floor_us"]) == [1000, 500, 250]
    assert list(found["fraction_of_floor"][:2]) == [0.5, 0.5]
    assert list(found["baseline"]) == ["torch cudnn", "torch cudnn", ""]
    assert list(found["ratio"][:2]) == [2, 9]
    assert math.isnan(found["ratio"][2])


def test_the_summary_is_the_geometric_mean_over_large_caches():
    found = summary(with_floor(table(torch_flash_us=[4000, 8000, 10]), 4e12))
    assert list(found["mix"]) == ["a"]  # 63 MB are too few
    assert list(found["shapes"]) == [2]
    assert found["ratio"][0] == pytest.approx(4)
    assert found["fraction_of_floor"][0] == pytest.approx(0.5)


def test_the_headlines_are_the_first_shape_and_the_means():
    shape = dict(zip(SHAPES[0]._fields, SHAPES[0], strict=True))
    found = MixedDecodeBench().headlines(with_floor(table(torch_flash_us=[4000, 8000, 10], **shape), 4e12))
    by_name = {h.metric: h for h in found}
    assert by_name["b at (8, 28, 4, 25600, 128)"][1:4] == (10, 10, "us")
    assert by_name["a, mean over 2 large shapes, times as fast as FP16"].ours == pytest.approx(4)
    assert by_name["a, mean over 2 large shapes, of the floor"].ours == pytest.approx(0.5)


def test_copies_fill_four_times_the_cache(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 60 << 20)
    assert timing.rotation(60 << 20, device) == 4
    assert timing.rotation((60 << 20) + 1, device) == 4
    assert timing.rotation((80 << 20) - 1, device) == 4
    assert timing.rotation(1 << 40, device) == 2


def test_launches_take_turns_and_the_first_rounds_do_not_count():
    calls = []
    found = timing.launch_times([lambda: calls.append("a"), lambda: calls.append("b")], torch.device("cpu"), repeats=4, warmup=2)
    assert calls == ["a", "b"] * 6
    assert (found.repeats, found.launches) == (4, 2)
    assert 0 < found.p10_us <= found.median_us <= found.p90_us
    with pytest.raises(ParameterError, match="at least one"):
        timing.launch_times([], torch.device("cpu"))


def test_a_library_that_computes_something_else_has_no_time(monkeypatch):
    real = attention_baselines.error_at_ends
    monkeypatch.setattr(attention_baselines, "error_at_ends", lambda output, *rest: real(output * 1.1, *rest))
    found = attention_baselines.measure(SMALL, torch.device("cpu"), 1)
    assert list(found) == list(attention_baselines.NAMES)
    assert found["torch flash"].timing is None
    assert "relative error 0.1" in found["torch flash"].reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_graph_of_a_known_work_takes_its_time():
    device = torch.device("cuda")
    rate = timing.read_bandwidth(device, 1 << 30, repeats=10)
    data = [torch.rand(1 << 26, device=device) for _ in range(2)]
    found = timing.launch_times([x.sum for x in data], device, repeats=10)
    assert found.launches == 24
    assert data[0].numel() * 4 / found.median_us * 1e6 == pytest.approx(rate, rel=0.2)
