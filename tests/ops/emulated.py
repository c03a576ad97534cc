"""CUDA kernels on the CPU: their own source, built by g++ with `tests/emulation/emulate.h` for a GPU."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

from wqlab.ops.mixed_decode import cuda_kernel, encoder

HEADERS = Path(__file__).parents[1] / "emulation"
#: Of an H200.
MULTIPROCESSORS, SHARED_LIMIT = 132, 226 << 10
_BUILT = tempfile.TemporaryDirectory(prefix="wqlab-emulated-")
_ENTRY = """
extern "C" void run(const Arguments* x, unsigned gx, unsigned gy, unsigned gz, unsigned threads, int shared_bytes) {
    emulation::launch(dim3{gx, gy, gz}, threads, shared_bytes, [=] { %s(*x); });
}
extern "C" int size_of_arguments() { return sizeof(Arguments); }
"""


@functools.cache
def library(source: str, kernel: str, truncated: bool = False) -> ctypes.CDLL:
    """Build a kernel's source as a shared library with one function, ``run``."""
    folder = Path(tempfile.mkdtemp(dir=_BUILT.name))
    written, built = folder / "kernel.cpp", folder / "kernel.so"
    written.write_text(source + _ENTRY % kernel)
    flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-DWQLAB_EMULATED", f"-I{HEADERS}"]
    if truncated:
        flags.append("-DWQLAB_TRUNCATED")
    done = subprocess.run(["g++", *flags, "-o", built, written], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(built))


def launch(loaded, arguments, grid, threads, shared_bytes):
    assert loaded.size_of_arguments() == ctypes.sizeof(arguments)
    loaded.run(ctypes.byref(arguments), *(*grid, 1, 1)[:3], threads, shared_bytes)


def attend(query, cache, scaling=None, num_splits=3, truncated=False, multiprocessors=MULTIPROCESSORS):
    """What `cuda_kernel.attend` does, on the CPU; all that the kernel is to write holds NaN before."""
    assert cuda_kernel.refusal(query, cache) is None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = cuda_kernel.prepare(query, cache, scaling, multiprocessors, SHARED_LIMIT, num_splits)
    for tensor in call.kept:
        if tensor.dtype == torch.float32:
            tensor.fill_(torch.nan)  # the partial results
    call.output.fill_(torch.nan)
    loaded = library(cuda_kernel.source(call.tiling), "mixed_decode", truncated)
    launch(loaded, call.arguments, call.grid, 32 * call.tiling.num_warps, call.tiling.shared_bytes)
    return call.output


def encode(key, value, positions, num_bits, window_size):
    """What `encoder.encode_windows` does with its kernel, on the CPU."""
    call = encoder.prepare(key, value, positions, num_bits, window_size)
    call.segment.codes.fill_(0xFF)
    call.segment.meta.fill_(torch.nan)
    loaded = library(encoder.source(key.shape[3], num_bits, window_size), "encode_windows")
    launch(loaded, call.arguments, call.grid, 128, call.shared_bytes)
    encoder.raise_if_spoiled(call.spoiled)
    return call.segment
