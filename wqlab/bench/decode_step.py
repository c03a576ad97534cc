"""A whole decode step of LLaVA-OneVision-7B's language model: WindowQuant's packed cache against full precision at its fastest.

Both sides run the same model with the same kernels but for the cache and its attention, each as one CUDA graph from the embedding
to the next token. Weights are random, which changes no latency.
"""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from wqlab import paths
from wqlab.bench import Headline
from wqlab.bench.attention_baselines import MAX_ERROR as MAX_BASELINE_ERROR
from wqlab.bench.attention_baselines import error_at_ends
from wqlab.bench.decode_caches import Shape, cache_bytes, random_cache, relative_error
from wqlab.bench.points import MAX_ERROR, PointBench, Row, fresh_memory, guarded, in_one_line
from wqlab.profile.timing import launch_times, read_bandwidth
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from wqlab.hf.frozen_cache import FrozenCache
    from wqlab.ops.mixed_decode import MixedKV

MODEL, MIX, SEED = "LLaVA-OneVision-7B", "10/30/60", 0
FP16, WINDOWQUANT = "fp16", "windowquant"
SAME, LARGEST = "same batch", "largest batch"
FUSED: Final = "fused"
PLAIN: Final = "transformers"
#: Visual tokens of a frame, as the paper counts them.
TOKENS_PER_FRAME = 256
#: Text tokens in front of the new ones, and new tokens that the packed cache has room for. The cache in full precision has a fixed
#: length: about what the other one has in the middle of its repeats.
TEXT_TOKENS, ROOM, FP16_NEW = 32, 48, 16
_WARMUP, _TRIALS = 3, 5
#: Memory that stays free when the largest batch is chosen: activations, logits, and what making a cache needs.
_RESERVE_BYTES = 5 << 30
_WORKSPACE_BYTES = 256 << 20
_RETRIES, _SMALLER = 3, 0.94


class Decoder(NamedTuple):
    """The shape of a language model."""

    layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads


class Point(NamedTuple):
    """What is compared.

    Parameters
    ----------
    frames : int
        Of the video in each row.
    batch : int or None
        Rows; None for the most that fit, found for each side.
    layers : {"fused", "transformers"}
        The form of the model's layers.
    """

    frames: int
    batch: int | None
    layers: Literal["fused", "transformers"] = "fused"

    @property
    def case(self) -> str:
        """Whether both sides have one batch, or each its largest."""
        return SAME if self.batch else LARGEST


POINTS = (
    Point(100, 8), Point(100, None), Point(100, 32), Point(5, 60), Point(100, 16), Point(100, 1), Point(5, 20),
    Point(100, 8, PLAIN), Point(50, 8), Point(200, 8), Point(25, 8), Point(100, 4), Point(100, 2), Point(100, 64),
)  # fmt: skip
QUICK = (Point(2, 2), Point(2, None))
_TINY = Decoder(2, 256, 320, 4, 2, 211)


def decoder(name: str = MODEL) -> Decoder:
    """Return the shape of a model of ``data/paper/vlm_configs.csv``."""
    with (paths.shipped("data") / "paper" / "vlm_configs.csv").open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["name"] == name)
    names = ("layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_kv_heads", "vocab_size")
    return Decoder(*(int(row[name]) for name in names))


def row_bytes(shape: Decoder, visual_tokens: int, method: str) -> int:
    """Return the bytes that keys and values of one row take in all layers, room for new tokens included."""
    one = Shape(1, shape.num_heads, shape.num_kv_heads, visual_tokens, shape.head_dim)
    token = 4 * shape.num_kv_heads * shape.head_dim
    if method == FP16:
        return shape.layers * (one.fp16_bytes + token * (TEXT_TOKENS + FP16_NEW))
    return shape.layers * (cache_bytes(one, MIX).total + token * (TEXT_TOKENS + ROOM))


