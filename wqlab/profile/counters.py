"""Hardware counters of single kernels, by Nsight Compute (``ncu``), where it is installed and the driver lets it read them."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from wqlab.errors import MissingPartError

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
        metrics that this version has for it (none: 0); ``dram_bytes``.

    Raises
    ------
    MissingPartError
        Without ncu, or where it says that it cannot count.
    """

    def choose(available: set[str]) -> dict[str, list[str]]:
        loads = {what: [_LOADS.format(what=what)] for what in ("requests", "sectors")}
        copies = next((names for names in _COPIES if all(_metric(n, "sectors") in available for n in names)), ())
        return {
            **loads,
            **{f"copy_{what}": [_metric(name, what) for name in copies] for what in ("requests", "sectors")},
            "dram_bytes": [_DRAM],
        }

    return _count(command, kernels, timeout_s, choose)


def shared_loads(command: Sequence[str], kernels: str, timeout_s: float = 180) -> list[dict[str, float]]:
    """Run a program under ncu and return what its kernels' loads from shared memory cost, one entry per launch, in order.

    Parameters
    ----------
    command, kernels, timeout_s
        As of `global_loads`.

    Returns
    -------
    list of dict
        ``kernel_index``; ``wavefronts`` and ``conflicts`` of the L1's data stage; and, of those that this version has,
        ``sass_wavefronts`` and ``sass_conflicts`` (the same, counted by patched code), ``instructions`` (loads of warps).

    Raises
    ------
    MissingPartError
        Without ncu, or where it says that it cannot count.
    """

    def choose(available: set[str]) -> dict[str, list[str]]:
        found = {**_SHARED, **{what: name for what, name in _SHARED_IF_THERE.items() if name in available}}
        return {what: [name] for what, name in found.items()}

    try:
        return _count(command, kernels, timeout_s, choose)
    except MissingPartError:  # a metric that is listed can still be refused; those that must be there come first
        return _count(command, kernels, timeout_s, lambda available: {what: [name] for what, name in _SHARED.items()})


def _count(
    command: Sequence[str], kernels: str, timeout_s: float, choose: Callable[[set[str]], dict[str, list[str]]]
) -> list[dict[str, float]]:
    tool = find_tool()
    if tool is None:
        raise MissingPartError("ncu is not installed; it comes with Nsight Compute or a CUDA toolkit")
    chosen = choose(_available(tool))
    metrics = ",".join(f"{name}.sum" for names in chosen.values() for name in names)
    with tempfile.TemporaryDirectory(prefix="wqlab-ncu-") as folder:
        log = Path(folder) / "counters.csv"
        # The clocks are left as they are: what is counted does not depend on them.
        options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--log-file", str(log)]
        _run([tool, *options, "--kernel-name", f"regex:{kernels}", "--metrics", metrics, *command], timeout_s, log)
        text = log.read_text(encoding="utf-8", errors="replace")
    return parse(text, chosen)


def parse(text: str, chosen: dict[str, list[str]]) -> list[dict[str, float]]:
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
        When there is no such table; ncu's own lines say why.
    """
    lines = text.splitlines()
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    launches = [row for row in rows if (row.get("ID") or "").strip().isdigit()]
    if not launches:
        raise MissingPartError(f"ncu counted nothing: {_told(text)}")

    def number(row: dict[str, str], name: str) -> float:
        found = (row.get(f"{name}.sum") or "").replace(",", "")
        try:
            return float(found)
        except ValueError:
            raise MissingPartError(f"ncu has no value of {name}: it says {found or 'nothing'!r}") from None

    return [
        {"kernel_index": float(i), **{result: sum(number(row, name) for name in names) for result, names in chosen.items()}}
        for i, row in enumerate(launches)
    ]


def _metric(template: str, what: str) -> str:
    return template.format(what=what)


def _available(tool: str) -> set[str]:
    """Return the names of the metrics that ncu can collect on this GPU."""
    output = _run([tool, "--query-metrics"], 60)
    return set(re.findall(r"^([a-z0-9]+__[a-z0-9_]+)", output, re.MULTILINE))


def _run(command: list[str], timeout_s: float, log: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise MissingPartError(f"ncu could not run: {failed}"[:300]) from failed
    if done.returncode:
        logged = log.read_text(encoding="utf-8", errors="replace") if log is not None and log.is_file() else ""
        raise MissingPartError(f"ncu ended with exit code {done.returncode}: {_told(logged + done.stdout + done.stderr)}")
    return done.stdout


def _told(output: str) -> str:
    """Return what ncu says of an error, else the end of an output."""
    errors = re.findall(r"^==ERROR==\s*(.+)$", output, re.MULTILINE)
    return "; ".join(errors or [line.strip() for line in output.splitlines() if line.strip()][-2:])[:300] or "it said nothing"
