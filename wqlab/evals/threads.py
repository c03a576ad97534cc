"""How many threads torch should use on a machine that others use too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_cores() -> int:
    """Return the cores of this process that the last minute's load left free, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
        busy = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Linux
        return os.cpu_count() or 1
    return max(1, cores - round(busy))


@contextmanager
def polite_threads() -> Iterator[int]:
    """Let torch use only free cores inside the block, and never more than it may use now; gives their number.

    Each of torch's small operations waits for its slowest thread. When another process holds a core, that wait makes decoding with
    two threads several times slower than with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, free_cores()))
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
