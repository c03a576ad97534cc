"""The program that runs under compute-sanitizer, on an emulated GPU: it launches every kernel and finds all results right."""

from types import SimpleNamespace

import emulated
import pytest
import torch

from wqlab.bench import sanitized_launches
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
            run(dequantizer.source(cache.head_dim), "dequantize", [call], dequantizer._THREADS, call.shared_bytes)

        return SimpleNamespace(launch=launch)

    real = encoder.encode_windows

    def encoded(key, value, at, bits, window, backend):
        if backend == "reference":
            return real(key, value, at, bits, window, backend)
        names.append("encode_windows")
        return emulated.encode(key, value, at, bits, window)

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
    assert sanitized_launches.main() == 0
    assert sanitized_launches.DONE in capsys.readouterr().out
    assert set(launched) == set(sanitized_launches.KERNELS)


def test_a_wrong_result_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitized_launches, "launches", lambda: iter([("a", 1e-4), ("b", float("nan"))]))
    assert sanitized_launches.main() == 1
    assert "b: relative error nan, wrong" in capsys.readouterr().out
