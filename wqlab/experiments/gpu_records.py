"""Records of single kernels on a GPU, as figures read them: what is there, what is missing, and how to get it."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING

from wqlab import paths, records
from wqlab.errors import MissingPartError, UnknownNameError
from wqlab.types import Input, Value

if TYPE_CHECKING:
    import pandas as pd

    from wqlab.records import Record


def how_to_get(name: str, gpu: str) -> str:
    """Return where the record of a bench can come from, in words."""
    return f"take data/recorded/{gpu}/{name}.* from the project's repository, or measure it on such a GPU: wqlab bench {name}"


def find(name: str, gpu: str) -> Record | None:
    """Return the record of a bench on a GPU, or None where it was never measured.

    Raises
    ------
    UnknownNameError
        For a GPU key that does not exist.
    """
    try:
        return records.read(name, gpu)
    except UnknownNameError as error:
        if error.kind == "GPU":
            raise
        return None


def recorded(name: str, gpu: str, what: str) -> Record:
    """Return the record of a bench on a GPU.

    Parameters
    ----------
    name, gpu : str
        Which bench, and the GPU's key.
    what : str
        What it holds, in words, for the message.

    Raises
    ------
    UnknownNameError
        For a GPU key that does not exist.
    MissingPartError
        When nobody measured it there yet, or it holds no time at all; says how to get one.
    """
    record = needed(name, gpu, what)
    if record.data["latency_us"].isna().all():
        raise MissingPartError(f"the record of {what} on {gpu} holds no time; its column note says why: {how_to_get(name, gpu)}")
    return record


def needed(name: str, gpu: str, what: str) -> Record:
    """Return the record of a bench on a GPU; raises MissingPartError, which says how to get one, when there is none."""
    record = find(name, gpu)
    if record is None:
        raise MissingPartError(f"there is no record of {what} on {gpu}: {how_to_get(name, gpu)}")
    return record


def without_time(data: pd.DataFrame, columns: list[str]) -> list[str]:
    """Return a note that names the rows without a time, by these columns; an empty list when all have one."""
    lacking = data[data["latency_us"].isna()]
    if lacking.empty:
        return []
    names = "; ".join(", ".join(map(str, row)) for row in lacking[columns].itertuples(index=False))
    return [f"Without a time in the record, see its column note: {names}."]


def shape_name(batch: int, seq_len: int) -> str:
    """Return a decode step's size for an axis."""
    return f"{batch} x {seq_len:,} tokens"


def printed(table: str) -> tuple[dict[tuple[str, str], float], Input]:
    """Return (row, column) -> the number printed in a table of ``data/paper``, and that table as an input."""
    path = paths.shipped("data") / "paper" / f"{table}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        cells = {(row["row"], row["column"]): float(row["value"]) for row in csv.DictReader(file)}
    return cells, Input(name=f"data/paper/{path.name}", sha256=records.sha256_file(path))


def stated(found: dict[str, tuple[float, str, str]]) -> dict[str, Value]:
    """Return name -> (number, unit, column) as values of a result, without those that are not finite."""
    return {name: Value(*entry) for name, entry in found.items() if math.isfinite(entry[0])}
