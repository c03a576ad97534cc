"""Against NVIDIA's own calculator (cuda_occupancy.h, compiled with g++), which needs no GPU."""

import ctypes
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab.codegen.compile import _headers, _nvrtc_version
from wqlab.errors import MissingPartError, ParameterError
from wqlab.simulate.gpus import GPUS, gpu
from wqlab.simulate.occupancy import occupancy

_SOURCE = """
#include <cuda_occupancy.h>
extern "C" int blocks(const int *p, int registers, int threads, int statically, int dynamically, int carve_out) {
    cudaOccDeviceProp device;
    device.computeMajor = p[0]; device.computeMinor = p[1];
    device.maxThreadsPerBlock = p[2]; device.maxThreadsPerMultiprocessor = p[3];
    device.regsPerBlock = p[4]; device.regsPerMultiprocessor = p[5]; device.warpSize = p[6];
    device.sharedMemPerBlock = p[7]; device.sharedMemPerMultiprocessor = p[8]; device.numSms = p[9];
    device.sharedMemPerBlockOptin = p[10]; device.reservedSharedMemPerBlock = p[11];
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = p[2]; kernel.numRegs = registers; kernel.sharedSizeBytes = statically;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; kernel.maxDynamicSharedSizeBytes = dynamically; kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = carve_out;
    cudaOccResult result;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, dynamically);
    return error ? -error : result.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """NVIDIA's function: (GPU, registers, threads, static bytes, dynamic bytes, carve-out or None) -> blocks."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    try:
        include = _headers(_nvrtc_version())
    except MissingPartError as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "occupancy.cpp").write_text(_SOURCE)
    library = folder / "occupancy.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-I", include, folder / "occupancy.cpp", "-o", library], check=True)
    function = ctypes.CDLL(str(library)).blocks

    def blocks(row, registers, threads, statically, dynamically, carve_out):
        device = (ctypes.c_int * 12)(
            *row.compute_capability, row.max_threads_per_block, row.max_threads_per_sm, row.registers_per_block,
            row.registers_per_sm, row.warp_size, row.shared_without_asking_bytes, row.shared_bytes_per_sm, row.num_sms,
            row.shared_bytes_per_block, row.shared_reserved_bytes,
        )  # fmt: skip
        return function(device, registers, threads, statically, dynamically, -1 if carve_out is None else carve_out)

    return blocks


@st.composite
def launches(draw):
    row = GPUS[draw(st.sampled_from(sorted(GPUS)))]
    statically = draw(st.sampled_from([0, 0, 1, 128, 1000, 4096]))
    most = row.shared_bytes_per_block - statically
    # Sizes at which a number of blocks just fits or just does not are drawn often.
    edges = [row.shared_bytes_per_sm // n - 1024 - statically + d for n in range(1, 33) for d in (-128, -1, 0, 1, 128)]
    edges = [edge for edge in edges if 0 <= edge <= most]
    dynamically = draw(st.one_of(st.integers(0, most), st.sampled_from(edges)))
    threads = draw(st.one_of(st.integers(1, 1024), st.integers(1, 32).map(lambda n: 32 * n)))
    carve_out = draw(st.one_of(st.none(), st.integers(0, 100)))
    return row, draw(st.integers(0, 255)), threads, statically, dynamically, carve_out


@settings(max_examples=1000)
@given(launch=launches())
def test_equal_to_nvidias_calculator(nvidia, launch):
    row, registers, threads, statically, dynamically, carve_out = launch
    assert occupancy(row, registers, threads, statically + dynamically, carve_out).blocks == nvidia(*launch)


@given(launch=launches())
def test_the_slack_can_be_used_and_no_more(launch):
    row, registers, threads, statically, dynamically, carve_out = launch
    shared = statically + dynamically
    found = occupancy(row, registers, threads, shared, carve_out)
    if not found.blocks:
        assert (found.register_slack, found.shared_slack_bytes) == (0, 0)
        return
    full = registers + found.register_slack, threads, shared + found.shared_slack_bytes, carve_out
    assert occupancy(row, *full).blocks == found.blocks
    if full[0] < row.max_registers_per_thread:
        assert occupancy(row, full[0] + 1, *full[1:]).blocks < found.blocks
    if full[2] < row.shared_bytes_per_block:
        assert occupancy(row, registers, threads, full[2] + 1, carve_out).blocks < found.blocks


def test_a_known_kernel():
    found = occupancy(gpu("h200"), registers=64, threads=256, shared_bytes=16 * 1024)
    assert (found.blocks, found.warps, found.fraction, found.limiters) == (4, 32, 0.5, ("registers",))
    assert found.register_slack == 0
    # 228 KB for 4 blocks: 57 KB each, of which the driver takes one.
    assert found.shared_slack_bytes == 40 * 1024


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"registers": 256}, "registers = 256: .* 0 to 255"),
        ({"registers": -1}, "registers = -1"),
        ({"threads": 0}, "threads = 0: .* 1 to 1024"),
        ({"threads": 1025}, "threads = 1025"),
        ({"shared_bytes": 227 * 1024 + 1}, "shared_bytes = 232449: .* 0 to 232448"),
        ({"shared_bytes": -5}, "shared_bytes = -5"),
        ({"carve_out": 101}, "carve_out = 101: .* 0 to 100"),
    ],
)
def test_what_no_gpu_can_hold_is_refused_with_value_and_limit(given, told):
    with pytest.raises(ParameterError, match=told):
        occupancy(gpu("h200"), **{"registers": 32, "threads": 128, **given})