def with_ratios(data: pd.DataFrame) -> pd.DataFrame:
    """Return the table with what follows from its measured columns: throughput, floor, ceilings and speed-up."""
    data = data.copy()
    data["tokens_per_s"] = data["batch"].astype(float) / data["step_us"] * 1e6
    data["weight_floor_us"] = data["weight_bytes"].astype(float) / (data["read_bandwidth_tb_s"] * 1e12) * 1e6
    data["attention_share"] = data["num_layers"].astype(float) * data["attention_us"] / data["step_us"]
    keys = data[["case", "frames", "layers"]].astype(str).agg(" ".join, axis=1)
    keys = keys + data["batch"].astype(str).where(data["case"] == SAME, "")
    full = data[data["method"] == FP16].assign(key=keys).drop_duplicates("key").set_index("key")
    # The largest batches differ, so there are no steps of the same work to compare.
    alike = full.where(full["case"] == SAME)
    attention = alike["num_layers"].astype(float) * alike["attention_us"]
    for name, values in (
        ("ceiling", alike["step_us"] / (alike["step_us"] - attention)),
        ("ceiling_weights", 1 + attention / alike["weight_floor_us"]),
    ):
        data[name] = keys.map(values)
    data["speedup"] = data["tokens_per_s"] / keys.map(full["tokens_per_s"])
    return data


