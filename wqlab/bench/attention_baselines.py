"""Decode attention of other libraries over caches in FP16 and FP8, at their fastest: what `mixed_decode` is measured against."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab.bench.decode_caches import Shape
from wqlab.profile.timing import Timing, launch_times, rotation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Names as they stand in tables; `FP16` are those that `mixed_decode` is compared with.
FP16 = ("torch flash", "torch cudnn", "torch efficient", "flashinfer fp16")
NAMES = (*FP16, "flashinfer fp8")
#: A library whose result differs more from the truth has computed something else. FP8 is compared with its own cache's values.
MAX_ERROR = 2e-2
#: Layout of a page, and its tokens.
_PAGES = (("HND", 16), ("HND", 64), ("NHD", 16))
_WORKSPACE_BYTES = 256 << 20


class Result(NamedTuple):
    """The fastest variant of one library.

    Parameters
    ----------
    timing : Timing or None
        None where none of its variants can serve the shape.
    variant : str
        Which one is the fastest.
    reason : str
        Why there is no timing; else empty.
    """

    timing: Timing | None
    variant: str = ""
    reason: str = ""


class _Variant(NamedTuple):
    """A way to call a library: a launch per copy, and the first copy's keys and values [batch, num_kv_heads, seq_len, head_dim]."""

    launches: list[Callable[[], Tensor]]
    key: Tensor
    value: Tensor


