"""One provenance record for everything that is measured: hardware, versions, commit, date, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from wqlab import paths, records

#: Packages whose versions can change a result.
_PACKAGES = ("wqlab", "torch", "triton", "transformers", "numpy", "pandas", "matplotlib", "seaborn", "safetensors", "gguf")


def versions() -> dict[str, str]:
    """Return Python's version and those of the packages that can change a result; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def hardware() -> dict[str, Any]:
    """Return what this process runs on.

    Returns
    -------
    dict
        ``cpu`` (model name), ``cores`` (usable by this process), ``memory_gb``, and ``gpus`` (names, or ``unavailable: `` with the
        reason; an empty list without CUDA). ``gpus`` asks torch only when it is already imported, because importing it takes a
        second.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    gpus: list[str] = []
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gpus = [_gpu_name(torch, i) for i in range(torch.cuda.device_count())]
    return {"cpu": _cpu_name(), "cores": cores, "memory_gb": round(psutil.virtual_memory().total / 2**30, 1), "gpus": gpus}


def _gpu_name(torch: Any, index: int) -> str:
    try:
        return str(torch.cuda.get_device_name(index))
    except RuntimeError as error:  # a GPU that fell off the bus is still counted
        return f"unavailable: {' '.join(str(error).split())[:200]}"


def gpu_key() -> str:
    """Return the key under which this machine's records are kept.

    ``"cpu"`` without CUDA, ``"other"`` for a GPU without its own: also a slice of one (MIG), whose records would pass for those of
    the whole, and relatives with a longer name, such as an RTX A4000, a GH200 or a laptop's RTX 4090.
    """
    gpus = hardware()["gpus"]
    if not gpus:
        return "cpu"
    name = gpus[0].lower()
    if re.search(r"\bmig\b|laptop|max-q|4090 d\b", name):
        return "other"
    name = re.sub(r"^((nvidia|geforce|tesla)[\s-]+)+", "", name).replace("rtx ", "rtx")
    return next((key for key in records.GPU_KEYS if re.match(rf"{key}(?![0-9a-z])", name)), "other")


def hardware_line() -> str:
    """Return the hardware as one short phrase for labels, for example ``"2 cores of Some CPU"``."""
    found = hardware()
    return found["gpus"][0] if found["gpus"] else f"{found['cores']} cores of {found['cpu']}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """Return the checkout's commit, with ``+changes`` when tracked code differs from it, or ``wheel <version>``."""
    if paths.checkout() is None:
        return f"wheel {versions().get('wqlab', 'unknown')}"
    try:
        commit = _git("rev-parse", "HEAD")
        # Figures and records are what a run writes: only code and notebooks decide what it computes.
        code = ["wqlab", "notebooks", "kernels", "data/paper", "pyproject.toml"]
        changed = _git("status", "--porcelain", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git)"
    return commit + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=paths.checkout(), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def provenance(command: str | None = None) -> dict[str, Any]:
    """Return hardware, versions, git commit, UTC date and command of this run.

    Parameters
    ----------
    command : str, optional
        What a reader types to repeat it; default: this process's command line, without the path of the program.
    """
    if command is None:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "hardware": hardware(),
        "versions": versions(),
        "git_commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def provenance_line() -> str:
    """Return GPU or CPU, commit and day of this run in one line, for a column of a table whose rows outlive one run."""
    return f"{hardware_line()}, commit {git_commit()[:12]}, {datetime.datetime.now(datetime.UTC).date().isoformat()}"
