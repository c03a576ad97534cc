import math

import pytest
import torch

from wqlab import bench, records
from wqlab.bench import decode_cases, mixed_decode_errors
from wqlab.bench.decode_cases import ALIKE, build, draw, draw_alike, poisoned, relative_error
from wqlab.bench.mixed_decode_errors import MixedDecodeErrorsBench
from wqlab.errors import LimitError, MissingPartError
from wqlab.ops.mixed_decode import cuda_kernel, mixed_decode
from wqlab.profile import environment

CPU = torch.device("cpu")


def test_the_cases_reach_every_kind():
    cases = [draw(seed) for seed in range(2000)]
    assert {c.window_size for c in cases} == set(range(32, 257, 32))
    assert {c.q_len for c in cases} >= {1, 2, 64}
    assert {c.group for c in cases} >= {1, 5, 7, 16}
    assert {c.dense_as for c in cases} == {"tail", "segment", ""}
    assert max(c.offset for c in cases) == 300
    assert all(c.int4_tokens % c.window_size == c.int2_tokens % c.window_size == 0 for c in cases)
    assert all(c.int4_tokens + c.int2_tokens + c.dense_tokens > 0 and c.dense_tokens >= c.q_len * (c.q_len > 1) for c in cases)
    assert sum((0, 0, 0) in c.lengths for c in cases) > 100  # no token in a row of the batch
    assert sum(any(four == 0 < c.int4_tokens for four, _, _ in c.lengths) for c in cases) > 100
    assert sum(not c.int4_tokens for c in cases) > 100
    assert sum(not c.int2_tokens for c in cases) > 100


@pytest.mark.parametrize("seed", range(40))
def test_the_truth_is_what_the_reference_comes_to(seed):
    """Two programs: rows cut out of codes in float64 here, one masked tensor of the packed cache there."""
    case = draw(seed, 256)
    built = build(case, CPU)
    assert cuda_kernel.refusal(built.query, built.cache) is None
    output = mixed_decode(built.query, built.cache, backend="reference")
    assert relative_error(output, built.truth_rounded) < 1e-3
    # Decoding to halfs moves keys far from zero by up to an eighth, and that is all by which the two truths differ.
    assert relative_error(built.truth_rounded, built.truth) < (0.03 if case.offset else 1e-3)
    assert all(bool((output[row] == 0).all()) for row, held in enumerate(case.rows) if held == (0, 0, 0))


@pytest.mark.parametrize("kind", range(len(ALIKE)))
def test_cases_that_are_alike_differ_only_in_what_no_kernel_is_compiled_for(kind):
    for seed in range(30):
        case = draw_alike(seed, kind, 512)
        tile = -(-case.group * case.q_len // 16)
        assert (tile == 1) if not ALIKE[kind].get("long") else (33 <= case.group * case.q_len <= 64)
        assert case.dense_tokens % 16 == 0
        assert {name: getattr(case, name) for name in ALIKE[kind] if name not in ("widths", "long")} == {
            name: value for name, value in ALIKE[kind].items() if name not in ("widths", "long")
        }
        if seed < 3:
            built = build(case, CPU)
            output = mixed_decode(built.query, built.cache, backend="reference")
            assert relative_error(output, built.truth_rounded) < 1e-2


def test_what_is_allocated_in_the_block_holds_nan():
    with poisoned():
        assert bool(torch.empty(7, dtype=torch.float16).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_not_finite_or_not_zero_is_infinitely_wrong():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert relative_error(truth, truth) == 0
    assert relative_error(truth + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), truth) == pytest.approx(0.2)
    for bad in (math.nan, 1e-7):
        output = truth.clone()
        output[1, 0] = bad
        assert relative_error(output, truth) == math.inf
    assert relative_error(truth[1], truth[1]) == 0


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environment.hardware.cache_clear()
    yield
    environment.hardware.cache_clear()


def test_a_quick_run_without_a_gpu_says_what_it_ran(tmp_path, without_gpu):
    bench.run("mixed_decode_errors", tmp_path, quick=True)
    data = records.read("mixed_decode_errors", "cpu", tmp_path).data
    assert len(data) == mixed_decode_errors.QUICK_CASES * 5 // 4
    assert (data["backend"] == "reference").all()
    assert data["note"].str.contains("not a kernel").all()
    assert data["bit_identical"].all()
    with pytest.raises(MissingPartError, match="--quick"):
        MixedDecodeErrorsBench().measure()


def test_a_broken_limit_is_recorded_and_named_by_its_seeds(tmp_path, without_gpu, monkeypatch):
    def wrong(built, backend):
        output = built.truth.half()
        return [output, output * (1.01 if built.query.shape[2] == 1 else 1)]

    monkeypatch.setattr(mixed_decode_errors, "_outputs", wrong)
    with pytest.raises(LimitError, match=r"do not repeat.*seeds \d+"):
        bench.run("mixed_decode_errors", tmp_path, quick=True)
    data = records.read("mixed_decode_errors", "cpu", tmp_path).data
    assert not data["bit_identical"].all()


def test_cases_that_cannot_run_end_the_bench_early(without_gpu, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decode_cases, "build", fail)
    data = MixedDecodeErrorsBench().measure(quick=True)
    assert len(data) == 10
    assert "further cases were not tried" in data["note"].iloc[-1]
    with pytest.raises(LimitError, match="illegal memory access"):
        MixedDecodeErrorsBench().check(data)
