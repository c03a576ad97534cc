"""Benches of several points: each point adds its rows, what is measured so far is kept, and one that fails leaves the others."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from wqlab import paths, progress, records
from wqlab.bench import Bench
from wqlab.errors import MissingPartError, ParameterError, WqlabError
from wqlab.profile import environment
from wqlab.profile.timing import launch_times

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

_log = logging.getLogger(__name__)
_SECONDS = "WQLAB_BENCH_SECONDS"
_REPEATS, _QUICK_REPEATS = 30, 3
#: A result with a larger error has no time.
MAX_ERROR = 1e-2

Row = dict[str, Any]


class PointBench(Bench):
    """A bench on a CUDA device; a quick run on a CPU shows its table with times that mean nothing.

    ``WQLAB_BENCH_SECONDS`` limits a run: points that would begin later are left out. After every point the record so far lies in
    ``bench/<gpu key>`` of the cache folder. Every subclass has a column ``note``, which says what went wrong, and ``provenance``.
    """

    #: Columns whose values are whole numbers that may be missing.
    whole: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def points(self, quick: bool) -> list[Any]:
        """Return what is measured, the most important first."""

    @abstractmethod
    def rows(self, point: Any, device: torch.device, repeats: int) -> list[Row]:
        """Return the rows of a point; a row that could not be measured has a ``note``."""

    @abstractmethod
    def name_of(self, point: Any) -> Row:
        """Return the columns that name a point, for the row of one that fails as a whole."""

    def finish(self, data: pd.DataFrame) -> pd.DataFrame:
        """Return the table with the columns that follow from measured ones. Default: as it is."""
        return data

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return the rows of all points.

        Raises
        ------
        MissingPartError
            Without a CUDA device, unless the run is a quick one.
        ParameterError
            When ``WQLAB_BENCH_SECONDS`` is no number.
        """
        import pandas as pd
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu" and not quick:
            raise MissingPartError(
                f"{self.name} is measured on a CUDA device, and torch finds none; --quick shows the table without"
            )
        out_of_time = clock()
        rows: list[Row] = []
        data = pd.DataFrame()
        provenance = environment.provenance(f"wqlab bench {self.name}")
        points = self.points(quick)
        for i, point in enumerate(points):
            if rows and out_of_time():
                _log.warning("%s is used up; not measured: %s", _SECONDS, ", ".join(map(str, points[i:])))
                break
            progress.report(str(point), i, len(points))
            fresh_memory(device)
            try:
                rows += self.rows(point, device, _QUICK_REPEATS if quick else _REPEATS)
            except (WqlabError, RuntimeError) as failed:  # the other points may still be measured
                rows.append({**self.name_of(point), "note": in_one_line(failed)})
            data = self._table(rows, provenance)
            records.write(self.name, environment.gpu_key(), data, self.columns, provenance, paths.cache_dir() / "bench")
        return data

    def _table(self, rows: list[Row], made: dict[str, Any]) -> pd.DataFrame:
        import pandas as pd

        data = pd.DataFrame(rows).reindex(columns=list(self.columns))
        measured = [name for name in self.columns if name.endswith(("_us", "_error"))]
        data = data.astype(dict.fromkeys(measured, float) | dict.fromkeys(self.whole, "Int64"))
        data["provenance"] = f"{environment.hardware_line()}, commit {made['git_commit'][:12]}, {made['date'][:10]}"
        for name in data.columns:
            if data[name].dtype == object:
                data[name] = data[name].where(data[name].notna(), "")
        return self.finish(data)[list(self.columns)]


def clock() -> Callable[[], bool]:
    """Return a function that says whether the time which ``WQLAB_BENCH_SECONDS`` gives, from now on, is used up."""
    start, given = time.perf_counter(), os.environ.get(_SECONDS, "")
    try:
        seconds = float(given) if given else math.inf
    except ValueError:
        raise ParameterError(f"{_SECONDS} = {given!r} is not a number of seconds; leave it unset for no limit") from None
    return lambda: time.perf_counter() - start > seconds


def timed(launches: Sequence[Callable[[], Tensor]], device: torch.device, repeats: int, error_of: Callable[[Tensor], float]) -> Row:
    """Return the columns of an arrangement: latency, spread and error; a note instead of a time where the result is wrong.

    Parameters
    ----------
    launches : sequence of callable
        One per copy of the cache; each returns its output.
    device : torch.device
        Where they run.
    repeats : int
        Replays that count.
    error_of : callable
        Takes the first launch's output and returns its relative error, infinite where it is not finite.
    """
    error = error_of(launches[0]())
    row: Row = {"rel_error": error, "copies": len(launches), "repeats": repeats}
    if not error <= MAX_ERROR:  # what computes something else has no speed
        return {**row, "note": f"the output is wrong: its relative error is {error:.2g}, above {MAX_ERROR}"}
    times = launch_times(launches, device, repeats)
    return {**row, "latency_us": times.median_us, "p10_us": times.p10_us, "p90_us": times.p90_us}


def guarded(row: Row, make: Callable[[], Row]) -> Row:
    """Return `row` with what `make` adds, or with a note of why it failed."""
    try:
        return {**row, **make()}
    except Exception as failed:  # libraries and compilers fail in ways of their own, and the other rows may still be measured
        return {**row, "note": in_one_line(failed)}


def in_one_line(error: BaseException) -> str:
    """Return an error as a short note."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def fresh_memory(device: torch.device) -> None:
    """Give back what the point before held: the caches of two may not fit together."""
    import torch

    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
