"""`mixed_decode` on a GPU: the fast kernel at shapes of serving, against full precision in other libraries and against the floor.

The floor is the bytes of a cache over the read bandwidth that this run observed. Values do not matter for speed, so codes are
random bytes; each shape and mix is checked against the reference once, outputs hold NaN before, and the caches of a graph fill
four times the L2 cache.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wqlab import paths, progress, records
from wqlab.bench import Bench, Headline, attention_baselines
from wqlab.bench.decode_caches import MIXES, Shape, cache_bytes, random_cache, relative_error
from wqlab.errors import MissingPartError, ParameterError, WqlabError
from wqlab.profile import environment
from wqlab.profile.timing import Timing, launch_times, read_bandwidth, rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from wqlab.ops.mixed_decode import Backend, MixedKV

_log = logging.getLogger(__name__)

#: The most important first: LLaVA-OneVision-7B's heads over 100 frames of 256 tokens.
SHAPES = (
    Shape(8, 28, 4, 25600, 128), Shape(8, 32, 8, 32768, 128), Shape(60, 28, 4, 1280, 128), Shape(1, 28, 4, 25600, 128),
    Shape(8, 32, 32, 4096, 128), Shape(1, 32, 8, 131072, 128), Shape(1, 32, 32, 32768, 128), Shape(1, 14, 2, 25600, 64),
    Shape(1, 32, 32, 131072, 128),
)  # fmt: skip
#: Triton compiles each mix of each shape anew.
TRITON_SHAPES = SHAPES[:2]
QUICK = (Shape(2, 4, 2, 320, 64),)
SEED = 0
_REPEATS, _QUICK_REPEATS = 50, 3
#: Keys and values of a smaller cache sit in the L2 cache of a large GPU between two steps, so they say little of memory traffic.
LARGE_BYTES = 64_000_000
#: A result with a larger error has no time.
_MAX_ERROR = 1e-2
_SECONDS = "WQLAB_BENCH_SECONDS"


def summary(data: pd.DataFrame) -> pd.DataFrame:
    """Return, for each mix, geometric means over the shapes whose keys and values take 64 MB or more in 16 bits.

    Parameters
    ----------
    data : pandas.DataFrame
        A record's table, as `MixedDecodeBench` writes it.

    Returns
    -------
    pandas.DataFrame
        mix, shapes (how many counted), ratio and fraction_of_floor; shapes that lack a value are left out of its mean.
    """
    import numpy as np
    import pandas as pd

    large = data[data["bytes_fp16"] >= LARGE_BYTES]
    rows = []
    for mix, part in large.groupby("mix", sort=False):
        means = [float(np.exp(np.log(part[name].dropna()).mean())) for name in ("ratio", "fraction_of_floor")]
        rows.append((mix, int(part["ratio"].notna().sum()), *means))
    return pd.DataFrame(rows, columns=["mix", "shapes", "ratio", "fraction_of_floor"])


def with_floor(data: pd.DataFrame, bytes_per_second: float) -> pd.DataFrame:
    """Return the table with what follows from its measured columns: the floor, and the fastest FP16 baseline with its ratio."""
    import numpy as np

    data = data.copy()
    names = {_column(name): name for name in attention_baselines.FP16}
    times = data[list(names)].astype(float)
    # Where no baseline ran there is no fastest one; idxmin refuses such rows.
    fastest = times.fillna(math.inf).idxmin(axis=1).map(names)
    known = times.notna().any(axis=1)
    data["baseline"] = fastest.where(known, "")
    data["baseline_us"] = times.min(axis=1)
    data["ratio"] = data["baseline_us"] / data["latency_us"]
    data["read_bandwidth_tb_s"] = bytes_per_second / 1e12
    data["floor_us"] = data["bytes"] / bytes_per_second * 1e6
    data["fraction_of_floor"] = data["floor_us"] / data["latency_us"]
    return data.replace([np.inf, -np.inf], np.nan)


def _column(baseline: str) -> str:
    return baseline.replace(" ", "_") + "_us"


class _Clock:
    """Whether the time that this bench may take is used up."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        given = os.environ.get(_SECONDS, "")
        try:
            self._seconds = float(given) if given else math.inf
        except ValueError:
            raise ParameterError(f"{_SECONDS} = {given!r} is not a number of seconds; leave it unset for no limit") from None

    def out_of_time(self) -> bool:
        return time.perf_counter() - self._start > self._seconds


