"""Several runs of one bench side by side: how far a number moves from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wqlab import records
from wqlab.errors import ParameterError

if TYPE_CHECKING:
    import pandas as pd

_KEYS = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim", "mix")
_MEASURED = ("latency_us", "baseline", "baseline_us", "ratio", "floor_us", "fraction_of_floor")
COLUMNS = {
    "run": "1, 2, ...: by date; each on a machine that was started for it",
    "date": "of the run, UTC",
    "commit": "of the code that ran",
    "batch": "rows, one query token each",
    "num_heads": "query heads",
    "num_kv_heads": "heads of keys and values",
    "seq_len": "tokens of keys and values per row",
    "head_dim": "channels per head",
    "mix": "percent of the windows in 16, 4, 2 bits, as of bench mixed_decode",
    "latency_us": "median time of a launch, us",
    "baseline": "the fastest FP16 attention of that run",
    "baseline_us": "its time, us",
    "ratio": "baseline_us / latency_us",
    "floor_us": "bytes over the read bandwidth that the run observed, us",
    "fraction_of_floor": "floor_us / latency_us",
    "spread": "of latency_us over the runs: (largest - smallest) / smallest",
    "ratio_spread": "the same of ratio",
}


def side_by_side(tables: Sequence[tuple[str, str, pd.DataFrame]]) -> pd.DataFrame:
    """Return the rows of several runs of bench mixed_decode with their spread.

    Parameters
    ----------
    tables : sequence of (date, commit, table)
        Of at least two runs over the same shapes and mixes.

    Returns
    -------
    pandas.DataFrame
        With the columns of `COLUMNS`; runs in the order of their dates.

    Raises
    ------
    ParameterError
        For fewer than two runs, the same run twice, or runs over different shapes.
    """
    import pandas as pd

    if len(tables) < 2:
        raise ParameterError(f"{len(tables)} run has no spread; give two or more")
    parts = []
    for number, (date, commit, table) in enumerate(sorted(tables, key=lambda entry: entry[0]), 1):
        parts.append(table[[*_KEYS, *_MEASURED]].assign(run=number, date=date, commit=commit))
    shapes = [set(map(tuple, part[list(_KEYS)].to_numpy().tolist())) for part in parts]
    if any(found != shapes[0] for found in shapes) or len({date for date, _, _ in tables}) < len(tables):
        raise ParameterError("runs must be different ones over the same shapes and mixes; leave out those cut short")
    data = pd.concat(parts, ignore_index=True)
    groups = data.groupby(list(_KEYS))
    for name, column in (("spread", "latency_us"), ("ratio_spread", "ratio")):
        least, most = groups[column].transform("min"), groups[column].transform("max")
        data[name] = (most - least) / least
    return data[list(COLUMNS)]


def write(folders: Sequence[Path | str], gpu: str, out: Path | str) -> Path:
    """Write the record ``mixed_decode_runs`` from the records of several runs.

    Parameters
    ----------
    folders : sequence of path
        Each holds one run's record of bench mixed_decode, under the GPU's key.
    gpu : str
        The key.
    out : path
        Folder of records that gets it.

    Raises
    ------
    ParameterError, RecordError, UnknownNameError
        As of `side_by_side` and `wqlab.records.read`; also for runs on different hardware.
    """
    runs = [records.read("mixed_decode", gpu, folder) for folder in folders]
    facts = [run.provenance for run in runs]
    names = {str(fact["hardware"]["gpus"]) for fact in facts}
    if len(names) > 1:
        raise ParameterError(f"the runs are of different GPUs: {', '.join(sorted(names))}; compare runs of one kind")
    data = side_by_side([(fact["date"], fact["git_commit"], run.data) for fact, run in zip(facts, runs, strict=True)])
    latest = max(facts, key=lambda fact: fact["date"])
    about = {key: latest[key] for key in ("hardware", "versions", "git_commit", "date")}
    about["command"] = f"wqlab bench mixed_decode, {len(runs)} runs; put together by wqlab.bench.runs.write"
    return records.write("mixed_decode_runs", gpu, data, COLUMNS, about, out)
