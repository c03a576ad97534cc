"""compute-sanitizer over all kernels, of CUDA C++ and of Triton: out-of-bounds accesses and shared-memory races at tiny shapes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wqlab import paths, progress
from wqlab.bench import Bench, Headline
from wqlab.bench.sanitized_launches import DONE, KERNELS
from wqlab.errors import LimitError
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd

TOOLS = ("memcheck", "racecheck")
_PROGRAM = "wqlab.bench.sanitized_launches"
#: A tool that has not ended by then will not.
_SECONDS = 300
_FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed")


class Finding(NamedTuple):
    """What a tool says: ``clean``, ``found: ...`` or ``unavailable: reason``; and how many errors, None where it did not run."""

    result: str
    errors: int | None


def find_tool() -> str | None:
    """Return the path of compute-sanitizer: on the path, or in a CUDA toolkit's folder."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join(str(Path(folder) / "bin") for folder in folders if folder)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=places)


def read(output: str, code: int) -> Finding:
    """Return what an output of compute-sanitizer says.

    Parameters
    ----------
    output : str
        Of the tool and of the program, which prints `DONE` when it has launched everything.
    code : int
        The exit code.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line.lstrip("= ") for line in lines if line.startswith("=====") and line.strip("= ")]
    totals = [int(next(filter(None, match.groups()))) for match in _FOUND.finditer(output)]
    if totals and sum(totals):
        first = "; ".join(line for line in told if "COMPUTE-SANITIZER" not in line)
        return Finding(f"found: {first}"[:600], sum(totals))
    if not totals or not any(line.startswith(DONE) for line in lines):
        return Finding(f"unavailable: it ended with exit code {code} and said: {'; '.join(lines[-3:])}"[:600], None)
    if code:  # the program compares its results as well
        wrong = "; ".join(line for line in lines if line.endswith("wrong"))
        return Finding(f"unavailable: no error found, but the program ended with exit code {code}: {wrong}"[:600], None)
    return Finding("clean", 0)


@register("bench", "sanitizer")
class SanitizerBench(Bench):
    """Not a time: a record that says, of each tool, what it found or why it could not run."""

    name = "sanitizer"
    description = "compute-sanitizer's memcheck and racecheck over every kernel (2 min, a GPU)"
    columns = {  # noqa: RUF012
        "tool": "none: the program alone, results compared with the reference; else the tool of compute-sanitizer",
        "program": "what ran",
        "kernels": "those that the tool looked at",
        "result": "clean; found: its first lines; unavailable: why",
        "errors": "errors or hazards; empty where the tool did not run",
        "version": "of compute-sanitizer",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per group of kernels and tool; quick runs are the same, for they are short."""
        import pandas as pd
        import torch

        names = ("none", *TOOLS)
        rows = []
        for group, kernels in KERNELS.items():
            if not torch.cuda.is_available():
                found, version = [Finding("unavailable: torch finds no CUDA device", None)] * len(names), ""
            else:
                found, version = self._run(group)
            program = f"python -m {_PROGRAM} {group}"
            rows += [
                (name, program, ", ".join(kernels), one.result, one.errors, version if name != "none" else "")
                for name, one in zip(names, found, strict=True)
            ]
        return pd.DataFrame(rows, columns=list(self.columns)).astype({"errors": "Int64"})

    def check(self, data: pd.DataFrame) -> None:
        """Raise LimitError when a tool found an error. A tool that is not here is no error."""
        bad = data[data["errors"].fillna(0) > 0]
        if not bad.empty:
            raise LimitError(
                f"sanitizer: {'; '.join(f'{tool}: {result}' for tool, result in zip(bad.tool, bad.result, strict=True))}"
            )

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return how many errors each tool found; nothing for one that did not run."""
        ran = data[data["errors"].notna() & (data["tool"] != "none")]
        return [
            Headline(f"{row['tool']}, all {row['program'].rpartition(' ')[2]} kernels", row["errors"], None, "errors")
            for row in ran.to_dict("records")
        ]

    @staticmethod
    def _run(group: str) -> tuple[list[Finding], str]:
        program = [sys.executable, "-m", _PROGRAM, group]
        # Alone first: it compiles what the tools' runs then find in the disk cache.
        progress.report(f"the {group} kernels alone", 0, 1 + len(TOOLS))
        output, code = _output(program)
        done = any(line.startswith(DONE) for line in output.splitlines())
        alone = Finding("clean", 0) if code == 0 else Finding(f"found: {_tail(output)}", 1)
        if not done:  # under a tool it would not run either
            return [alone, *[Finding("unavailable: the program does not run", None)] * len(TOOLS)], ""
        tool = find_tool()
        if tool is None:
            reason = "unavailable: compute-sanitizer is not here; it comes with the CUDA toolkit (CUDA_HOME, or the path)"
            return [alone, *[Finding(reason, None)] * len(TOOLS)], ""
        version = next((line for line in _output([tool, "--version"])[0].splitlines() if line.startswith("Version")), "")
        # No filter of kernels: how it is written differs between versions, and torch's few small kernels cost little.
        # Errors of API calls are not looked for: asking the driver how many parameters a kernel has ends in one.
        options = ["--report-api-errors", "no", "--error-exitcode", "86"]
        progress.report(f"the {group} kernels under {' and '.join(TOOLS)}", 1, 1 + len(TOOLS))
        with ThreadPoolExecutor() as pool:
            outputs = pool.map(lambda name: _output([tool, "--tool", name, *options, *program]), TOOLS)
            return [alone, *(read(*one) for one in outputs)], version.removeprefix("Version").strip()


def _output(command: list[str]) -> tuple[str, int]:
    # Without torch's cache of memory every tensor is an allocation of its own, whose ends memcheck knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=paths.checkout(),
            env=environment, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {_SECONDS} s", 124
    return done.stdout, done.returncode


def _tail(output: str) -> str:
    return "; ".join(" ".join(line.split()) for line in output.strip().splitlines()[-3:])[:400]
