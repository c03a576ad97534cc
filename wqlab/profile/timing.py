"""Times of single launches: many of them recorded in one CUDA graph, over more data than the L2 cache holds."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wqlab.errors import ParameterError

if TYPE_CHECKING:
    import torch

#: Launches in a graph at least: the gap before its first one then counts little.
_LAUNCHES = 24


class Timing(NamedTuple):
    """Time per launch in microseconds.

    Parameters
    ----------
    median_us, p10_us, p90_us : float
        Over the repeats.
    repeats : int
        Replays of the graph.
    launches : int
        In the graph; each repeat's time is divided by it.
    """

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    launches: int


def l2_bytes(device: torch.device) -> int:
    """Return the size of a CUDA device's L2 cache; 0 for a CPU, whose caches torch does not tell."""
    import torch

    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def rotation(num_bytes: int, device: torch.device) -> int:
    """Return how many copies of `num_bytes` to rotate through: four times the L2 cache, and two at least.

    A single copy, however large, would find what the last launch left in the cache.
    """
    return max(-(-4 * l2_bytes(device) // max(num_bytes, 1)), 2)


def launch_times(launches: Sequence[Callable[[], object]], device: torch.device, repeats: int = 50, warmup: int = 3) -> Timing:
    """Return the time per launch.

    Parameters
    ----------
    launches : sequence of callable
        One for each copy of the data; they run in turn. Each queues device work on torch's current stream, without waiting.
    device : torch.device
        On CUDA all are recorded in one graph, and events measure its replays. On a CPU the calls are timed as they are.
    repeats, warmup : int
        Replays that count, and replays before them.

    Raises
    ------
    ParameterError
        Without a launch or a repeat.
    """
    import numpy as np

    if not launches or repeats < 1:
        raise ParameterError(f"{len(launches)} launches and {repeats} repeats: give at least one of each")
    rounds = max(-(-_LAUNCHES // len(launches)), 1) if device.type == "cuda" else 1
    turns = list(itertools.chain.from_iterable([launches] * rounds))
    found = _replays(turns, device, repeats, warmup) if device.type == "cuda" else _calls(turns, repeats, warmup)
    p10, median, p90 = np.percentile(np.asarray(found) / len(turns), [10, 50, 90])
    return Timing(float(median), float(p10), float(p90), repeats, len(turns))


def _calls(turns: list[Callable[[], object]], repeats: int, warmup: int) -> list[float]:
    times = []
    for repeat in range(-warmup, repeats):
        start = time.perf_counter()
        for launch in turns:
            launch()
        if repeat >= 0:
            times.append((time.perf_counter() - start) * 1e6)
    return times


@contextlib.contextmanager
def recorded(turns: Sequence[Callable[[], object]], device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """Record launches in one CUDA graph, which lives as long as the context.

    Parameters
    ----------
    turns : sequence of callable
        What is launched, in order, on torch's current stream.
    device : torch.device
        A CUDA device; it is the current one in the context.
    """
    import torch

    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose and load their kernels before anything is recorded
            for launch in turns[:2]:
                launch()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for launch in turns:
                launch()
        yield graph
        torch.cuda.synchronize()
        graph.reset()


def _replays(turns: list[Callable[[], object]], device: torch.device, repeats: int, warmup: int) -> list[float]:
    import torch

    with recorded(turns, device) as graph:
        for _ in range(warmup):
            graph.replay()
        events = _events(repeats)
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def _events(repeats: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]  # type: ignore[no-untyped-call]
    return list(zip(events[::2], events[1::2], strict=True))


def read_bandwidth(device: torch.device, num_bytes: int = 2 << 30, repeats: int = 30) -> float:
    """Return the best observed rate of reading memory, in bytes per second: the sum over `num_bytes` of float32.

    Parameters
    ----------
    device : torch.device
        Where the data lies.
    num_bytes : int
        Many times the L2 cache.
    repeats : int
        Of which the fastest counts.
    """
    import torch

    data = torch.rand(num_bytes // 4, dtype=torch.float32, device=device)
    times = []
    if device.type == "cuda":
        with torch.cuda.device(device):
            events = _events(repeats)
            for begin, end in events:  # nothing waits in between, so that the device does not fall idle
                begin.record()
                data.sum()
                end.record()
            torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in events]
    else:
        for _ in range(repeats):
            start = time.perf_counter()
            data.sum()
            times.append(time.perf_counter() - start)
    return float(num_bytes / min(times))
