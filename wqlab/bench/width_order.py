"""Decode attention over widths that stay interleaved, as the plan leaves them, against widths that were reordered (Table 8, C).

All arrangements hold the same windows and run the same arithmetic with the same pipeline. What differs is whether windows of one
width lie together (`mixed_decode`), are found through a table in one launch, or get a launch per run of equal widths.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab.bench import Headline
from wqlab.bench.decode_caches import WINDOW_SIZE, Shape, cache_bytes, random_cache, relative_error, split_tokens
from wqlab.bench.points import PointBench, Row, clock, guarded, timed
from wqlab.errors import MissingPartError
from wqlab.profile.timing import launch_times, rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from wqlab.ops.mixed_decode import MixedKV
    from wqlab.ops.mixed_decode.in_place import Interleaved

#: A long video, and the batch of the paper's Table 8 (60 requests, 5 frames of 256 tokens).
SHAPES = (Shape(8, 28, 4, 25600, 128), Shape(60, 28, 4, 1280, 128))
QUICK = (Shape(1, 4, 2, 640, 64),)
MIX = "10/30/60"
PLANS = ("clustered", "independent")
#: Windows of a run of the clustered plan, in the mean.
RUN = 8
SEED = 0

REORDERED = "reordered, one launch"
TABLE, SORTED = "in place, one launch, table in the order of the video", "in place, one launch, table sorted by width"
RUNS = "in place, one launch per run of equal widths"
ARRANGEMENTS = (REORDERED, TABLE, SORTED, RUNS)
#: Ways to launch runs: programs per KV head, and streams side by side. The fastest counts.
_WAYS = ((1, 1), (4, 1), (1, 4), (1, 8))
#: Launches of runs that are counted; profiling each takes a tenth of a second.
_COUNTED = 24


class Point(NamedTuple):
    """A decode step, and how the widths of its windows follow each other."""

    shape: Shape
    plan: str

    def __str__(self) -> str:
        """Return both in a few words."""
        return f"{tuple(self.shape)} {self.plan}"


_COUNTED_POINT = Point(SHAPES[0], PLANS[0])


@register("bench", "width_order")
class WidthOrderBench(PointBench):
    """Times of one layer's attention, and what its loads look like to the hardware's counters where ncu can read them."""

    name = "width_order"
    description = "decode attention over widths in the order of the video against reordered ones, with counters (50 s, a GPU)"
    whole = ("windows", "runs", "launches", "bytes", "repeats", "copies", "counted_launches")
    columns = {  # noqa: RUF012
        "batch": "rows, one query token each",
        "num_heads": "query heads",
        "num_kv_heads": "heads of keys and values",
        "seq_len": "tokens of keys and values per row",
        "head_dim": "channels per head",
        "plan": "order of the widths, 10/30/60 percent of the windows in 16, 4, 2 bits: clustered in runs of about "
        f"{RUN} windows, or independent (shuffled)",
        "windows": "of 32 tokens, per row",
        "runs": "of equal widths",
        "arrangement": "; ".join(
            (
                f"{REORDERED}: mixed_decode",
                f"{TABLE}: each unit dispatches on its width",
                f"{SORTED}: windows lie where they were and are read width by width",
                f"{RUNS}: partial results merged by the last program",
            )
        ),
        "way": "of several launches: programs per KV head, and streams side by side; the fastest of those tried",
        "launches": "of one call",
        "latency_us": "median time of a call in a CUDA graph over rotated caches, us; empty where it failed, see note",
        "p10_us": "10th percentile, us",
        "p90_us": "90th percentile, us",
        "repeats": "replays of the graph",
        "copies": "caches that the graph rotates through; together four times the L2 cache, or two",
        "rel_error": "norm of the difference to the float32 reference over the norm of it, two (row, KV head) pairs",
        "bytes": "keys and values as they are stored; the table of places, 4 bytes per unit, is not counted",
        "reordered_us": "latency_us of the reordered cache at the same shape and plan, us",
        "ratio": "latency_us / reordered_us; above 1 reordering is faster",
        "counted_launches": f"launches that ncu counted, one call or its first {_COUNTED}",
        "load_requests": "global loads into registers, per warp (l1tex__t_requests_pipe_lsu_mem_global_op_ld)",
        "load_sectors": "32-byte sectors that they touch",
        "copy_requests": "copies to shared memory (LDGSTS, cp.async), per warp",
        "copy_sectors": "32-byte sectors that they touch",
        "sectors_per_request": "of both together; 16 is a warp's 512 contiguous bytes",
        "dram_bytes": "read from device memory (dram__bytes_read)",
        "counters": "where the counts come from, or unavailable: why",
        "note": "what went wrong, else empty",
        "seed": "of the random caches and of the order",
        "provenance": "GPU, commit and day",
    }

    def points(self, quick: bool) -> list[Any]:
        """Return shapes times plans."""
        self._out_of_time = clock()
        return [Point(shape, plan) for shape in (QUICK if quick else SHAPES) for plan in PLANS]

    def name_of(self, point: Point) -> Row:
        """Return shape, plan and seed."""
        widths = order_of(point)
        runs = sum(1 for _ in itertools.groupby(widths))
        size = cache_bytes(point.shape, MIX).total
        return {
            **point.shape._asdict(), "plan": point.plan, "windows": len(widths), "runs": runs, "bytes": size, "seed": SEED,
        }  # fmt: skip

    def rows(self, point: Point, device: torch.device, repeats: int) -> list[Row]:
        """Return one row per arrangement."""
        case, named = _Case(point, device), self.name_of(point)
        rows = [
            guarded({**named, "arrangement": arrangement}, partial(case.measure, arrangement, repeats))
            for arrangement in ARRANGEMENTS
        ]
        # The counts of one point tell how windows are loaded; another would add half a minute and little news.
        wanted = point == _COUNTED_POINT and device.type == "cuda" and not self._out_of_time()
        found = counters(point) if wanted else [_not_counted(point, device)] * len(ARRANGEMENTS)
        return [{**row, **counts} for row, counts in zip(rows, found, strict=True)]

    def finish(self, data: pd.DataFrame) -> pd.DataFrame:
        """Add the ratio to the reordered cache."""
        keys = [*Shape._fields, "plan"]
        known = data[data["arrangement"] == REORDERED].set_index(keys)["latency_us"]
        data["reordered_us"] = [float(known.get(tuple(row), float("nan"))) for row in data[keys].itertuples(index=False)]
        data["ratio"] = data["latency_us"] / data["reordered_us"]
        return data

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the arrangements in place against the reordered one, for the clustered plan."""
        found = []
        rows = data[data["arrangement"].isin([TABLE, RUNS]) & (data["plan"] == PLANS[0]) & data["ratio"].notna()]
        for row in rows.itertuples():
            printed = (row.batch, row.seq_len, row.arrangement) == (SHAPES[1].batch, SHAPES[1].seq_len, TABLE)
            way = "one launch" if row.arrangement == TABLE else "a launch per run"
            name = f"widths in place ({way}) to reordered, {row.batch} x {row.seq_len:,} tokens"
            found.append(Headline(name, float(str(row.ratio)), None, "ratio", "table8-reorder-speed" if printed else None))
        return found


