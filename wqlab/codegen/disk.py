"""Compiled kernels on disk: one file per key, outside the package, each with its checksum."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from wqlab import paths
from wqlab.errors import DamagedFileError, OutputError

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """Machine code and the compiler's log."""

    cubin: bytes
    log: str


def folder() -> Path:
    """Return the folder of the compiled kernels."""
    return paths.cache_dir() / "kernels"


def fetch(key: str, build: Callable[[], Entry]) -> Entry:
    """Return the entry under `key`; the first to ask builds it, and all who ask meanwhile wait for that one.

    A damaged file is kept under another name, which a warning tells, and built again.

    Raises
    ------
    OutputError
        When the folder cannot be written.
    """
    path = folder() / f"{key}.kernel"
    try:
        return _read(path)
    except (OSError, DamagedFileError):
        pass  # looked at again below, where nobody else reads or writes
    with _alone(path.with_suffix(".lock")):
        try:
            return _read(path)
        except FileNotFoundError:
            pass
        except DamagedFileError as error:
            _log.warning("%s; it is kept as %s, and the kernel is compiled again", error, _set_aside(path).name)
        entry = build()
        with paths.atomic_path(path) as temporary:
            temporary.write_bytes(_pack(entry))
    return entry


def _pack(entry: Entry) -> bytes:
    payload = json.dumps({"log": entry.log}).encode() + b"\n" + entry.cubin
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _read(path: Path) -> Entry:
    checksum, _, payload = path.read_bytes().partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != checksum:
        raise DamagedFileError(f"{path} is damaged: its content does not match its sha256")
    head, _, cubin = payload.partition(b"\n")
    return Entry(cubin, json.loads(head)["log"])


def _set_aside(path: Path) -> Path:
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not kept.exists():
            return path.rename(kept)
    raise AssertionError("unreachable")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep out every other thread and process."""
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise OutputError(
            f"cannot write the cache folder {path.parent}: {error.strerror or error}; name another with WQLAB_CACHE"
        ) from error
    try:
        yield
    finally:
        lock.release()
