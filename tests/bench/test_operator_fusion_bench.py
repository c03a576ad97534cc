import numpy as np
import pandas as pd
import pytest
import torch

from wqlab import bench, records
from wqlab.bench import operator_fusion
from wqlab.bench.decode_caches import Shape, cache_bytes, random_cache
from wqlab.bench.operator_fusion import ARRANGEMENTS, FUSED, IN_PLACE, MATMUL, MIXES, PLAIN, SDPA, OperatorFusionBench
from wqlab.errors import MissingPartError, ParameterError
from wqlab.ops.mixed_decode import reference
from wqlab.profile import environment


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_quick_record_has_every_arrangement_of_every_mix(tmp_path, cache_folder):
    bench.run("operator_fusion", tmp_path, quick=True)
    key = environment.gpu_key()
    data = records.read("operator_fusion", key, tmp_path).data
    assert list(data.columns) == list(OperatorFusionBench.columns)
    found = data.groupby("mix", sort=False)["arrangement"].agg(list)
    assert list(found.index) == list(MIXES)
    assert found["10/30/60"] == list(ARRANGEMENTS)
    assert found["int4"] == [name for name in ARRANGEMENTS if name != IN_PLACE]
    assert data["note"].isna().all()
    assert (data["rel_error"] < 3e-3).all()
    assert (data["p10_us"] <= data["p90_us"]).all()
    np.testing.assert_allclose(data["ratio"] * data["fused_us"], data["latency_us"])
    assert (data.loc[data["arrangement"] == FUSED, "ratio"] == 1).all()
    unfused = data["arrangement"].isin([SDPA, IN_PLACE, MATMUL])
    assert data.loc[unfused, ["decode_us", "attention_us", "decoded_bytes"]].notna().all(axis=None)
    assert data.loc[~unfused, ["decode_us", "attention_us", "decoded_bytes"]].isna().all(axis=None)
    pd.testing.assert_frame_equal(records.read("operator_fusion", key, cache_folder / "bench").data, data)


@pytest.fixture
def one_mix(cache_folder, monkeypatch):
    monkeypatch.setattr(operator_fusion, "MIXES", ("10/30/60",))


def test_bytes_are_those_that_have_to_move(one_mix):
    data = OperatorFusionBench().measure(quick=True)
    shape = operator_fusion.QUICK[0]
    mixed = data[data["mix"] == "10/30/60"].set_index("arrangement")["bytes"]
    size = cache_bytes(shape, "10/30/60")
    assert mixed[FUSED] == size.total
    assert mixed[SDPA] == size.total + 2 * shape.fp16_bytes
    assert mixed[SDPA] - mixed[IN_PLACE] == 2 * size.dense
    assert mixed[MATMUL] - mixed[SDPA] == 8 * shape.batch * shape.num_heads * shape.seq_len
    assert pd.isna(mixed[PLAIN])


def test_an_arrangement_that_fails_or_is_wrong_leaves_the_others(one_mix, monkeypatch):
    monkeypatch.setattr(operator_fusion, "_BACKENDS", ())
    monkeypatch.setattr(operator_fusion, "decode_by_operators", lambda cache, key, value: key.fill_(torch.nan))
    data = OperatorFusionBench().measure(quick=True).set_index("arrangement")
    assert data.loc[[SDPA], "note"].str.contains("no SDPA backend").all()
    assert data.loc[[PLAIN], "note"].str.contains("relative error is inf").all()
    assert data.loc[[SDPA, PLAIN], "latency_us"].isna().all()
    assert data.loc[[FUSED, MATMUL], "latency_us"].notna().all()
    monkeypatch.setattr(operator_fusion._Case, "__init__", lambda *_: (_ for _ in ()).throw(ParameterError("on purpose")))
    data = OperatorFusionBench().measure(quick=True)
    assert list(data["note"]) == ["ParameterError: on purpose"]


def test_limits_of_a_run(cache_folder, monkeypatch, caplog):
    monkeypatch.setenv("WQLAB_BENCH_SECONDS", "0")
    assert set(OperatorFusionBench().measure(quick=True)["mix"]) == {"10/30/60"}
    assert "not measured: (1, 4, 2, 320, 64) int4" in caplog.text
    monkeypatch.setenv("WQLAB_BENCH_SECONDS", "soon")
    with pytest.raises(ParameterError, match="soon"):
        OperatorFusionBench().measure(quick=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPartError, match="--quick"):
        OperatorFusionBench().measure()


def test_operators_decode_to_what_the_reference_does():
    """But for the rounding of the product, which operators in half precision add."""
    cache = random_cache(Shape(2, 2, 2, 320, 64), "10/30/60", torch.Generator().manual_seed(0), fragments=False)
    key, value = (torch.full((2, 2, 320, 64), torch.nan, dtype=torch.float16) for _ in range(2))
    operator_fusion.decode_by_operators(cache, key, value)
    for name, got in (("key", key), ("value", value)):
        sides = [getattr(segment, name) for segment in cache.segments]
        want = torch.cat([x if isinstance(x, torch.Tensor) else reference.dequantize(x, torch.float16) for x in sides], dim=2)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=3e-3)