def order_of(point: Point) -> tuple[int, ...]:
    """Return the bits of each window: the same numbers of each for every plan, in a random order.

    An independent plan is a shuffle of windows. A clustered one is a shuffle of pieces, into which each width's windows are cut at
    random places; pieces of one width that meet are one run, and they are so short that a run then has about `RUN` windows.
    """
    draw = random.Random(SEED)
    tokens = split_tokens(point.shape.seq_len, MIX)
    counts = dict(zip((16, 4, 2), (n // WINDOW_SIZE for n in tokens), strict=True))
    windows = sum(counts.values())
    length = RUN * (1 - sum((count / windows) ** 2 for count in counts.values())) if point.plan == "clustered" else 1
    pieces = []
    for bits, count in counts.items():
        number = min(max(round(count / length), 1), count)
        cuts = sorted(draw.sample(range(1, count), number - 1)) if count else []
        pieces += [[bits] * (end - start) for start, end in itertools.pairwise([0, *cuts, count])]
    draw.shuffle(pieces)
    return tuple(itertools.chain.from_iterable(pieces))


class _Case:
    """The caches of a point, reordered and interleaved."""

    def __init__(self, point: Point, device: torch.device, copies: int | None = None) -> None:
        import torch

        from wqlab.ops.mixed_decode import in_place

        self.shape, self.device = point.shape, device
        generator = torch.Generator(device).manual_seed(SEED)
        copies = rotation(cache_bytes(self.shape, MIX).total, device) if copies is None else copies
        self.caches = [random_cache(self.shape, MIX, generator) for _ in range(copies)]
        self.interleaved = [in_place.interleave(cache, order_of(point)) for cache in self.caches]
        size = (self.shape.batch, self.shape.num_heads, 1, self.shape.head_dim)
        self.query = (2 * torch.randn(size, device=device, generator=generator)).half()
        self.scaling = self.shape.head_dim**-0.5

    def measure(self, arrangement: str, repeats: int) -> Row:
        """Return the columns of an arrangement."""
        way, calls, launches = "", 1, self.launches(arrangement)
        if arrangement == RUNS:
            way, launches, calls = self._fastest_runs(repeats)
        found = timed(launches, self.device, repeats, lambda output: relative_error(output, self.query, self.caches[0]))
        return {**found, "way": way, "launches": calls}

    def launches(self, arrangement: str, way: tuple[int, int] = _WAYS[0]) -> list[Callable[[], Tensor]]:
        """Return a call per copy, its output filled with NaN."""
        import torch

        from wqlab.ops.mixed_decode import cuda_kernel, in_place

        if self.device.type != "cuda":
            if arrangement == REORDERED:
                return [partial(self._reference, cache) for cache in self.caches]
            return [partial(self._reference_in_order, kv) for kv in self.interleaved]
        ready: list[Any]
        if arrangement == REORDERED:
            ready = [cuda_kernel.prepared(self.query, cache, self.scaling) for cache in self.caches]
        elif arrangement == RUNS:
            ready = [in_place.prepared_runs(self.query, kv, self.scaling, *way) for kv in self.interleaved]
        else:
            order = "video" if arrangement == TABLE else "width"
            ready = [in_place.prepared(self.query, kv, self.scaling, order) for kv in self.interleaved]  # type: ignore[arg-type]
        for one in ready:
            one.call.output.fill_(torch.nan)
        return [one.launch for one in ready]

    def _fastest_runs(self, repeats: int) -> tuple[str, list[Callable[[], Tensor]], int]:
        best: tuple[float, tuple[int, int], list[Callable[[], Tensor]]] | None = None
        for way in _WAYS if self.device.type == "cuda" else _WAYS[:1]:
            launches = self.launches(RUNS, way)
            time = launch_times(launches, self.device, max(repeats // 10, 1), warmup=1).median_us
            if best is None or time < best[0]:
                best = time, way, launches
        assert best is not None
        splits, streams = best[1]
        name = f"{splits} program{'s' * (splits > 1)} per KV head, {streams} stream{'s' * (streams > 1)}"
        return name, best[2], self.interleaved[0].runs

    def _reference(self, cache: MixedKV) -> Tensor:
        from wqlab.ops.mixed_decode import mixed_decode

        return mixed_decode(self.query, cache, backend="reference")

    def _reference_in_order(self, kv: Interleaved) -> Tensor:
        from wqlab.ops.mixed_decode import in_place

        return self._reference(in_place.in_order(kv))


def counters(point: Point) -> list[Row]:
    """Return what ncu counts for each arrangement, in their order, or why it cannot; the program it runs is `launch_each`."""
    from wqlab.profile import counters as ncu

    code = f"from wqlab.bench.width_order import Point, Shape, launch_each; launch_each({point!r})"
    try:
        found = ncu.global_loads([sys.executable, "-c", code], "^mixed_decode")
        ends = [1, 2, 3, len(found)]
        if len(found) < len(ARRANGEMENTS):
            raise MissingPartError(f"ncu counted {len(found)} launches of {len(ARRANGEMENTS)} arrangements")
    except MissingPartError as missing:
        return [{"counters": f"unavailable: {missing}"[:300]}] * len(ARRANGEMENTS)
    rows: list[Row] = []
    for first, end in itertools.pairwise([0, *ends]):
        launches = found[first:end]
        total = {name: sum(launch[name] for launch in launches) for name in launches[0]}
        requests, sectors = (total[what] + total[f"copy_{what}"] for what in ("requests", "sectors"))
        rows.append(
            {
                "counted_launches": len(launches), "load_requests": total["requests"], "load_sectors": total["sectors"],
                "copy_requests": total["copy_requests"], "copy_sectors": total["copy_sectors"], "dram_bytes": total["dram_bytes"],
                "sectors_per_request": sectors / requests if requests else float("nan"), "counters": "ncu",
            }
        )  # fmt: skip
    return rows


def launch_each(point: Point) -> None:
    """Launch every arrangement once, of runs the first ones: a program for ncu, also by hand.

    For example ``ncu --set full python -c "from wqlab.bench.width_order import *; launch_each(Point(SHAPES[0], 'clustered'))"``.
    """
    import torch

    from wqlab.ops.mixed_decode import in_place

    case = _Case(point, torch.device("cuda"), copies=1)
    for arrangement in ARRANGEMENTS[:-1]:
        case.launches(arrangement)[0]()
    ready = in_place.prepared_runs(case.query, case.interleaved[0], case.scaling)
    lane = ready.call.lanes[0][:_COUNTED]
    ready._replace(call=ready.call._replace(lanes=(lane,))).launch()
    torch.cuda.synchronize()


def _not_counted(point: Point, device: torch.device) -> Row:
    if device.type != "cuda":
        return {"counters": "unavailable: torch finds no CUDA device"}
    return {"counters": "not counted: " + ("the time was used up" if point == _COUNTED_POINT else f"see {_COUNTED_POINT}")}
