"""Hardware counters of single kernels, by Nsight Compute (``ncu``), where it is installed and the driver lets it read them.

`table` counts the launches of a small driver (`wqlab.profile.driver`): with nsight-python where it and an ncu that it accepts are
installed, else with ncu alone, and gives the same table either way. `global_loads` counts any program, with ncu alone.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wqlab.errors import MissingPartError

if TYPE_CHECKING:
    import pandas as pd

#: Global loads of a warp (requests) and the 32-byte sectors that they touch; LDGSTS is cp.async, with and without the L1 cache.
_LOADS = "l1tex__t_{what}_pipe_lsu_mem_global_op_ld"
_COPIES = (
    ("l1tex__t_{what}_pipe_lsu_mem_global_op_ldgsts",),
    ("l1tex__t_{what}_pipe_lsu_mem_global_op_ldgsts_cache_access", "l1tex__t_{what}_pipe_lsu_mem_global_op_ldgsts_cache_bypass"),
    (
        "sm__sass_l1tex_t_{what}_pipe_lsu_mem_global_op_ldgsts_cache_access",
        "sm__sass_l1tex_t_{what}_pipe_lsu_mem_global_op_ldgsts_cache_bypass",
    ),
)
#: What ncu says when the driver keeps its counters for administrators.
_DENIED = "ERR_NVGPUCTRPERM"
#: The package, and the first ncu that its versions 1.x accept.
_NSIGHT, _NSIGHT_NCU = "nsight-python", (2026, 2, 1)
_DRAM = "dram__bytes_read"
#: Shared-memory loads: the counters of the L1's data stage, and those that SASS patching adds, which see the loads alone.
_SHARED = {
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld",
}
_SHARED_IF_THERE = {
    "sass_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld",
    "sass_conflicts": "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ld",
    "instructions": "smsp__inst_executed_op_shared_ld",
}
_OPTIONAL = {"global loads": (), "shared loads": tuple(_SHARED_IF_THERE)}


def find_tool() -> str | None:
    """Return the path of ncu: on the path, or in a CUDA toolkit's folder."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join(str(Path(folder) / "bin") for folder in folders if folder)
    return shutil.which("ncu") or shutil.which("ncu", path=places)


def global_loads(command: Sequence[str], kernels: str, timeout_s: float = 180) -> list[dict[str, float]]:
    """Run a program under ncu and return what its kernels load, one entry per launch, in order.

    Parameters
    ----------
    command : sequence of str
        The program.
    kernels : str
        Regular expression of the kernels' names; others are not profiled.
    timeout_s : float
        After which the program is ended.

    Returns
    -------
    list of dict
        ``kernel_index``; ``requests`` and ``sectors`` of global loads; ``copy_requests`` and ``copy_sectors`` of cp.async, of the
        metrics that this version has for it; ``dram_bytes``.

    Raises
    ------
    MissingPartError
        Without ncu, or where it says that it cannot count.
    """
    tool = _tool()
    launches = _with_ncu(tool, command, kernels, timeout_s, _global_metrics(_available(tool)))
    return [{"kernel_index": float(i), **launch.counts} for i, launch in enumerate(launches)]


@dataclass(frozen=True)
class Driver:
    """Launches to count, made by a function in a process of its own.

    Parameters
    ----------
    function : str
        ``package.module:name``. It yields callables without arguments, of which each launches one kernel.
    arguments : tuple
        Of the function: numbers and text.
    """

    function: str
    arguments: tuple[Any, ...] = ()

    @property
    def command(self) -> list[str]:
        """The program that launches them, for ncu and for a shell."""
        return [sys.executable, "-m", "wqlab.profile.driver", self.function, json.dumps(self.arguments)]


