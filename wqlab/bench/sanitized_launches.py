"""Every kernel, launched a few times at tiny shapes: what `wqlab bench sanitizer` runs under compute-sanitizer.

``python -m wqlab.bench.sanitized_launches cuda`` (or ``triton``) runs it alone; results are compared with the reference as well.
Tensors are made on the CPU and copied, so that hardly any other kernel runs. The kernels of `wqlab bench occupancy` are asked about
and never launched.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wqlab.bench import decode_cases
from wqlab.bench.decode_cases import DecodeCase

if TYPE_CHECKING:
    import torch

#: Kernels that are checked, by what compiles them; those of torch are not.
KERNELS = {
    "cuda": (
        "mixed_decode", "mixed_decode_in_place", "encode_windows", "dequantize", "bank_conflicts_4", "bank_conflicts_8",
        "bank_conflicts_16",
    ),
    "triton": ("_partial_kernel", "_combine_kernel", "_encode_kernel", "_plain_kernel"),
}  # fmt: skip
#: What the program prints before its summary.
DONE = "launches:"
_LIMIT = 2e-3


def cases() -> list[DecodeCase]:
    """Return calls of every kind of segment: alone and together, whole and ragged, masked, with several query tokens."""
    alone = {"batch": 1, "kv_heads": 1, "group": 3, "q_len": 1, "window_size": 32, "int4_tokens": 0, "int2_tokens": 0}
    kinds: list[dict[str, Any]] = [
        {"int4_tokens": 128, "dense_tokens": 0, "dense_as": ""},
        {"int2_tokens": 128, "dense_tokens": 0, "dense_as": ""},
        {"dense_tokens": 72, "dense_as": "segment"},
        {"dense_tokens": 21, "dense_as": "tail", "q_len": 5},
    ]
    together = {
        "batch": 3, "kv_heads": 2, "group": 7, "window_size": 64, "int4_tokens": 256, "int2_tokens": 192, "dense_tokens": 41,
        "dense_as": "tail", "offset": 300.0, "lengths": ((256, 192, 41), (64, 0, 3), (0, 0, 0)),
    }  # fmt: skip
    made = [
        DecodeCase(seed, head_dim=head_dim, **(alone | kind))
        for head_dim in (64, 128)
        for seed, kind in enumerate([*kinds, together, {**together, "mask": True}])
    ]
    # Row 1 of a longer question has as many tokens as it asks with.
    return [*made, dataclasses.replace(made[-1], q_len=3)]


def launches(group: str) -> Iterator[tuple[str, float]]:
    """Launch every kernel of a group of `KERNELS` on the current CUDA device.

    Yields
    ------
    tuple of str and float
        What it was, and its relative error, infinite where what must be exact is not.
    """
    return _cuda() if group == "cuda" else _triton()


def _cuda() -> Iterator[tuple[str, float]]:
    import torch

    from wqlab.ops.mixed_decode import MixedKV, cuda_kernel, dequantizer
    from wqlab.ops.mixed_decode.encoder import encode_windows

    cpu = torch.device("cpu")
    for number, case in enumerate(cases()):
        built = decode_cases.build(case, cpu)
        cache = MixedKV(tuple(_there(s) for s in built.cache.segments), built.cache.tail and _there(built.cache.tail))
        for splits in (1, 3):
            ready = cuda_kernel.prepared(built.query.cuda(), cache, case.head_dim**-0.5, splits)
            for _ in range(2):  # the second finds the counters as the first left them
                ready.launch()
            error = decode_cases.relative_error(ready.call.output.cpu(), built.truth)
            yield f"mixed_decode, case {number}, {splits} splits", error
        if not case.lengths:
            size = (case.batch, case.kv_heads, sum(s.tokens for s in cache.all()), case.head_dim)
            wanted = [torch.empty(size, dtype=torch.float16) for _ in range(2)]
            got = [torch.full(size, torch.nan, dtype=torch.float16).cuda() for _ in range(2)]
            dequantizer.decode_into(built.cache, wanted[0], wanted[1])
            dequantizer.prepared(cache, got[0], got[1]).launch()
            yield f"dequantize, case {number}", _difference(got, wanted)
    generator = torch.Generator().manual_seed(0)
    for head_dim in (64, 128):
        yield from _in_place(head_dim, generator)
        key, value = (torch.randn((2, 2, 150, head_dim), generator=generator).half() for _ in range(2))
        for bits, window in ((4, 32), (2, 64)):
            at = torch.stack([torch.randperm(150, generator=generator)[:128].sort().values for _ in range(2)]).int()
            at[1, -window:] = -1  # a window that this row lacks
            made = encode_windows(key.cuda(), value.cuda(), at.cuda(), bits, window, backend="cuda")
            want = encode_windows(key, value, at, bits, window, backend="reference")
            yield f"encode_windows, {bits} bits, {head_dim} channels", _difference((made.codes, made.meta), (want.codes, want.meta))
    yield from _look_ups()


def _look_ups() -> Iterator[tuple[str, float]]:
    import numpy as np
    import torch

    from wqlab.bench import bank_conflicts

    # The first case of every width and layout; a block's last warps have no row.
    chosen = {(case.layout.access_bytes, case.layout.scheme): case for case in reversed(bank_conflicts.cases())}
    for (width, scheme), case in chosen.items():
        launch, wanted = bank_conflicts.prepared(case, 61, torch.device("cuda"))
        same = bool((launch().cpu().numpy().view(np.uint32) == wanted).all())
        yield f"bank_conflicts_{width}, {scheme}", 0.0 if same else float("inf")


def _triton() -> Iterator[tuple[str, float]]:
    import torch

    from wqlab.ops.cq_encode import reference
    from wqlab.ops.cq_encode import triton_kernel as encoder
    from wqlab.ops.mixed_decode import MixedKV, triton_kernel

    for number, case in enumerate(cases()):
        if case.head_dim == 64:
            built = decode_cases.build(case, torch.device("cpu"))
            cache = MixedKV(tuple(_there(s) for s in built.cache.segments), built.cache.tail and _there(built.cache.tail))
            output = triton_kernel.attend(built.query.cuda(), cache, case.head_dim**-0.5, 3)
            error = decode_cases.relative_error(output.cpu(), built.truth_rounded)
            yield f"_partial_kernel and _combine_kernel, case {number}", error
    generator = torch.Generator().manual_seed(0)
    for size in (2, 4):
        entries = torch.randn((2, 64 // size, 200, size), generator=generator)
        x = torch.randn((2, 2, 75, 64), generator=generator).half()
        there, known = x.cuda(), entries.cuda()
        plain = torch.full((2, 2, 75, 64 // size), 255, dtype=torch.uint8).cuda()
        encoder.encode_plainly(plain, there, known)
        made = {"_encode_kernel": encoder.encode(there, encoder.prepare(known, torch.float16)), "_plain_kernel": plain}
        for name, codes in made.items():
            excess, least = reference.excess(x, entries, codes.cpu())
            near = bool((excess <= reference.bound(x, entries, least)).all())
            yield f"{name}, vectors of {size}", 0.0 if near else float("inf")


def _in_place(head_dim: int, generator: torch.Generator) -> Iterator[tuple[str, float]]:
    import torch

    from wqlab.bench.decode_caches import Shape, Tokens, random_cache
    from wqlab.ops.mixed_decode import MixedKV, in_place, reference

    scaling = head_dim**-0.5
    host = random_cache(Shape(2, 14, 2, 320, head_dim), Tokens(64, 96, 160), generator)
    query = torch.randn((2, 14, 1, head_dim), generator=generator).half()
    truth = reference.attend(query, host, scaling, torch.float64)
    cache = MixedKV(tuple(_there(segment) for segment in host.segments))
    kv = in_place.interleave(cache, [16, 4, 2, 2, 4, 2, 16, 2, 4, 2])
    there = query.cuda()
    for what, ready in (
        ("one launch", in_place.prepared(there, kv, scaling)),
        ("one launch, sorted", in_place.prepared(there, kv, scaling, "width")),
        ("a launch per run", in_place.prepared_runs(there, kv, scaling, num_splits=2, num_lanes=2)),
    ):
        for _ in range(2):
            output = ready.launch()
        # Decoded values are rounded in the reference, which is far below the limit with these scales.
        yield f"mixed_decode_in_place, {head_dim} channels, {what}", decode_cases.relative_error(output.cpu(), truth)


def _there(segment: Any) -> Any:
    import torch

    return dataclasses.replace(segment, **{n: x.cuda() for n, x in vars(segment).items() if isinstance(x, torch.Tensor)})


def _difference(got: Any, wanted: Any) -> float:
    return 0.0 if all(bool((a.cpu() == b).all()) for a, b in zip(got, wanted, strict=True)) else float("inf")


def main(group: str) -> int:
    """Launch everything of a group, print a line each, and return 0 when all results are right."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    wrong = count = 0
    for what, error in launches(group):
        count += 1
        wrong += not error <= _LIMIT
        print(f"{what}: relative error {error:.2g}{'' if error <= _LIMIT else ', wrong'}", flush=True)
    torch.cuda.synchronize()
    print(f"{DONE} {count}, wrong results: {wrong}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="launch every kernel of a group")
    parser.add_argument("group", choices=KERNELS)
    sys.exit(main(parser.parse_args().group))
