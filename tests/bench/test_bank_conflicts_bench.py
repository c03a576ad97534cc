"""The kernels' single load, the cases, and what the bench does with counts, wrong results and a GPU that is not there."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from wqlab import bench, codegen, records
from wqlab.bench import bank_conflicts
from wqlab.bench.bank_conflicts import BankConflictsBench, cases, expected, indices
from wqlab.errors import LimitError, MissingPartError
from wqlab.profile import counters, environment
from wqlab.simulate.gpus import gpu


@pytest.fixture(scope="module")
def sass(tmp_path_factory):
    """Machine code of each kernel on sm_90."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("no cuobjdump")
    cubin = tmp_path_factory.mktemp("sass") / "kernels.cubin"
    cubin.write_bytes(codegen.compile_cubin(codegen.render("bank_conflicts"), arch="sm_90").cubin)
    text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"Function : (\w+)", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("width", "wanted"), [(4, "LDS"), (8, "LDS.64"), (16, "LDS.128")])
def test_a_kernel_has_one_load_from_shared_memory_of_its_width(sass, width, wanted):
    loads = re.findall(r"\b(LDS[.\w]*|LDSM[.\w]*|LD(?:\.\w+)*) R", sass[f"bank_conflicts_{width}"])
    assert [load for load in loads if not load.startswith(("LDG", "LDC"))] == [wanted]