def table(driver: Driver, counted: Literal["global loads", "shared loads"], kernels: str, timeout_s: float = 180) -> pd.DataFrame:
    """Return what a driver's launches cost, one row per launch, in order.

    Parameters
    ----------
    driver : Driver
        What is launched.
    counted : {"global loads", "shared loads"}
        Global: ``requests``, ``sectors``, ``copy_requests``, ``copy_sectors``, ``dram_bytes``, as of `global_loads`. Shared:
        ``wavefronts`` and ``conflicts`` of the L1's data stage; and, of those that this ncu has, ``sass_wavefronts`` and
        ``sass_conflicts`` (the same, counted by patched code) and ``instructions`` (loads of warps).
    kernels : str
        Regular expression of the kernels' names, for ncu; nsight-python takes what the driver launches.
    timeout_s : float
        After which a run of the driver is ended.

    Returns
    -------
    pandas.DataFrame
        ``launch`` (from 0), ``kernel`` (its name), a float64 column for each counter, and ``source``: which tool counted, why
        not nsight-python, and ``unavailable: `` with the names of counters that it does not have, which are empty.

    Raises
    ------
    MissingPartError
        Without ncu, or where it says that it cannot count.
    """
    tool = _tool()
    version = _version(tool)
    needed, everything = _chosen(counted, _available(tool))
    ncu, lacking = f"ncu {version or 'of an unknown version'}", _nsight_lacks(version)
    ways: list[tuple[str, Callable[[dict[str, list[str]]], list[_Launch]]]] = [
        (ncu, lambda chosen: _with_ncu(tool, driver.command, kernels, timeout_s, chosen))
    ]
    if not lacking:
        name = f"nsight-python {importlib.metadata.version(_NSIGHT)}, {ncu}"
        ways.insert(0, (name, lambda chosen: _with_nsight(tool, driver, timeout_s, chosen)))
    failures: list[MissingPartError] = []
    for name, count in ways:
        # A metric that is listed can still be refused: those that must be there are then tried alone.
        for chosen in [everything, needed] if everything != needed else [needed]:
            try:
                return _tidy(count(chosen), [*needed, *_OPTIONAL[counted]], f"{name} ({lacking})" if lacking else name)
            except MissingPartError as failed:
                failures.append(failed)
                if _DENIED in str(failed):  # nobody who asks again is let in
                    raise
        lacking = str(failures[-1])
    raise failures[-1]


@dataclass(frozen=True)
class _Launch:
    kernel: str
    counts: dict[str, float]


def _tidy(launches: list[_Launch], names: list[str], source: str) -> pd.DataFrame:
    import pandas as pd

    absent = [name for name in names if name not in launches[0].counts]
    if absent:
        source += f"; unavailable: {', '.join(absent)}, which it does not count here"
    rows = [
        {"launch": i, "kernel": launch.kernel, **{n: launch.counts.get(n, math.nan) for n in names}, "source": source}
        for i, launch in enumerate(launches)
    ]
    return pd.DataFrame(rows).astype(dict.fromkeys(names, "float64"))