@register("bench", "decode_step")
class DecodeStepBench(PointBench):
    """Needs a CUDA device; a quick run on a CPU shows the table for a tiny model with the reference, whose times mean nothing."""

    name = "decode_step"
    description = "a decode step of LLaVA-OneVision-7B's language model (random weights) over packed and FP16 caches (3 min, a GPU)"
    whole = (
        "batch", "frames", "visual_tokens", "text_tokens", "num_layers", "repeats", "peak_memory_bytes", "kv_bytes", "weight_bytes",
    )  # fmt: skip
    columns = {  # noqa: RUF012
        "case": f"{SAME}: both sides have it; {LARGEST}: each the most rows that fit into the device's free memory",
        "model": "whose shape the language model has; weights are random, which changes no latency; tiny: quick runs without a GPU",
        "layers": "fused: q, k, v and gate, up as one product each, elementwise chains compiled to one kernel each, on both "
        "sides; transformers: the classes as they are; fused, eager: without a compiler, see note",
        "batch": "rows, one new token each",
        "frames": "of the video in each row",
        "visual_tokens": "per row: 256 for each frame",
        "text_tokens": f"per row: {TEXT_TOKENS} of a prompt, and {FP16_NEW} new ones in the FP16 cache; the packed one takes new "
        "tokens as it is measured, about as many in the middle",
        "num_layers": "of the language model",
        "method": "fp16: a static cache in 16 bits and the fastest attention of torch and flashinfer at this shape; windowquant: "
        "packed visual windows, text in 16 bits, mixed_decode",
        "mix": "fp16, or 10/30/60: percent of the windows of 32 tokens in 16, 4, 2 bits, in every layer",
        "backend": "of the attention; reference in quick runs without a GPU",
        "step_us": "median time of a decode step as one CUDA graph: embedding, all layers, norm, output weights, argmax; us",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph",
        "tokens_per_s": "batch / step_us",
        "speedup": "tokens_per_s over that of fp16 in the same case, frames, layers (and batch, where it is the same)",
        "ceiling": "speedup if attention cost nothing: fp16's step_us over the same without its num_layers * attention_us",
        "ceiling_weights": "the same if all else only read weights: 1 + num_layers * fp16's attention_us / weight_floor_us",
        "attention_us": "one layer's attention alone, median over the layers' caches in a CUDA graph, us",
        "attention_share": "num_layers * attention_us / step_us",
        "peak_memory_bytes": "most that torch held at once while the step was recorded and replayed: weights, cache, activations",
        "kv_bytes": "of keys and values as they are held, room for new tokens included",
        "weight_bytes": "of weights that a step reads: all but the embedding",
        "read_bandwidth_tb_s": "best observed rate of a sum over 2 GiB in this run, TB/s",
        "weight_floor_us": "weight_bytes over that rate, us",
        "rel_error": "of one layer's attention: norm of the difference to a float32 reference over the norm of it, two KV heads",
        "variants": "attention_us of the FP16 variants that were tried and why others were refused",
        "note": "what went wrong, else empty",
        "seed": "of weights and caches",
        "provenance": "GPU, commit and day",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return a row per point and method; see `PointBench.measure`."""
        try:
            return super().measure(quick)
        finally:
            _subject.cache_clear()  # its weights are not needed any more

    def points(self, quick: bool) -> list[Any]:
        """Return batches and frames, the most important first."""
        return list(QUICK if quick else POINTS)

    def name_of(self, point: Point) -> Row:
        """Return case, layers, batch and frames."""
        return {
            "case": point.case, "model": MODEL, "layers": point.layers, "batch": point.batch, "frames": point.frames,
            "visual_tokens": point.frames * TOKENS_PER_FRAME, "seed": SEED,
        }  # fmt: skip

    def rows(self, point: Point, device: torch.device, repeats: int) -> list[Row]:
        """Return a row for FP16 and one for WindowQuant."""
        subject = _subject(device)
        row = {**self.name_of(point), **subject.columns()}
        found = []
        for method in (FP16, WINDOWQUANT):
            named = {**row, "method": method, "mix": FP16 if method == FP16 else MIX}
            found.append(guarded(named, partial(_measured, subject, point, method, repeats)))
        subject.observe_bandwidth()
        return found

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the throughput of both sides at the first point, at Table 8's, and at the largest batches."""
        found = []
        for frames, batch, case in ((100, 8, SAME), (5, 60, SAME), (100, None, LARGEST)):
            at = (data["frames"] == frames) & (data["case"] == case) & (data["layers"] != PLAIN)
            rows = data[at & (data["batch"] == batch)] if batch else data[at]
            speeds = rows.dropna(subset=["tokens_per_s"]).drop_duplicates("method").set_index("method")["tokens_per_s"]
            if len(speeds):
                name = f"decode steps, {batch or 'largest'} x {frames} frames, {MIX}"
                ours, theirs = (float(speeds[method]) if method in speeds else None for method in (WINDOWQUANT, FP16))
                found.append(Headline(name, ours, theirs, "tokens/s"))
        return found

    def finish(self, data: pd.DataFrame) -> pd.DataFrame:
        """Add throughput, floor, ceilings and speed-up."""
        numbers = ("read_bandwidth_tb_s", "rel_error")
        data = data.astype(dict.fromkeys(numbers, float))
        # Whatever else the machine did a while ago may be over: the best rate so far is the floor's.
        data["read_bandwidth_tb_s"] = data["read_bandwidth_tb_s"].max()
        return with_ratios(data)


class _Subject:
    """The model, on its device."""

    def __init__(self, device: torch.device) -> None:
        from wqlab.models.random_decoder import qwen2

        on_gpu = device.type == "cuda"
        self.device, self.shape = device, decoder() if on_gpu else _TINY
        self.model = qwen2(*self.shape, device=device, seed=SEED)
        embedding = self.model.model.embed_tokens.weight
        self.weight_bytes = sum(w.numel() * w.element_size() for w in self.model.parameters() if w is not embedding)
        self.compiled, self.refusal = on_gpu, ""
        self._sample_bytes = (2 << 30) if on_gpu else (16 << 20)
        self._bandwidth = 0.0
        self.observe_bandwidth()

    def observe_bandwidth(self) -> None:
        """Measure the read bandwidth again and keep the best."""
        fresh_memory(self.device)
        self._bandwidth = max(self._bandwidth, read_bandwidth(self.device, self._sample_bytes))

    def columns(self) -> Row:
        """Return the columns that are the same in every row."""
        return {
            "model": MODEL if self.device.type == "cuda" else "tiny", "num_layers": self.shape.layers,
            "text_tokens": TEXT_TOKENS + FP16_NEW, "weight_bytes": self.weight_bytes,
            "read_bandwidth_tb_s": self._bandwidth / 1e12,
        }  # fmt: skip

    def form(self, layers: str) -> Any:
        """Return a context in which the model's layers have this form."""
        from wqlab.models.random_decoder import fused

        if layers == PLAIN:
            return nullcontext()
        if self.compiled and not self.refusal:
            self._try_to_compile()
        return fused(self.model, compiled=self.compiled)

    def _try_to_compile(self) -> None:
        import torch

        from wqlab.models.random_decoder import fused

        try:  # the first tokens of 2 rows, without a cache
            with torch.no_grad(), fused(self.model):
                self.model(input_ids=torch.zeros((2, 1), dtype=torch.int64, device=self.device), use_cache=False)
        except Exception as failed:  # compilers fail in ways of their own; both sides then run without
            self.compiled, self.refusal = False, f"not compiled: {in_one_line(failed)}"


@cache
def _subject(device: torch.device) -> _Subject:
    return _Subject(device)


def _measured(subject: _Subject, point: Point, method: str, repeats: int) -> Row:
    """Return a row's measured columns."""
    import torch

    visual = point.frames * TOKENS_PER_FRAME
    batch = point.batch or _largest(subject, visual, method)
    sizes = Shape(batch, subject.shape.num_heads, subject.shape.num_kv_heads, visual, subject.shape.head_dim)
    for attempt in range(_RETRIES):
        fresh_memory(subject.device)
        try:
            return {"batch": batch, **_step(subject, sizes._replace(batch=batch), point, method, repeats)}
        except torch.OutOfMemoryError:
            if point.batch or attempt + 1 == _RETRIES:
                raise
        batch = max(int(batch * _SMALLER), 1)
    raise AssertionError("the last attempt returns or raises")


def _largest(subject: _Subject, visual: int, method: str) -> int:
    """Return the rows that fit beside the weights, with some memory to spare; on a CPU there is no such limit to find."""
    import torch

    if subject.device.type != "cuda":
        return 3 if method == FP16 else 6
    fresh_memory(subject.device)
    free, _ = torch.cuda.mem_get_info(subject.device)
    return max(int((free - _RESERVE_BYTES) // row_bytes(subject.shape, visual, method)), 1)


def _step(subject: _Subject, shape: Shape, point: Point, method: str, repeats: int) -> Row:
    import torch

    from wqlab.hf.decode_graph import DecodeGraph

    device = subject.device
    generator = torch.Generator(device).manual_seed(SEED)
    query = torch.randn((shape.batch, shape.num_heads, 1, shape.head_dim), device=device, generator=generator).half()
    make = _dense_cache if method == FP16 else _packed_cache
    held, row = make(subject.shape.layers, shape, generator, query)
    stores = [layer.store for layer in held.layers]
    row["kv_bytes"] = held.nbytes()
    row["attention_us"] = launch_times([partial(store.attend, query) for store in stores], device, repeats).median_us
    fresh_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.randint(0, subject.shape.vocab_size, (shape.batch, 1), device=device, generator=generator)
    with subject.form(point.layers):
        if point.layers == FUSED and not subject.compiled:
            row |= {"layers": f"{FUSED}, eager", "note": subject.refusal}
        graph = DecodeGraph(subject.model, held, tokens)
        times = _times(graph.step, device, repeats)
    if device.type == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    logits = graph.logits
    if logits is None or not bool(logits.isfinite().all()):
        return {**row, "note": "the logits are not finite"}
    p10, median, p90 = times
    return {**row, "step_us": median, "p10_us": p10, "p90_us": p90, "repeats": repeats}


def _times(step: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Return 10th percentile, median and 90th percentile of a step in us. Steps are queued without waiting in between."""
    import numpy as np
    import torch

    for _ in range(_WARMUP):
        step()
    if device.type == "cuda":
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            for _ in range(repeats)
        ]
        for begin, end in events:
            begin.record()
            step()
            end.record()
        torch.cuda.synchronize(device)
        times = [begin.elapsed_time(end) * 1e3 for begin, end in events]
    else:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e6)
    p10, median, p90 = np.percentile(times, [10, 50, 90])
    return float(p10), float(median), float(p90)


def _packed_cache(layers: int, shape: Shape, generator: torch.Generator, query: Tensor) -> tuple[FrozenCache, Row]:
    """Return a cache whose layers each have memory of their own, with equal content, and the columns about its attention."""
    import torch

    from wqlab.cache.frozen import FrozenSegments, Steps
    from wqlab.hf.frozen_cache import FrozenCache
    from wqlab.ops.mixed_decode import Backend, MixedKV, Segment, explain

    device = query.device
    backend: Backend = "cuda" if device.type == "cuda" else "reference"
    random = random_cache(shape, MIX, generator)
    size = (shape.batch, shape.num_kv_heads, TEXT_TOKENS, shape.head_dim)
    text = Segment(*(torch.randn(size, device=device, generator=generator).half() for _ in range(2)))
    first = MixedKV((*random.segments, text))
    steps = Steps(layers, shape.batch, ROOM, device)
    stores = [FrozenSegments(_copied(first) if layer else first, steps, layer, backend) for layer in range(layers)]
    explain(query, stores[0].kv, backend)  # raises where it cannot serve
    error = relative_error(stores[0].attend(query), query, stores[0].held())
    if not error <= MAX_ERROR:
        raise RuntimeError(f"attention is wrong: its relative error is {error:.2g}, above {MAX_ERROR}")
    return FrozenCache(stores, steps, shape.seq_len + TEXT_TOKENS), {"backend": backend, "rel_error": error}


def _copied(kv: MixedKV) -> MixedKV:
    """Return packed segments in memory of their own; dense ones are copied when they are frozen."""
    from dataclasses import replace

    from wqlab.ops.mixed_decode import FragmentSegment

    def copy(segment: Any) -> Any:
        if not isinstance(segment, FragmentSegment):
            return segment
        return replace(segment, codes=segment.codes.clone(), meta=segment.meta.clone())

    return replace(kv, segments=tuple(copy(segment) for segment in kv.segments))


class _Variant(NamedTuple):
    """A way to hold a layer in 16 bits and to attend to it.

    Parameters
    ----------
    name : str
        Of the library and how it is called.
    held : callable
        The flat numbers of keys or values -> the view that `attend` takes.
    newest : callable
        That view -> where the newest token lies, [batch, kv_heads, head_dim].
    ends : callable
        That view -> the first and the last row, [2, kv_heads, tokens, head_dim].
    attend : callable
        Query [batch, num_heads, 1, head_dim] and both views -> the output, its heads in the same order.
    """

    name: str
    held: Callable[[Tensor], Tensor]
    newest: Callable[[Tensor], Tensor]
    ends: Callable[[Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


class _DenseStore:
    """One layer in 16 bits. The newest token always takes the last place: attention without a mask then is what it should be."""

    def __init__(self, variant: _Variant, key: Tensor, value: Tensor) -> None:
        self._variant, self._flat = variant, (key, value)
        self._key, self._value = variant.held(key), variant.held(value)

    def write(self, key: Tensor, value: Tensor) -> None:
        self._variant.newest(self._key).copy_(key[:, :, 0])
        self._variant.newest(self._value).copy_(value[:, :, 0])

    def attend(self, query: Tensor, scaling: float | None = None) -> Tensor:
        return self._variant.attend(query, self._key, self._value).reshape(query.shape)

    def error(self, query: Tensor, shape: Shape) -> float:
        key, value = self._variant.ends(self._key), self._variant.ends(self._value)
        return error_at_ends(self.attend(query), query, key, value, shape)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._flat


def _dense_cache(layers: int, shape: Shape, generator: torch.Generator, query: Tensor) -> tuple[FrozenCache, Row]:
    """Return a cache in 16 bits, held as the fastest attention at this shape takes it."""
    import torch

    from wqlab.cache.frozen import Steps
    from wqlab.hf.frozen_cache import FrozenCache

    shape = shape._replace(seq_len=shape.seq_len + TEXT_TOKENS + FP16_NEW)
    flat = [tuple(torch.randn(shape.elements, dtype=torch.float16, device=query.device, generator=generator) for _ in range(2))]
    flat += [tuple(x.clone() for x in flat[0]) for _ in range(layers - 1)]
    tried: list[str] = []
    lacking: torch.OutOfMemoryError | None = None
    best: tuple[float, float, list[_DenseStore], str] | None = None
    for name, make in _variants(shape, query):
        try:
            variant = make()
            stores = [_DenseStore(variant, *pair) for pair in flat]
            error = stores[0].error(query, shape)
            if not error < MAX_BASELINE_ERROR:
                tried.append(f"{name}: relative error {error:.2g}")
                continue
            launches = [partial(store.attend, query) for store in stores]
            found = launch_times(launches, query.device, _TRIALS, warmup=1).median_us
        except torch.OutOfMemoryError as failed:
            lacking = failed.with_traceback(None)
            tried.append(f"{name}: out of memory")
            continue
        except Exception as refused:  # each library refuses a shape with exceptions of its own
            tried.append(f"{name}: {in_one_line(refused)[:120]}")
            continue
        tried.append(f"{name}: {found:.1f}")
        if best is None or found < best[0]:
            best = found, error, stores, name
    if best is None and lacking is not None:
        raise lacking
    if best is None:
        raise RuntimeError(f"no attention can serve this shape: {'; '.join(tried)}")
    steps = Steps(layers, shape.batch, ROOM, query.device)
    columns = {"backend": best[3], "rel_error": best[1], "variants": "; ".join(tried)}
    return FrozenCache(best[2], steps, shape.seq_len - FP16_NEW), columns


def _variants(shape: Shape, query: Tensor) -> Iterator[tuple[str, Callable[[], _Variant]]]:
    """Yield what `wqlab.bench.attention_baselines` found worth trying."""
    if query.device.type != "cuda":
        yield "torch sdpa", partial(_sdpa, shape, "torch sdpa", None, True)
        return
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        for grouped in (False, True):
            name = f"torch {backend.split('_')[0].lower()}, {'heads' if grouped else 'group as tokens'}"
            yield name, partial(_sdpa, shape, name, backend, grouped)
    for layout in ("HND", "NHD"):
        yield f"flashinfer, {layout} pages of 16", partial(_flashinfer, shape, layout, query)


def _sdpa(shape: Shape, name: str, backend: str | None, grouped: bool) -> _Variant:
    """Return SDPA with heads as they are, or with those of a group as query tokens (without a mask it is the same)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    dense = (shape.batch, shape.num_kv_heads, shape.seq_len, shape.head_dim)
    folded = (shape.batch, shape.num_kv_heads, shape.group, shape.head_dim)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chosen = nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend))
        with chosen, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refused backend warns once for each of its reasons
            if grouped:
                return scaled_dot_product_attention(query, key, value, enable_gqa=shape.group > 1)
            return scaled_dot_product_attention(query.reshape(folded), key, value)

    return _Variant(name, lambda x: x.view(dense), lambda x: x[:, :, -1], lambda x: x[[0, -1]], attend)


def _flashinfer(shape: Shape, layout: str, query: Tensor, page: int = 16) -> _Variant:
    """Return flashinfer's decode over a paged cache whose pages lie in order."""
    import importlib

    import torch

    flashinfer: Any = importlib.import_module("flashinfer")  # optional, and no dependency of this package
    batch, heads, dim, pages = shape.batch, shape.num_kv_heads, shape.head_dim, shape.seq_len // page
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
    rows = torch.arange(batch + 1, dtype=torch.int32) * pages
    every_page = torch.arange(batch * pages, dtype=torch.int32, device=query.device)
    wrapper.plan(
        rows, every_page, torch.full((batch,), page, dtype=torch.int32), shape.num_heads, heads, dim, page,
        q_data_type=query.dtype, kv_data_type=query.dtype,
    )  # fmt: skip
    inner = (heads, page, dim) if layout == "HND" else (page, heads, dim)
    order = (0, 2, 1, 3, 4) if layout == "HND" else (0, 3, 1, 2, 4)

    def by_row(x: Tensor) -> Tensor:
        return x.view(batch, pages, *inner)

    def newest(x: Tensor) -> Tensor:
        last = by_row(x)[:, -1]
        return last[:, :, -1] if layout == "HND" else last[:, -1]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = wrapper.run(query.reshape(batch, shape.num_heads, dim), (key, value))
        return result

    return _Variant(
        f"flashinfer {flashinfer.__version__}, {layout} pages of {page}",
        lambda x: x.view(batch * pages, *inner), newest,
        lambda x: by_row(x)[[0, -1]].permute(order).reshape(2, heads, shape.seq_len, dim), attend,
    )  # fmt: skip