@register("bench", "mixed_decode")
class MixedDecodeBench(Bench):
    """The fast kernel needs a CUDA device. A quick run on a CPU shows the table with the reference's times, which mean nothing.

    ``WQLAB_BENCH_SECONDS`` limits a run: shapes that would begin later are left out. After every shape the record so far lies in
    ``bench/<gpu key>`` of the cache folder, so that a run which is stopped has not been for nothing.
    """

    name = "mixed_decode"
    description = (
        "decode attention over FP16, INT4, INT2 and mixed caches against torch and flashinfer, and the floor (2 min, a GPU)"
    )
    columns = {  # noqa: RUF012
        "batch": "rows, one query token each",
        "num_heads": "query heads",
        "num_kv_heads": "heads of keys and values",
        "seq_len": "tokens of keys and values per row",
        "head_dim": "channels per head",
        "mix": "fp16, int4, int2, or 10/30/60: percent of the windows of 32 tokens in 16, 4, 2 bits (granularity window_channel)",
        "backend": "of mixed_decode: cuda; reference in quick runs without a GPU",
        "latency_us": "median time of a launch in a CUDA graph over rotated caches, us; empty where it failed, see note",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph, of this and of the baseline's time",
        "copies": "caches that the graph rotates through; together four times the L2 cache, or two",
        "num_splits": "programs that share a KV head's tokens",
        "rel_error": "norm of the difference to the float32 reference over the norm of it, two (row, KV head) pairs",
        "bytes": "keys and values as they are stored: dense, codes and metadata",
        "bytes_dense": "of windows in 16 bits",
        "bytes_codes": "of codes in 4 and 2 bits",
        "bytes_metadata": "of scales and minima",
        "bytes_fp16": "what the same keys and values take in 16 bits",
        "read_bandwidth_tb_s": "best observed rate of a sum over 2 GiB in this run, TB/s",
        "floor_us": "bytes over that rate, us",
        "fraction_of_floor": "floor_us / latency_us; 1 is the floor",
        "baseline": "the fastest of the FP16 baselines",
        "baseline_us": "its median, us",
        "ratio": "baseline_us / latency_us; above 1 mixed_decode is faster",
        "torch_flash_us": "SDPA, flash attention over a cache in 16 bits, us",
        "torch_cudnn_us": "SDPA, cuDNN, us",
        "torch_efficient_us": "SDPA, memory-efficient attention, us",
        "flashinfer_fp16_us": "flashinfer, paged decode, 16 bits, us",
        "flashinfer_fp8_us": "flashinfer, paged decode, keys and values in FP8 (e4m3, one scale), us; not a baseline of ratio",
        "variants": "the fastest way to call each baseline, whose time is given",
        "unavailable": "baselines without a time, and why",
        "triton_us": "the Triton backend at the same mix, windows packed row by row, us; empty where it was not run",
        "triton_rel_error": "as rel_error",
        "note": "what went wrong, else empty",
        "seed": "of the random caches",
        "provenance": "GPU, commit and day",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per shape and mix.

        Raises
        ------
        MissingPartError
            Without a CUDA device, unless the run is a quick one.
        """
        import pandas as pd
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu" and not quick:
            raise MissingPartError(
                "mixed_decode is measured on a CUDA device, and torch finds none; --quick shows the table without"
            )
        clock, repeats = _Clock(), _QUICK_REPEATS if quick else _REPEATS
        size = (16 << 20) if quick else (2 << 30)
        bandwidth = read_bandwidth(device, size)
        shapes = QUICK if quick else SHAPES
        rows: list[dict[str, Any]] = []
        data = pd.DataFrame()
        for i, shape in enumerate(shapes):
            if rows and clock.out_of_time():
                left = ", ".join(str(tuple(other)) for other in shapes[i:])
                _log.warning("%s is used up; not measured: %s", _SECONDS, left)
                break
            progress.report(f"{tuple(shape)}", i, len(shapes))
            others = self._baselines(shape, device, repeats, clock)
            rows += [{**self._row(shape, mix, device, repeats), **others} for mix in MIXES]
            # Whatever else the machine did a while ago may be over: the best rate so far is the floor's.
            bandwidth = max(bandwidth, read_bandwidth(device, size))
            data = self._keep(rows, bandwidth)
        for row in rows if device.type == "cuda" else []:  # last, because compiling takes longer than measuring
            shape = Shape(*(row[name] for name in Shape._fields))
            if shape in TRITON_SHAPES and not clock.out_of_time():
                found = self._triton(shape, row["mix"], device, repeats)
                row |= {**found, "note": "; ".join(filter(None, [row.get("note"), found.get("note")]))}
                data = self._keep(rows, bandwidth)
        return data

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the first shape's time per mix beside the fastest FP16 baseline's, and means over the large shapes."""
        found = []
        first = SHAPES[0]
        for row in data.to_dict("records"):
            if tuple(row[name] for name in Shape._fields) == first:
                found.append(Headline(f"{row['mix']} at {tuple(first)}", row["latency_us"], row["baseline_us"], "us"))
                found.append(Headline(f"{row['mix']} at {tuple(first)}, of the floor", row["fraction_of_floor"], None, "ratio"))
        for row in summary(data).to_dict("records"):
            name = f"{row['mix']}, mean over {row['shapes']} large shapes"
            found.append(Headline(f"{name}, times as fast as FP16", row["ratio"], 1.0, "ratio"))
            found.append(Headline(f"{name}, of the floor", row["fraction_of_floor"], None, "ratio"))
        return found

    def _keep(self, rows: list[dict[str, Any]], bandwidth: float) -> pd.DataFrame:
        """Return the table, which is also written as a record to the cache folder."""
        data = self._table(rows, bandwidth)
        folder, found = paths.cache_dir() / "bench", environment.provenance(f"wqlab bench {self.name}")
        records.write(self.name, environment.gpu_key(), data, self.columns, found, folder)
        return data

    def _table(self, rows: list[dict[str, Any]], bandwidth: float) -> pd.DataFrame:
        import pandas as pd

        data = pd.DataFrame(rows).reindex(columns=list(self.columns))
        times = [name for name in self.columns if name.endswith(("_us", "error"))]
        data[times] = data[times].astype(float)
        data = data.astype(dict.fromkeys(("repeats", "copies", "num_splits"), "Int64"))
        found = environment.provenance()
        data["provenance"] = f"{environment.hardware_line()}, commit {found['git_commit'][:12]}, {found['date'][:10]}"
        for name in ("variants", "unavailable", "note"):
            data[name] = data[name].astype(object).where(data[name].notna(), "")
        return with_floor(data, bandwidth)[list(self.columns)]

    @staticmethod
    def _baselines(shape: Shape, device: torch.device, repeats: int, clock: _Clock) -> dict[str, Any]:
        _new_memory(device)
        results = attention_baselines.measure(shape, device, repeats, clock.out_of_time)
        times = {_column(name): found.timing.median_us if found.timing else math.nan for name, found in results.items()}
        variants = "; ".join(f"{name}: {found.variant}" for name, found in results.items() if found.timing)
        reasons = "; ".join(f"{name}: {found.reason}" for name, found in results.items() if not found.timing)
        return {**times, "variants": variants, "unavailable": reasons}

    @staticmethod
    def _row(shape: Shape, mix: str, device: torch.device, repeats: int) -> dict[str, Any]:
        size = cache_bytes(shape, mix)
        row: dict[str, Any] = {
            **shape._asdict(), "mix": mix, "backend": "cuda" if device.type == "cuda" else "reference", "repeats": repeats,
            "bytes": size.total, **{f"bytes_{name}": value for name, value in size._asdict().items()},
            "bytes_fp16": shape.fp16_bytes, "seed": SEED,
        }  # fmt: skip
        _new_memory(device)
        try:
            case = _Case(shape, mix, device)
            times = case.times(repeats)
        except (WqlabError, RuntimeError) as failed:  # the other mixes and shapes may still be measured
            return {**row, "note": " ".join(str(failed).split())[:300]}
        row |= {"copies": len(case.caches), "num_splits": case.num_splits, "rel_error": case.error}
        if case.error > _MAX_ERROR:  # what computes something else has no speed
            wrong = "not finite or not written" if math.isinf(case.error) else f"wrong (rel_error is above {_MAX_ERROR})"
            return {**row, "note": f"an output was {wrong}, after {times.median_us:.1f} us"}
        return {**row, "latency_us": times.median_us, "p10_us": times.p10_us, "p90_us": times.p90_us}

    @staticmethod
    def _triton(shape: Shape, mix: str, device: torch.device, repeats: int) -> dict[str, Any]:
        _new_memory(device)
        try:
            case = _Case(shape, mix, device, backend="triton")
            return {"triton_us": case.times(repeats).median_us, "triton_rel_error": case.error}
        except Exception as failed:  # a compiler's errors are many, and the other rows do not need it
            return {"note": f"triton: {type(failed).__name__}: {' '.join(str(failed).split())}"[:300]}


class _Case:
    """The caches of a shape and mix, and a launch over each."""

    def __init__(self, shape: Shape, mix: str, device: torch.device, backend: Backend | None = None) -> None:
        import torch

        from wqlab.ops.mixed_decode import explain

        self.backend: Backend = backend or ("cuda" if device.type == "cuda" else "reference")
        self.device, self.num_splits, self.error = device, 1, math.inf
        generator = torch.Generator(device).manual_seed(SEED)
        copies = rotation(cache_bytes(shape, mix).total, device)
        self.caches = [random_cache(shape, mix, generator, fragments=self.backend != "triton") for _ in range(copies)]
        size = (shape.batch, shape.num_heads, 1, shape.head_dim)
        self.query = (2 * torch.randn(size, device=device, generator=generator)).half()
        explain(self.query, self.caches[0], self.backend)  # raises where it cannot serve

    def times(self, repeats: int) -> Timing:
        """Return the time of a launch; `error` is then that of the first cache, infinite if any output is not finite."""
        if self.backend == "cuda":
            launches, outputs = self._prepared()
        else:
            launches, outputs = self._calls()
        for output in outputs:
            output.fill_(math.nan)
        first = launches[0]()
        self.error = relative_error(first, self.query, self.caches[0])
        found = launch_times(launches, self.device, repeats)
        if not all(bool(output.isfinite().all()) for output in outputs):
            self.error = math.inf
        return found

    def _prepared(self) -> tuple[list[Callable[[], Tensor]], list[Tensor]]:
        import torch

        from wqlab.ops.mixed_decode import cuda_kernel

        ready = [cuda_kernel.prepared(self.query, cache, self.query.shape[-1] ** -0.5) for cache in self.caches]
        for one in ready:
            for tensor in one.call.kept:
                if tensor.dtype == torch.float32:
                    tensor.fill_(math.nan)  # the workspace needs no initial values either
        self.num_splits = ready[0].call.grid[1]
        return [one.launch for one in ready], [one.call.output for one in ready]

    def _calls(self) -> tuple[list[Callable[[], Tensor]], list[Tensor]]:
        from wqlab.ops.mixed_decode import mixed_decode

        def call(cache: MixedKV) -> Callable[[], Tensor]:
            return lambda: mixed_decode(self.query, cache, backend=self.backend)

        return [call(cache) for cache in self.caches], []


def _new_memory(device: torch.device) -> None:
    """Give back what the case before held: the caches of two cases may not fit together."""
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
