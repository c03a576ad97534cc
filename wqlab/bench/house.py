"""How long the house takes: import, loading the model, a slider, the main job and the tests. From outside."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import psutil

from wqlab import paths
from wqlab.bench import Bench, Headline
from wqlab.errors import MissingPartError
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd

#: Memory that nobody sampled is missing, not 0.
_UNMEASURED = math.nan

#: Prints seconds per redraw of a stem's figure, one per slider position; a process of its own, as a notebook's kernel is.
_REDRAW = """
import sys, time
from wqlab.widgets.render import Renderer
stem, name, low, high = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
renderer = Renderer(stem)
renderer.render({})
for step in range(21):
    start = time.perf_counter()
    renderer.render({name: low + (high - low) * step / 20})
    print(time.perf_counter() - start)
"""


#: Prints seconds per load once transformers' own lazy imports are done by the first.
_LOAD = """
import sys, time, wqlab
wqlab.load("smollm2", dtype=sys.argv[1])
for _ in range(5):
    start = time.perf_counter()
    wqlab.load("smollm2", dtype=sys.argv[1])
    print(time.perf_counter() - start)
"""


def timed(command: list[str]) -> tuple[float, float, str]:
    """Run a command to its end.

    Returns
    -------
    seconds : float
        Wall time.
    peak_memory_gb : float
        Largest sum of resident memory over the process and its children, sampled every 50 ms (shared pages count in each).
    output : str
        What it printed on stdout.

    Raises
    ------
    MissingPartError
        When it fails: a time of something that failed is no time.
    """
    peak = 0

    def watch(process: psutil.Process) -> None:
        nonlocal peak
        while not done.is_set():
            total = 0
            try:
                family = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for member in family:
                try:
                    total += member.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak = max(peak, total)
            done.wait(0.05)

    done = threading.Event()
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=paths.checkout()) as running:
        watcher = threading.Thread(target=watch, args=(psutil.Process(running.pid),))
        watcher.start()
        output, _ = running.communicate()
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    if running.returncode != 0:
        tail = " | ".join(output.strip().splitlines()[-3:])
        raise MissingPartError(f"{' '.join(command)} failed with exit code {running.returncode}: {tail}")
    return seconds, peak / 1e9, output


@register("bench", "house")
class HouseBench(Bench):
    """Each case in processes of its own, on a machine that should be quiet."""

    name = "house"
    description = "import, loading SmolLM2, slider redraws, make reproduce, QUICK=1 and make test: seconds and peak memory"
    uses_gpu = False
    columns = {  # noqa: RUF012
        "case": "what was run",
        "repeat": "number of the repetition, from 0",
        "seconds": "wall time, s",
        "peak_memory_gb": "largest resident memory over all its processes, GB; empty where it was not sampled",
    }

    def headlines(self, data: pd.DataFrame) -> list[Headline]:
        """Return the median time of every case."""
        return [
            Headline(str(case), float(times.median()), None, "s") for case, times in data.groupby("case", sort=False)["seconds"]
        ]

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per case and repetition; quick leaves out the full main job and the tests."""
        import pandas as pd

        rows: list[tuple[str, int, float, float]] = []
        for repeat in range(3 if quick else 7):
            rows.append(("import wqlab", repeat, timed([sys.executable, "-c", "import wqlab"])[0], _UNMEASURED))
        for stem, name, low, high in (("alpha_sweep", "alpha", "0.5", "10"), ("kv_memory", "seconds", "5", "50")):
            printed = timed([sys.executable, "-c", _REDRAW, stem, name, low, high])[2].split()
            rows += [(f"slider {stem}", i, float(seconds), _UNMEASURED) for i, seconds in enumerate(printed)]
        for dtype in ("float32", "float16"):
            printed = timed([sys.executable, "-c", _LOAD, dtype])[2].split()
            rows += [(f"load smollm2, {dtype}", i, float(seconds), _UNMEASURED) for i, seconds in enumerate(printed)]
        make = ["make", f"VENV={sys.prefix}"]
        with tempfile.TemporaryDirectory() as folder:
            out = f"OUT={folder}"
            rows.append(("make reproduce QUICK=1", 0, *timed([*make, "reproduce", "QUICK=1", out])[:2]))
            if not quick:
                rows.append(("make reproduce", 0, *timed([*make, "reproduce", out])[:2]))
        if not quick:
            rows.append(("make test", 0, *timed([*make, "test"])[:2]))
        return pd.DataFrame(rows, columns=list(self.columns))
