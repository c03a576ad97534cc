"""Energy of decode attention over caches of each width, by the GPU's own energy counter.

One call is one layer's attention for one token of every row. Graphs of calls over rotated caches run back to back for seconds, so
that the counter, which ticks some tens of times a second, sees one steady load. The mixes take turns: a warmer GPU favours none.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from wqlab import progress
from wqlab.bench import Bench, Headline
from wqlab.bench.decode_caches import MIXES, Shape, cache_bytes, random_cache, relative_error
from wqlab.bench.points import MAX_ERROR, in_one_line
from wqlab.errors import MissingPartError, WqlabError
from wqlab.profile import environment, power
from wqlab.profile.timing import recorded, rotation
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

#: LLaVA-OneVision-7B's heads over 100 frames of 256 tokens.
SHAPE = Shape(8, 28, 4, 25600, 128)
_QUICK_SHAPE = Shape(2, 4, 2, 320, 64)
ROUNDS, _QUICK_ROUNDS = 3, 1
#: Seconds of a round that count, and before them, in which clocks and power settle.
_SECONDS, _WARMUP_S = 2.0, 0.7
_IDLE_S = 2.0
_QUICK_SECONDS = 0.02
#: Launches of a graph, and how long the host queues before it waits.
_LAUNCHES, _QUEUED_S = 24, 0.04
SEED = 0


class _Load(NamedTuple):
    """What runs for a mix: `run` starts `calls` calls without waiting."""

    run: Callable[[], object]
    calls: int
    error: float
    copies: int


@register("bench", "energy")
class EnergyBench(Bench):
    """Needs a CUDA device; a quick run on a CPU shows the table, whose times mean nothing and whose energy is unavailable."""

    name = "energy"
    description = "energy of decode attention per call and per token, FP16 against the mixes, by NVML (1 min, a GPU)"
    columns = {  # noqa: RUF012
        "batch": "rows, one query token each",
        "num_heads": "query heads",
        "num_kv_heads": "heads of keys and values",
        "seq_len": "tokens of keys and values per row",
        "head_dim": "channels per head",
        "mix": "fp16, int4, int2, or 10/30/60: percent of the windows of 32 tokens in 16, 4, 2 bits (granularity window_channel)",
        "round": "the mixes take turns",
        "backend": "of mixed_decode: cuda; reference in quick runs without a GPU",
        "latency_us": "seconds / calls: a call of a load that never pauses, us; empty where it failed, see note",
        "seconds": "that the load ran",
        "calls": "in them",
        "energy_per_call_mj": "power_w * latency: one layer's attention of all rows, the whole GPU's energy, mJ",
        "energy_per_token_mj": "energy_per_call_mj / batch: one layer's attention of one token, mJ",
        "above_idle_per_token_mj": "the same of power_w - idle_w, mJ",
        "power_w": "mean power of the GPU and its memory, W",
        "idle_w": "the same before anything ran, with the CUDA context open, W",
        "sampled_w": "mean of NVML's power samples, to compare with power_w, W",
        "sm_clock_mhz": "mean clock of the multiprocessors",
        "ticks": "of the energy counter, or samples, that power_w is from",
        "source": "NVML energy counter, NVML power samples, or unavailable: why",
        "idle_source": "the same of idle_w",
        "bytes": "keys and values as they are stored",
        "bytes_fp16": "what the same keys and values take in 16 bits",
        "copies": "caches that the load rotates through; together four times the L2 cache, or two",
        "rel_error": "norm of the difference to the float32 reference over the norm of it, two (row, KV head) pairs",
        "note": "what went wrong, else empty",
        "seed": "of the random caches",
        "provenance": "GPU, commit and day",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per mix and round.

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
                f"{self.name} is measured on a CUDA device, and torch finds none; --quick shows the table without"
            )
        shape, rounds = (_QUICK_SHAPE, _QUICK_ROUNDS) if quick else (SHAPE, ROUNDS)
        seconds = _QUICK_SECONDS if quick else _SECONDS
        if device.type == "cuda":
            torch.zeros(1, device=device)  # opens the context, which raises the clocks
            torch.cuda.synchronize()
        _, idle = power.measured(lambda: time.sleep(seconds if quick else _IDLE_S), device)
        rows: list[dict[str, Any]] = []
        with contextlib.ExitStack() as stack:
            loads = {mix: _prepared(stack, shape, mix, device) for mix in MIXES}
            for turn, mix in itertools.product(range(rounds), MIXES):
                progress.report(f"{mix}, round {turn}", len(rows), rounds * len(MIXES))
                rows.append({**_row(shape, mix, device, turn), **_measured(loads[mix], device, seconds, quick)})
        data = pd.DataFrame(rows).assign(idle_w=idle.watts, idle_source=idle.source)
        return self._table(data)

    def _table(self, data: pd.DataFrame) -> pd.DataFrame:
        data = data.reindex(columns=list(self.columns))
        numbers = [name for name in self.columns if name.endswith(("_us", "_w", "_mhz", "_error")) or name == "seconds"]
        data[numbers] = data[numbers].astype(float)
        data = data.astype(dict.fromkeys(("calls", "ticks", "copies"), "Int64"))
        data["energy_per_call_mj"] = data["power_w"] * data["latency_us"] / 1e3
        data["energy_per_token_mj"] = data["energy_per_call_mj"] / data["batch"]
        above = (data["power_w"] - data["idle_w"]) * data["latency_us"] / 1e3
        data["above_idle_per_token_mj"] = above / data["batch"]
        for name in ("note", "source"):
            data[name] = data[name].astype(object).where(data[name].notna(), "")
        data["provenance"] = environment.provenance_line()
        return data

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the energy of a token beside that of FP16, where it is known."""
        means = data.groupby("mix", sort=False)["energy_per_token_mj"].mean()
        return [
            Headline(f"{mix}, one layer's attention of a token", float(means[mix]), float(means["fp16"]), "mJ")
            for mix in means.index
            if math.isfinite(means[mix])
        ]