def _chosen(counted: str, available: set[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return result -> metrics: of those that must be counted, and of all that this ncu lists."""
    if counted == "global loads":
        needed = _global_metrics(available)
        return needed, needed
    needed = {what: [name] for what, name in _SHARED.items()}
    return needed, {**needed, **{what: [name] for what, name in _SHARED_IF_THERE.items() if name in available}}


def _global_metrics(available: set[str]) -> dict[str, list[str]]:
    copies = next((names for names in _COPIES if all(_metric(n, "sectors") in available for n in names)), None)
    if copies is None:  # adding nothing up would say that nothing was copied
        raise MissingPartError("this ncu lists no metric of cp.async (LDGSTS) that is known here, so loads would be missed")
    return {
        **{what: [_LOADS.format(what=what)] for what in ("requests", "sectors")},
        **{f"copy_{what}": [_metric(name, what) for name in copies] for what in ("requests", "sectors")},
        "dram_bytes": [_DRAM],
    }


def _nsight_lacks(version: str) -> str:
    """Return why nsight-python cannot be used with an ncu of this version, empty where it can; it is not imported here."""
    try:
        importlib.metadata.version(_NSIGHT)
    except importlib.metadata.PackageNotFoundError:
        return f"{_NSIGHT} is not installed"
    wanted = ".".join(map(str, _NSIGHT_NCU))
    if not version or tuple(int(part) for part in version.split(".")) < _NSIGHT_NCU:
        return f"{_NSIGHT} needs ncu {wanted} or later"
    return ""


def _with_nsight(tool: str, driver: Driver, timeout_s: float, chosen: dict[str, list[str]]) -> list[_Launch]:
    """Count in a process that imports nsight-python before anything starts CUDA."""
    metrics = [f"{name}.sum" for names in chosen.values() for name in names]
    with tempfile.TemporaryDirectory(prefix="wqlab-nsight-") as folder:
        target = Path(folder) / "counters.json"
        # It looks for ncu on the path alone.
        environment = {**os.environ, "PATH": os.pathsep.join([str(Path(tool).parent), os.environ.get("PATH", "")])}
        command = [*driver.command, "--nsight", ",".join(metrics), "--out", str(target)]
        _run(command, timeout_s, name=_NSIGHT, environment=environment)
        try:
            found = json.loads(target.read_text(encoding="utf-8"))
        except (OSError, ValueError) as failed:
            raise MissingPartError(f"{_NSIGHT} wrote no counts: {failed}"[:300]) from failed
    if not found:
        raise MissingPartError(f"{_NSIGHT} counted nothing: the driver launched nothing")
    return [_Launch(one["kernel"], _added(chosen, one["counts"])) for one in found]


def _added(chosen: dict[str, list[str]], told: dict[str, object]) -> dict[str, float]:
    """Return result -> the sum of its metrics, of what a tool told of each ``metric.sum``: a number, or text."""

    def number(name: str) -> float:
        value = told.get(f"{name}.sum")
        found = "" if value is None else str(value).replace(",", "")
        try:
            count = float(found)
        except ValueError:
            count = math.nan
        if not math.isfinite(count):
            raise MissingPartError(f"ncu has no value of {name}: it says {found or 'nothing'!r}")
        return count

    return {result: sum(number(name) for name in names) for result, names in chosen.items()}


def _with_ncu(tool: str, command: Sequence[str], kernels: str, timeout_s: float, chosen: dict[str, list[str]]) -> list[_Launch]:
    metrics = ",".join(f"{name}.sum" for names in chosen.values() for name in names)
    with tempfile.TemporaryDirectory(prefix="wqlab-ncu-") as folder:
        log = Path(folder) / "counters.csv"
        # The clocks are left as they are: what is counted does not depend on them.
        options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--log-file", str(log)]
        _run([tool, *options, "--kernel-name", f"regex:{kernels}", "--metrics", metrics, *command], timeout_s, log)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return parse(text, chosen)


def parse(text: str, chosen: dict[str, list[str]]) -> list[_Launch]:
    """Return the launches of ncu's raw table.

    Parameters
    ----------
    text : str
        What ncu wrote with ``--csv --page raw``: lines of its own, then a header, a line of units, and a line per launch.
    chosen : dict
        Name of a result -> base names of the metrics that are added up for it.

    Raises
    ------
    MissingPartError
        When there is no such table, and ncu's own lines say why; or a value in it is no number.
    """
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    launches = [row for row in rows if (row.get("ID") or "").strip().isdigit()]
    if not launches:
        raise MissingPartError(f"ncu counted nothing: {_told(text)}")
    return [_Launch(row.get("Kernel Name") or "", _added(chosen, dict(row))) for row in launches]


def _metric(template: str, what: str) -> str:
    return template.format(what=what)


def _tool() -> str:
    tool = find_tool()
    if tool is None:
        raise MissingPartError("ncu is not installed; it comes with Nsight Compute or a CUDA toolkit")
    return tool


def _version(tool: str) -> str:
    """Return ncu's version as three numbers, empty where it does not tell."""
    found = re.search(r"Version\s+(\d+\.\d+\.\d+)", _run([tool, "--version"], 60))
    return found[1] if found else ""


def _available(tool: str) -> set[str]:
    """Return the names of the metrics that ncu can collect on this GPU."""
    output = _run([tool, "--query-metrics"], 60)
    return set(re.findall(r"^([a-z0-9]+__[a-z0-9_]+)", output, re.MULTILINE))


def _run(
    command: list[str], timeout_s: float, log: Path | None = None, name: str = "ncu", environment: dict[str, str] | None = None
) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired as failed:
        raise MissingPartError(f"{name} did not end within {timeout_s:g} s") from failed
    except OSError as failed:
        raise MissingPartError(f"{name} could not run: {failed}"[:300]) from failed
    if done.returncode:
        logged = log.read_text(encoding="utf-8", errors="replace") if log is not None and log.is_file() else ""
        raise MissingPartError(f"{name} ended with exit code {done.returncode}: {_told(logged + done.stdout + done.stderr)}")
    return done.stdout


def _told(output: str) -> str:
    """Return what ncu says of an error, else the end of an output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==") or _DENIED in line]
    return "; ".join(errors or lines[-2:])[:300] or "it said nothing"
