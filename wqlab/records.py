"""Tidy results with provenance, under ``data/recorded/<gpu key>/<name>.csv|parquet`` with ``<name>.json`` beside the table.

The JSON names hardware, versions, commit, date and command of the run that wrote the table, the meaning and unit of every
column, and the table's sha256. A record is checked against all of that whenever it is read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqlab import paths
from wqlab.errors import RecordError, UnknownNameError
from wqlab.types import Evidence, Input

if TYPE_CHECKING:
    import pandas as pd

#: Folder names under data/recorded: the GPUs of the design, `other` for all others (a record names its GPU), `cpu` for none.
GPU_KEYS = ("rtx4090", "a40", "a100", "a800", "h100", "h200", "l40s", "other", "cpu")

_REQUIRED = ("name", "table", "sha256", "rows", "columns", "hardware", "versions", "git_commit", "date", "command")
#: A CSV can be read in a diff; past this many rows parquet is the better file.
_CSV_ROWS = 20_000


@dataclass(frozen=True)
class Record:
    """A table that was measured earlier, with the provenance that was stored beside it."""

    name: str
    gpu: str
    data: pd.DataFrame
    provenance: dict[str, Any]
    path: Path

    def evidence(self) -> Evidence:
        """Return the ``recorded`` evidence for every measured column of the table."""
        found = self.provenance["hardware"]
        hardware = found["gpus"][0] if found["gpus"] else f"{found['cores']} cores of {found['cpu']}"
        return Evidence(
            kind="recorded",
            source=f"{self.provenance['command']}",
            hardware=hardware,
            file=f"data/recorded/{self.gpu}/{self.path.name}",
            commit=self.provenance["git_commit"],
            date=self.provenance["date"][:10],
        )

    def input(self) -> Input:
        """Return the record as an input of a figure."""
        return Input(name=f"data/recorded/{self.gpu}/{self.path.name}", sha256=self.provenance["sha256"])


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_json(value: Any) -> str:
    """Return strict JSON (no NaN, no Infinity), indented, with numpy scalars as plain numbers.

    Raises
    ------
    ValueError
        For NaN or infinity.
    TypeError
        For an object that JSON has no form for.
    """

    def plain(entry: Any) -> Any:
        if hasattr(entry, "item") and getattr(entry, "ndim", None) == 0:
            return entry.item()
        if isinstance(entry, Path):
            return str(entry)
        raise TypeError(f"{type(entry).__name__} has no JSON form")

    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=plain) + "\n"


def check_gpu(gpu: str) -> str:
    """Return `gpu` if it is one of `GPU_KEYS`, else raise UnknownNameError."""
    if gpu not in GPU_KEYS:
        raise UnknownNameError("GPU", gpu, GPU_KEYS)
    return gpu


def root() -> Path:
    """Return the folder of the records that travel with the package."""
    return paths.shipped("data") / "recorded"


def write(name: str, gpu: str, data: pd.DataFrame, columns: dict[str, str], provenance: dict[str, Any], folder: Path | str) -> Path:
    """Write a record, atomically: first the table, then the JSON that names its checksum.

    Parameters
    ----------
    name : str
        The bench that measured it.
    gpu : str
        One of `GPU_KEYS`.
    data : pandas.DataFrame
        Tidy, not empty.
    columns : dict of str to str
        What each column means, with its unit. Must name exactly the table's columns.
    provenance : dict
        From `wqlab.profile.environment.provenance`.
    folder : path
        The folder that holds one folder per GPU key.

    Returns
    -------
    Path
        The table's path.

    Raises
    ------
    RecordError
        When the table is empty or `columns` does not describe it.
    OutputError
        When the folder cannot be written.
    """
    check_gpu(gpu)
    if data.empty:
        raise RecordError(f"record {name}: the table is empty; nothing was written")
    if list(data.columns) != list(columns):
        raise RecordError(f"record {name}: table columns {list(data.columns)} are not those described, {list(columns)}")
    suffix = ".csv" if len(data) <= _CSV_ROWS else ".parquet"
    table = Path(folder) / gpu / f"{name}{suffix}"
    with paths.atomic_path(table) as temporary:
        if suffix == ".csv":
            data.to_csv(temporary, index=False)
        else:
            data.to_parquet(temporary, index=False)
    described = {c: {"dtype": str(data[c].dtype), "description": text} for c, text in columns.items()}
    entry = {"name": name, "table": table.name, "sha256": sha256_file(table), "rows": len(data), "columns": described, **provenance}
    paths.write_text(table.with_suffix(".json"), dump_json(entry))
    return table


def read(name: str, gpu: str, folder: Path | str | None = None) -> Record:
    """Read a record and check it: JSON fields, checksum, rows, columns and dtypes.

    Raises
    ------
    UnknownNameError
        For a GPU key that does not exist, or a record that was never written for it.
    RecordError
        When the table is damaged or does not match its JSON.
    """
    import pandas as pd

    base = (Path(folder) if folder is not None else root()) / check_gpu(gpu)
    described = base / f"{name}.json"
    if not described.is_file():
        known = [p.stem for p in base.glob("*.json")]
        raise UnknownNameError(f"record for {gpu}", name, known)
    try:
        provenance = json.loads(described.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{described} is not JSON ({error}); measure again with: wqlab bench {name}") from error
    missing = [key for key in _REQUIRED if key not in provenance]
    if missing:
        raise RecordError(f"{described} lacks {', '.join(missing)}; measure again with: wqlab bench {name}")
    table = base / provenance["table"]
    if not table.is_file() or sha256_file(table) != provenance["sha256"]:
        state = "is missing" if not table.is_file() else "does not match the sha256 in its JSON"
        raise RecordError(f"{table} {state}; restore it from git or measure again with: wqlab bench {name}")
    dtypes = {c: d["dtype"] for c, d in provenance["columns"].items()}
    try:
        data = pd.read_csv(table, dtype=dtypes) if table.suffix == ".csv" else pd.read_parquet(table)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{table} does not have the dtypes its JSON describes: {error}") from error
    if list(data.columns) != list(dtypes) or len(data) != provenance["rows"]:
        raise RecordError(
            f"{table} has {len(data)} rows of {list(data.columns)}; its JSON describes {provenance['rows']} rows of {list(dtypes)}"
        )
    return Record(name=name, gpu=gpu, data=data, provenance=provenance, path=table)
