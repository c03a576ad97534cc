"""Which files of a folder are whole: a small JSON written last, and checks against it."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wqlab import paths
from wqlab.errors import DamagedFileError
from wqlab.records import dump_json, sha256_file

FILENAME = "manifest.json"


@dataclass(frozen=True)
class File:
    """One file of a fetched folder: its path below the folder, size and sha256."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds, where it came from and when.

    Parameters
    ----------
    name, source, date, note : str
        `source` names the wheels, the folder or the hub revision; `note` is what a reader of results must know.
    files : tuple of File
        Every file that belongs to the folder.
    """

    name: str
    source: str
    date: str
    files: tuple[File, ...]
    note: str = ""


def describe(folder: Path, names: Iterable[str]) -> tuple[File, ...]:
    """Return the `File` entries of `names` below `folder`, reading every byte once."""
    return tuple(File(name, (folder / name).stat().st_size, sha256_file(folder / name)) for name in names)


def write(folder: Path, name: str, source: str, files: Iterable[File], note: str = "") -> None:
    """Write the manifest of `folder`. Call it last: a folder without one counts as not fetched."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entry = Manifest(name, source, date, tuple(files), note)
    paths.write_text(folder / FILENAME, dump_json(asdict(entry)))


def parse(folder: Path) -> Manifest | None:
    """Return the manifest of `folder` as it was written, or None when it is absent or unreadable."""
    try:
        entry: dict[str, Any] = json.loads((folder / FILENAME).read_text(encoding="utf-8"))
        return Manifest(files=tuple(File(**file) for file in entry.pop("files")), **entry)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`, or None when it is absent, unreadable or lists a file of another size.

    Sizes only, so that asking costs nothing; `verify` reads the bytes.
    """
    manifest = parse(folder)
    try:
        whole = manifest and all((folder / file.path).stat().st_size == file.num_bytes for file in manifest.files)
    except OSError:
        return None
    return manifest if whole else None


def set_aside(path: Path) -> Path:
    """Rename a damaged file to ``<name>.damaged`` (numbered when that exists) and return the new path."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not kept.exists():
            path.rename(kept)
            return kept
    raise AssertionError("unreachable")


def verify(folder: Path, file: File, again: str) -> Path:
    """Return the path of `file` after its sha256 was checked.

    Parameters
    ----------
    folder : Path
        The fetched folder.
    file : File
        An entry of its manifest or of the catalogue.
    again : str
        The command that makes the file anew.

    Raises
    ------
    DamagedFileError
        When the bytes differ; the file is kept under another name, so that `again` replaces it.
    """
    path = folder / file.path
    if path.stat().st_size == file.num_bytes and sha256_file(path) == file.sha256:
        return path
    try:
        state = f"it is kept as {set_aside(path).name}"
    except OSError as error:
        state = f"it could not be renamed ({error.strerror}): remove it by hand"
    raise DamagedFileError(f"{path} is damaged (its size or sha256 is not the one noted when it was made); {state}; run: {again}")
