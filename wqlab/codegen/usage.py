"""What a compiled kernel takes from a multiprocessor, read from the log that ``ptxas -v`` writes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel.

    Parameters
    ----------
    registers : int
        Per thread.
    shared_bytes : int
        Static shared memory per block; what a launch asks for comes on top.
    spill_store_bytes, spill_load_bytes : int
        Code that moves registers to local memory and back, per thread. Spills of device functions that were not inlined count for
        every kernel of the source, because the log does not say who calls them.
    stack_bytes : int
        Local memory per thread, those of called functions included.
    """

    registers: int
    shared_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0

    @property
    def spills(self) -> bool:
        """Whether registers did not suffice."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


def parse(log: str) -> dict[str, Usage]:
    """Return kernel name -> `Usage` from the log of ``ptxas -v``; empty when it names no kernel."""
    kernels: dict[str, Usage] = {}
    frames: dict[str, tuple[int, int, int]] = {}
    kernel = function = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernel = match[1]
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif match := _STACK.search(line):
            stack, stores, loads = map(int, match.groups())
            frames[function] = (stack, stores, loads)
        elif kernel and (match := _USED.search(line)):
            stack, stores, loads = frames.pop(kernel, (0, 0, 0))
            shared, cumulative = (int(found[1]) if (found := p.search(line)) else 0 for p in (_SHARED, _CUMULATIVE_STACK))
            kernels[kernel] = Usage(int(match[1]), shared, stores, loads, max(stack, cumulative))
    stores, loads = (sum(frame[i] for frame in frames.values()) for i in (1, 2))  # what is left are device functions
    return {
        name: replace(u, spill_store_bytes=u.spill_store_bytes + stores, spill_load_bytes=u.spill_load_bytes + loads)
        for name, u in kernels.items()
    }
