import itertools

import numpy as np
import pytest
import torch

from wqlab import bench, records
from wqlab.bench import width_order
from wqlab.bench.decode_caches import split_tokens
from wqlab.bench.width_order import ARRANGEMENTS, PLANS, QUICK, REORDERED, RUNS, SHAPES, TABLE, Point, WidthOrderBench, order_of
from wqlab.errors import MissingPartError
from wqlab.profile import counters, environment


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "cache"))


def test_a_quick_record_has_every_arrangement_of_every_plan(tmp_path):
    bench.run("width_order", tmp_path, quick=True)
    data = records.read("width_order", environment.gpu_key(), tmp_path).data
    assert list(data.columns) == list(WidthOrderBench.columns)
    assert list(data["arrangement"]) == [*ARRANGEMENTS] * len(PLANS)
    assert data["note"].isna().all()
    assert (data["rel_error"] < 1e-3).all()
    assert (data["windows"] == QUICK[0].seq_len // 32).all()
    np.testing.assert_allclose(data["ratio"] * data["reordered_us"], data["latency_us"])
    assert (data.loc[data["arrangement"] == REORDERED, "ratio"] == 1).all()
    runs = data[data["arrangement"] == RUNS]
    assert (runs["launches"] == runs["runs"]).all()
    assert (data.loc[data["arrangement"] == TABLE, "launches"] == 1).all()
    assert data["counters"].str.startswith("unavailable").all()


@pytest.mark.parametrize("shape", [*SHAPES, *QUICK])
def test_plans_differ_in_order_only(shape):
    orders = {plan: order_of(Point(shape, plan)) for plan in PLANS}
    for order in orders.values():
        assert tuple(32 * order.count(bits) for bits in (16, 4, 2)) == tuple(split_tokens(shape.seq_len, "10/30/60"))
    assert orders["independent"] == order_of(Point(shape, "independent"))
    runs = {plan: len(list(itertools.groupby(order))) for plan, order in orders.items()}
    assert runs["clustered"] < runs["independent"]


def test_runs_of_the_long_video_are_about_eight_windows_and_about_two():
    lengths = {plan: [len(list(run)) for _, run in itertools.groupby(order_of(Point(SHAPES[0], plan)))] for plan in PLANS}
    assert np.mean(lengths["clustered"]) == pytest.approx(8, rel=0.2)
    assert np.mean(lengths["independent"]) == pytest.approx(1 / (1 - 0.1**2 - 0.3**2 - 0.6**2), rel=0.1)


def test_counts_of_several_launches_are_added_up(monkeypatch):
    def loads(requests):
        return {
            "kernel_index": 0.0, "requests": 1.0, "sectors": 4.0, "copy_requests": requests, "copy_sectors": 16 * requests,
            "dram_bytes": 512 * requests,
        }  # fmt: skip

    monkeypatch.setattr(counters, "global_loads", lambda command, kernels: [loads(n) for n in (99.0, 99, 99, 30, 40)])
    found = width_order.counters(Point(QUICK[0], "clustered"))
    assert [row["counted_launches"] for row in found] == [1, 1, 1, 2]
    assert found[3]["copy_requests"] == 70
    assert found[0]["sectors_per_request"] == pytest.approx((4 + 16 * 99) / 100)
    monkeypatch.setattr(counters, "global_loads", lambda command, kernels: [loads(1.0)] * 3)
    assert "3 launches of 4" in width_order.counters(Point(QUICK[0], "clustered"))[0]["counters"]

    def missing(command, kernels):
        raise MissingPartError("ncu is not installed")

    monkeypatch.setattr(counters, "global_loads", missing)
    assert width_order.counters(Point(QUICK[0], "clustered")) == [{"counters": "unavailable: ncu is not installed"}] * 4


def test_an_arrangement_that_is_wrong_has_no_time(monkeypatch):
    monkeypatch.setattr(width_order, "PLANS", ("clustered",))
    monkeypatch.setattr(width_order._Case, "_reference_in_order", lambda self, kv: torch.full_like(self.query, torch.nan))
    data = WidthOrderBench().measure(quick=True).set_index("arrangement")
    assert data.loc[REORDERED, "latency_us"] > 0
    assert data.loc[[TABLE, RUNS], ["latency_us", "ratio"]].isna().all(axis=None)
    assert data.loc[[TABLE, RUNS], "note"].str.contains("is inf").all()
