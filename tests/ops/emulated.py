"""The CUDA kernel of `mixed_decode` on the CPU: its own source, built by g++ with `tests/emulation/emulate.h` for a GPU."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

from wqlab.ops.mixed_decode import cuda_kernel
from wqlab.ops.mixed_decode.cuda_kernel import Arguments, Tiling

HEADERS = Path(__file__).parents[1] / "emulation"
#: Of an H200.
MULTIPROCESSORS, SHARED_LIMIT = 132, 226 << 10
_ENTRY = """
extern "C" void run(const Arguments* x, unsigned gx, unsigned gy, unsigned gz, int shared_bytes) {
    emulation::launch(dim3{gx, gy, gz}, 32 * WARPS, shared_bytes, [=] { mixed_decode(*x); });
}
extern "C" int size_of_arguments() { return sizeof(Arguments); }
"""


@functools.cache
def library(tiling: Tiling, truncated: bool) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="wqlab-emulated-"))
    (folder / "kernel.cpp").write_text(cuda_kernel.source(tiling) + _ENTRY)
    flags = ["-DWQLAB_EMULATED", *(["-DWQLAB_TRUNCATED"] if truncated else []), f"-I{HEADERS}"]
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-w",
        "-shared",
        "-fPIC",
        *flags,
        "-o",
        str(folder / "kernel.so"),
        str(folder / "kernel.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    assert loaded.size_of_arguments() == ctypes.sizeof(Arguments)
    return loaded


def attend(query, cache, scaling=None, num_splits=3, truncated=False, multiprocessors=MULTIPROCESSORS):
    """What `cuda_kernel.attend` does, on the CPU; all that the kernel is to write holds NaN before."""
    assert cuda_kernel.refusal(query, cache) is None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = cuda_kernel.prepare(query, cache, scaling, multiprocessors, SHARED_LIMIT, num_splits)
    for tensor in call.kept:
        if tensor.dtype == torch.float32:
            tensor.fill_(torch.nan)  # the partial results
    call.output.fill_(torch.nan)
    library(call.tiling, truncated).run(ctypes.byref(call.arguments), *call.grid, call.tiling.shared_bytes)
    return call.output
