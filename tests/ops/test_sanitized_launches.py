"""The program that runs under compute-sanitizer, on an emulated GPU: it launches every kernel and finds all results right."""

import os
import subprocess
import sys
from types import SimpleNamespace

import emulated
import numpy as np
import pytest
import torch

from wqlab.bench import bank_conflicts, sanitized_launches
from wqlab.ops.mixed_decode import cuda_kernel, dequantizer, encoder, in_place

NUMBERS = (emulated.MULTIPROCESSORS, emulated.SHARED_LIMIT)


@pytest.fixture
def launched(monkeypatch):
    """Replace the GPU; return the kernels that are launched, in turn."""
    names = []

    def run(source, name, launches, threads, shared_bytes):
        names.append(name)
        library = emulated.library(source, name)
        for one in launches:
            emulated.launch(library, one.arguments, one.grid, threads, shared_bytes)

    def mixed(query, cache, scaling, splits):
        call = cuda_kernel.prepare(query, cache, scaling, *NUMBERS, splits, own_counters=True)
        tiling = call.tiling

        def launch():
            run(cuda_kernel.source(tiling), "mixed_decode", [call], 32 * tiling.num_warps, tiling.shared_bytes)

        return SimpleNamespace(call=call, launch=launch)

    def placed(call):
        def launch():
            launches = [one for lane in call.lanes for one in lane]
            run(
                in_place.source(call.tiling), "mixed_decode_in_place", launches, 32 * call.tiling.num_warps,
                call.tiling.shared_bytes,
            )  # fmt: skip
            return call.output

        return SimpleNamespace(launch=launch)

    def decoded(cache, key, value):
        call = dequantizer.prepare(cache, key, value, emulated.MULTIPROCESSORS)

        def launch():
            run(dequantizer.source(cache.head_dim), "dequantize", [call], call.threads, call.shared_bytes)

        return SimpleNamespace(launch=launch)

    real = encoder.encode_windows

    def encoded(key, value, at, bits, window, backend):
        if backend == "reference":
            return real(key, value, at, bits, window, backend)
        names.append("encode_windows")
        return emulated.encode(key, value, at, bits, window)

    def looked_up(case, num_warps, device):
        """Nothing runs: the kernel takes its arguments one by one, which the emulation does not."""
        layout, drawn = case.layout, bank_conflicts.indices(case, num_warps)
        wanted = bank_conflicts.expected(case, np.arange(layout.shared_bytes // 4, dtype=np.uint32), drawn)
        names.append(f"bank_conflicts_{layout.access_bytes}")
        return lambda: torch.from_numpy(wanted.view(np.int32)), wanted

    monkeypatch.setattr(bank_conflicts, "prepared", looked_up)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x.clone())
    monkeypatch.setattr(cuda_kernel, "prepared", mixed)
    monkeypatch.setattr(in_place, "prepared", lambda q, kv, s, order="video": placed(in_place.prepare(q, kv, s, *NUMBERS, order)))
    monkeypatch.setattr(
        in_place, "prepared_runs",
        lambda q, kv, s, num_splits, num_lanes: placed(in_place.prepare_runs(q, kv, s, NUMBERS[1], num_splits, num_lanes)),
    )  # fmt: skip
    monkeypatch.setattr(dequantizer, "prepared", decoded)
    monkeypatch.setattr(encoder, "encode_windows", encoded)
    return names


@pytest.mark.slow
def test_every_kernel_is_launched_and_every_result_is_right(launched, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert sanitized_launches.main("cuda") == 0
    assert sanitized_launches.DONE in capsys.readouterr().out
    assert set(launched) == set(sanitized_launches.KERNELS["cuda"])


@pytest.mark.slow
def test_the_triton_kernels_in_the_interpreter():
    """In a process of its own, because it is chosen when triton is imported."""
    pytest.importorskip("triton")
    code = """
import sys, torch
torch.set_num_threads(1)
torch.Tensor.cuda = lambda x: x.clone()
torch.cuda.is_available, torch.cuda.synchronize = (lambda: True), (lambda: None)
from wqlab.bench import sanitized_launches
sys.exit(sanitized_launches.main("triton"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong results: 0" in done.stdout
    assert all(name in done.stdout for name in sanitized_launches.KERNELS["triton"])


def test_a_wrong_result_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitized_launches, "launches", lambda group: iter([("a", 1e-4), ("b", float("nan"))]))
    assert sanitized_launches.main("cuda") == 1
    assert "b: relative error nan, wrong" in capsys.readouterr().out