def measure(shape: Shape, device: torch.device, repeats: int, out_of_time: Callable[[], bool] = lambda: False) -> dict[str, Result]:
    """Return the fastest variant of every library in `NAMES`.

    Each is warmed up, compared with attention in float32, and recorded in a CUDA graph over copies of its cache that fill four
    times the L2 cache.

    Parameters
    ----------
    shape : Shape
        Of the decode step.
    device : torch.device
        On a CPU, what runs there is timed call by call.
    repeats : int
        Replays of the fastest variant; the others get a tenth of them.
    out_of_time : callable
        Asked before each library; those after the first yes are not measured.
    """
    import torch

    query = torch.randn(shape.batch, shape.num_heads, 1, shape.head_dim, device=device).to(torch.float16)
    copies = rotation(shape.fp16_bytes, device)
    caches = [tuple(torch.randn(shape.elements, dtype=torch.float16, device=device) for _ in range(2)) for _ in range(copies)]
    found = {}
    for name in NAMES:
        if out_of_time():
            found[name] = Result(None, reason="the time was used up before")
            continue
        if name == "flashinfer fp8":
            copies = rotation(shape.fp16_bytes // 2, device)
            while len(caches) < copies:
                caches.append(caches[len(caches) % 2])
            # A half beyond the range of FP8 would become NaN; normal values are far from it.
            caches = [tuple(x.to(torch.float8_e4m3fn) for x in pair) for pair in caches]
        variants = _flashinfer(shape, query, caches) if name.startswith("flashinfer") else _torch(name, shape, query, caches)
        found[name] = _fastest(variants, shape, query, device, repeats)
    return found


def _fastest(
    variants: Iterator[tuple[str, Callable[[], _Variant]]], shape: Shape, query: Tensor, device: torch.device, repeats: int
) -> Result:
    best: tuple[float, str, _Variant] | None = None
    refusals: dict[str, list[str]] = {}
    try:
        for name, make in variants:
            try:
                variant = make()
                error = error_at_ends(variant.launches[0](), query, variant.key, variant.value, shape)
                if not error < MAX_ERROR:
                    refusals.setdefault(f"relative error {error:.2g}", []).append(name)
                    continue
                times = launch_times(variant.launches, device, max(repeats // 10, 1), warmup=1)
            except Exception as refused:  # each library refuses a shape with exceptions of its own
                refusals.setdefault(_first_line(refused), []).append(name)
                continue
            if best is None or times.median_us < best[0]:
                best = times.median_us, name, variant
    except Exception as missing:  # a library that is not installed, or does not fit the others
        return Result(None, reason=_first_line(missing))
    if best is None:
        return Result(None, reason=", ".join(f"{why} ({', '.join(names)})" for why, names in refusals.items()))
    return Result(launch_times(best[2].launches, device, repeats), best[1])


def error_at_ends(output: Tensor, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> float:
    """Return the relative error of the first row's first and the last row's last KV head, against float32 (infinite for NaN).

    Parameters
    ----------
    output, query : Tensor
        [batch, num_heads, ..., head_dim], one token.
    key, value : Tensor
        [batch, num_kv_heads, seq_len, head_dim].
    shape : Shape
        Their sizes.
    """
    import torch

    got, want = [], []
    output = output.reshape(shape.batch, shape.num_kv_heads, shape.group, shape.head_dim)
    query = query.reshape(output.shape)
    for row, head in ((0, 0), (-1, -1)):
        k, v = key[row, head].float(), value[row, head].float()
        want.append((query[row, head].float() @ k.T * shape.head_dim**-0.5).softmax(-1) @ v)
        got.append(output[row, head].float())
    truth = torch.cat(want)
    error = float(torch.linalg.vector_norm(torch.cat(got) - truth) / torch.linalg.vector_norm(truth))
    return error if error == error and bool(output.isfinite().all()) else float("inf")


def _torch(
    name: str, shape: Shape, query: Tensor, caches: list[tuple[Tensor, ...]]
) -> Iterator[tuple[str, Callable[[], _Variant]]]:
    """Yield SDPA with one backend: heads as they are, and those of a group as query tokens (without a mask it is the same)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    chosen = {
        "torch flash": SDPBackend.FLASH_ATTENTION,
        "torch cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[name]
    dense = [[x.view(shape.batch, shape.num_kv_heads, shape.seq_len, shape.head_dim) for x in pair] for pair in caches]

    def make(q: Tensor, grouped: bool) -> _Variant:
        def launch(pair: list[Tensor]) -> Tensor:
            with sdpa_kernel(chosen), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a refused backend warns once for each of its reasons
                return scaled_dot_product_attention(q, pair[0], pair[1], enable_gqa=grouped)

        return _Variant([partial(launch, pair) for pair in dense], *dense[0])

    yield "heads", lambda: make(query, shape.group > 1)
    if shape.group > 1:
        folded = query.view(shape.batch, shape.num_kv_heads, shape.group, shape.head_dim)
        yield "group as tokens", lambda: make(folded, False)


def _flashinfer(shape: Shape, query: Tensor, caches: list[tuple[Tensor, ...]]) -> Iterator[tuple[str, Callable[[], _Variant]]]:
    """Yield flashinfer's decode over a paged cache: with and without tensor cores, for some pages."""
    import importlib

    import torch

    flashinfer: Any = importlib.import_module("flashinfer")  # optional, and no dependency of this package
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    batch, heads, tokens, dim = shape.batch, shape.num_kv_heads, shape.seq_len, shape.head_dim

    def make(layout: str, page: int, tensor_cores: bool) -> _Variant:
        pages = tokens // page
        inner = (heads, page, dim) if layout == "HND" else (page, heads, dim)
        paged = [tuple(x.view(batch * pages, *inner) for x in pair) for pair in caches]
        rows = torch.arange(batch + 1, dtype=torch.int32) * pages
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=tensor_cores)
        every_page = torch.arange(batch * pages, dtype=torch.int32, device=query.device)
        last = torch.full((batch,), page, dtype=torch.int32)
        wrapper.plan(
            rows, every_page, last, shape.num_heads, heads, dim, page,
            q_data_type=query.dtype, kv_data_type=caches[0][0].dtype,
        )  # fmt: skip
        flat = query.view(batch, shape.num_heads, dim)
        # [batch, pages, ...] -> [batch, kv heads, tokens, dim]
        order = (0, 2, 1, 3, 4) if layout == "HND" else (0, 3, 1, 2, 4)
        first = [x.view(batch, pages, *inner).permute(order).reshape(batch, heads, tokens, dim) for x in caches[0]]
        return _Variant([partial(wrapper.run, flat, pair) for pair in paged], *first)

    for tensor_cores in (True, False):
        for layout, page in _PAGES:
            what = f"{flashinfer.__version__}, {layout} pages of {page}, {'tensor' if tensor_cores else 'CUDA'} cores"
            yield what, partial(make, layout, page, tensor_cores)


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]