def _row(shape: Shape, mix: str, device: torch.device, turn: int) -> dict[str, Any]:
    return {
        **shape._asdict(), "mix": mix, "round": turn, "backend": "cuda" if device.type == "cuda" else "reference",
        "bytes": cache_bytes(shape, mix).total, "bytes_fp16": shape.fp16_bytes, "seed": SEED,
    }  # fmt: skip


def _prepared(stack: contextlib.ExitStack, shape: Shape, mix: str, device: torch.device) -> _Load | str:
    """Return the load of a mix, whose graph lives as long as `stack`, or why there is none."""
    try:
        launches, error = _launches(shape, mix, device)
        if not error <= MAX_ERROR:  # what computes something else has no energy
            return f"the output is wrong: its relative error is {error:.2g}, above {MAX_ERROR}"
        if device.type == "cpu":
            return _Load(launches[0], 1, error, len(launches))
        turns = launches * max(-(-_LAUNCHES // len(launches)), 1)
        return _Load(stack.enter_context(recorded(turns, device)).replay, len(turns), error, len(launches))
    except (WqlabError, RuntimeError) as failed:  # the other mixes may still be measured
        return in_one_line(failed)


def _launches(shape: Shape, mix: str, device: torch.device) -> tuple[list[Callable[[], Tensor]], float]:
    """Return a launch for each cache of the rotation, and the first one's relative error."""
    import torch

    from wqlab.ops.mixed_decode import cuda_kernel, mixed_decode

    generator = torch.Generator(device).manual_seed(SEED)
    caches = [random_cache(shape, mix, generator) for _ in range(rotation(cache_bytes(shape, mix).total, device))]
    size = (shape.batch, shape.num_heads, 1, shape.head_dim)
    query = (2 * torch.randn(size, device=device, generator=generator)).half()
    launches: list[Callable[[], Tensor]]
    if device.type == "cuda":
        ready = [cuda_kernel.prepared(query, cache, shape.head_dim**-0.5) for cache in caches]
        for one in ready:
            one.call.output.fill_(math.nan)
        launches = [one.launch for one in ready]
    else:
        launches = [lambda cache=cache: mixed_decode(query, cache, backend="reference") for cache in caches]  # type: ignore[misc]
    return launches, relative_error(launches[0](), query, caches[0])


def _measured(load: _Load | str, device: torch.device, seconds: float, quick: bool) -> dict[str, Any]:
    if isinstance(load, str):
        return {"note": load, "source": "unavailable: nothing ran"}
    _run(load, device, 0.0 if quick else _WARMUP_S)
    calls, energy = power.measured(lambda: _run(load, device, seconds), device)
    return {
        "latency_us": energy.seconds / calls * 1e6, "seconds": energy.seconds, "calls": calls, "power_w": energy.watts,
        "sampled_w": energy.sampled_watts, "sm_clock_mhz": energy.sm_clock_mhz, "ticks": energy.ticks, "source": energy.source,
        "copies": load.copies, "rel_error": load.error, "note": "",
    }  # fmt: skip


def _run(load: _Load, device: torch.device, seconds: float) -> int:
    """Keep the device busy for so long, and return the calls; it is idle when this returns."""
    import torch

    calls, queued, end = 0, 1, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        for _ in range(queued):
            load.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        calls += queued * load.calls
        if now >= end:
            return calls
        # Waiting costs some microseconds in which the device is idle: queue as much as takes tens of milliseconds.
        queued = max(1, min(round(queued * _QUEUED_S / max(now - start, 1e-6)), 10_000))