#: Runs a kernel's threads one after the other; twice, because a thread may read what a later one puts into shared memory.
_ON_A_CPU = """
#define __global__
#define __shared__
#define __align__(n)
#define __restrict__
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct { int x; } threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads() {}
alignas(128) unsigned char codebook[1 << 18];
%s
extern "C" void run(const int* indices, const uint4* image, unsigned* sums, const int* n) {
    gridDim.x = 3, blockDim.x = 64;
    for (int twice = 0; twice < 2; ++twice)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                bank_conflicts_%d(indices, image, sums, n[0], n[1], n[2], n[3], n[4], n[5], n[6]);
}
"""


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory):
    """Width of a load -> its kernel's own source, built with g++."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("emulated")

    def build(width):
        (folder / "kernel.cpp").write_text(_ON_A_CPU % (codegen.render("bank_conflicts"), width))
        library = folder / f"kernel_{width}.so"
        subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", folder / "kernel.cpp", "-o", library], check=True)
        return ctypes.CDLL(str(library)).run

    return {width: build(width) for width in (4, 8, 16)}


def test_the_kernels_own_source_reads_where_the_simulator_says(on_a_cpu):
    for case in cases():
        layout, drawn = case.layout, indices(case, 4)
        words = np.random.default_rng(0).integers(0, 2**32, layout.shared_bytes // 4, dtype=np.uint32)
        sums = np.full(drawn.shape, 0xDEADBEEF, dtype=np.uint32)
        numbers = np.array(
            [4, layout.shared_bytes, layout.chunks, layout.stride, layout.swizzle, layout.copies, case.n_reg], dtype=np.int32
        )
        on_a_cpu[layout.access_bytes](*(ctypes.c_void_p(x.ctypes.data) for x in (drawn, words, sums, numbers)))
        assert (sums == expected(case, words, drawn)).all(), case


def test_cases_are_many_different_and_fit_an_h200():
    found = cases()
    assert len(found) == len(set(found)) >= 30
    for case in found:
        case.layout.check(gpu("h200"))
        assert case.layout.shared_bytes % 16 == 0
        drawn = indices(case, 8)
        assert drawn.flags["C_CONTIGUOUS"]
        assert (drawn == indices(case, 8)).all()
    assert {(c.layout.num_entries, c.layout.access_bytes) for c in found} >= {(n, b) for n in (256, 4096) for b in (4, 8, 16)}
    assert {case.layout.scheme for case in found} == {"contiguous", "padded", "swizzled", "replicated"}


def test_what_a_lane_must_read_follows_from_the_addresses():
    case = next(c for c in cases() if c.layout.scheme == "padded" and c.layout.entry_bytes == 16)
    words = np.arange(case.layout.shared_bytes // 4, dtype=np.uint32)
    drawn = indices(case, 2)
    found = expected(case, words, drawn)
    start = drawn.astype(int) * 5  # 4 words and one of padding
    assert (found == start ^ (start + 1) ^ (start + 2) ^ (start + 3)).all()
    held = expected(case._replace(n_reg=int(drawn.max()) + 1), words, drawn)
    assert (held == 0).all()


def test_a_quick_record_without_a_gpu_has_no_counts(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MissingPartError, match="CUDA device"):
        bench.run("bank_conflicts", tmp_path)
    bench.run("bank_conflicts", tmp_path, quick=True)
    data = records.read("bank_conflicts", environment.gpu_key(), tmp_path).data
    assert list(data.columns) == list(BankConflictsBench.columns)
    assert len(data) == len(cases())
    assert (data["counters"] == "unavailable: no CUDA device").all()
    assert data[["wavefronts", "conflicts", "wavefront_error", "conflict_error", "sass_conflicts"]].isna().all(axis=None)
    assert (data["simulated_wavefronts"] >= data["loads"]).all()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Pretends that there is a GPU, whose counters give what the simulator does times a factor."""

    def make(factor, wrong=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(bank_conflicts, "_check", lambda case, num_warps, device: wrong)

        def table(driver, counted, kernels):
            assert (driver.function, driver.arguments) == ("wqlab.bench.bank_conflicts:launches", (64,))
            assert counted == "shared loads"
            found = [bank_conflicts.simulated(case, 64) for case in cases()]
            return pd.DataFrame(
                {
                    "launch": range(len(found)), "kernel": "bank_conflicts_4",
                    "wavefronts": [factor * row["simulated_wavefronts"] for row in found],
                    "conflicts": [float(row["simulated_conflicts"]) for row in found],
                    "sass_wavefronts": np.nan, "source": "ncu 1.2.3; unavailable: sass_wavefronts",
                }
            )  # fmt: skip

        monkeypatch.setattr(counters, "table", table)
        return BankConflictsBench().measure(quick=True)

    return make


def test_counts_that_agree_pass_and_others_are_named(on_a_gpu):
    data = on_a_gpu(1.0)
    BankConflictsBench().check(data)
    assert (data["wavefront_error"] == 0).all()
    assert (data["conflict_error"] == 0).all()
    assert (data["counters"] == "ncu 1.2.3; unavailable: sass_wavefronts").all()
    assert data["sass_wavefronts"].isna().all()
    assert [h.ours for h in BankConflictsBench().headlines(data)] == [0.0, 0.0]
    data = on_a_gpu(1.1)
    with pytest.raises(LimitError, match=f"wavefront_error is above 0.05 in {len(cases())} of {len(cases())} cases"):
        BankConflictsBench().check(data)
    with pytest.raises(LimitError, match="3 look-ups"):
        BankConflictsBench().check(on_a_gpu(1.0, wrong="3 look-ups read something else"))


def test_denied_counters_are_unavailable_and_not_zero(on_a_gpu, monkeypatch):
    on_a_gpu(1.0)

    def denied(driver, counted, kernels):
        raise MissingPartError("ncu ended with exit code 1: ERR_NVGPUCTRPERM")

    monkeypatch.setattr(counters, "table", denied)
    data = BankConflictsBench().measure(quick=True)
    assert (data["counters"] == "unavailable: ncu ended with exit code 1: ERR_NVGPUCTRPERM").all()
    assert data["wavefronts"].isna().all()
    BankConflictsBench().check(data)
    assert BankConflictsBench().headlines(data) == []
    monkeypatch.setattr(counters, "table", lambda driver, counted, kernels: pd.DataFrame({"wavefronts": [1.0]}))
    assert "ncu saw 1 launches" in BankConflictsBench().measure(quick=True)["counters"].iloc[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_kernel_reads_what_the_simulator_says(case):
    launch, wanted = bank_conflicts.prepared(case, 64, torch.device("cuda"))
    assert (launch().cpu().numpy().view(np.uint32) == wanted).all()
