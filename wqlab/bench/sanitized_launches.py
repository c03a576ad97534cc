"""Every CUDA kernel of the cache, launched a few times at tiny shapes: what `wqlab bench sanitizer` runs under compute-sanitizer.

``python -m wqlab.bench.sanitized_launches`` runs it alone; results are compared with the reference as well. Tensors are made on the
CPU and copied, so that hardly any other kernel runs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wqlab.bench import decode_cases
from wqlab.bench.decode_cases import DecodeCase

if TYPE_CHECKING:
    import torch

#: Kernels that are checked; those of torch are not.
KERNELS = ("mixed_decode", "mixed_decode_in_place", "encode_windows", "dequantize")
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


def launches() -> Iterator[tuple[str, float]]:
    """Launch every kernel on the current CUDA device; yield what it was and its relative error, infinite where bits differ."""
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


def main() -> int:
    """Launch everything, print a line each, and return 0 when all results are right."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    wrong = count = 0
    for what, error in launches():
        count += 1
        wrong += not error <= _LIMIT
        print(f"{what}: relative error {error:.2g}{'' if error <= _LIMIT else ', wrong'}", flush=True)
    torch.cuda.synchronize()
    print(f"{DONE} {count}, wrong results: {wrong}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
