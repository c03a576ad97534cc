"""Launches what is to be counted: ``python -m wqlab.profile.driver package.module:function '[arguments]'``.

ncu watches this program from outside. With ``--nsight METRICS --out FILE`` nsight-python attaches ncu from inside; it has to be
imported before CUDA starts, so the function's module is imported after it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Launch = Callable[[], object]


def counted(nsight: Any, launches: Callable[[], Iterable[Launch]], metrics: Sequence[str], prefix: str) -> list[dict[str, Any]]:
    """Return what nsight-python counts of launches, in order: ``kernel`` and ``counts``, metric -> value.

    Parameters
    ----------
    nsight : module
        nsight-python 1.x.
    launches : callable
        Yields callables that launch one kernel each. What is launched to make one ready is not counted.
    metrics : sequence of str
        Names as ncu has them.
    prefix : str
        Of the paths of its files.
    """

    def each() -> None:
        for number, launch in enumerate(launches()):
            with nsight.annotate(str(number)):
                launch()

    # What is counted does not depend on clocks or temperature, so nothing has to be held or waited for.
    profile = nsight.analyze.kernel(metrics=list(metrics), runs=1, clock_control="none", thermal_mode="off", output_prefix=prefix)
    found: dict[int, dict[str, Any]] = {}
    for row in profile(each)().to_dataframe().to_dict("records"):
        one = found.setdefault(int(row["Annotation"]), {"kernel": str(row["Kernel"]), "counts": {}})
        value = float(row["AvgValue"])
        one["counts"][str(row["Metric"])] = value if value == value else "nan"  # JSON has no NaN
    return [found[number] for number in sorted(found)]


def main(given: Sequence[str] | None = None) -> int:
    """Launch everything that the function yields, counted by nsight-python or not; return 0."""
    parser = argparse.ArgumentParser(prog="python -m wqlab.profile.driver", description="launch what is to be counted")
    parser.add_argument("function", help="package.module:name, yields callables that launch one kernel each")
    parser.add_argument("arguments", nargs="?", default="[]", help="of the function, a JSON list")
    parser.add_argument("--nsight", default="", help="metrics that nsight-python counts, with commas between")
    parser.add_argument("--out", default="", help="file for what it counts")
    options = parser.parse_args(given)
    nsight = importlib.import_module("nsight") if options.nsight else None
    module, _, name = options.function.partition(":")
    arguments = json.loads(options.arguments)

    def launches() -> Iterable[Launch]:
        found: Iterable[Launch] = getattr(importlib.import_module(module), name)(*arguments)
        return found

    if nsight is None:
        for launch in launches():
            launch()
    else:
        target = Path(options.out)
        found = counted(nsight, launches, options.nsight.split(","), str(target.parent / "nsight-"))
        target.write_text(json.dumps(found), encoding="utf-8")
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
