import json
import os
import signal
import subprocess
import sys
import time

import pytest

from wqlab.batch import reproduce as room
from wqlab.errors import FetchError, NotebookError, OutputError, UnknownNameError

#: Two that load no model.
STEMS = ["decode_latency", "kv_memory"]


@pytest.fixture
def no_kernels(monkeypatch):
    """Replace the execution of notebooks by something that writes their files; what is tested here is what surrounds it."""
    made = []

    def execute(stem, out, given):
        made.append(stem)
        if stem in execute.failing:
            raise NotebookError(f"notebook {stem} failed: on purpose")
        for suffix in ("svg", "png", "csv"):
            (out / f"{stem}.{suffix}").write_text(stem)
        files = {s: room.records.sha256_file(out / f"{stem}.{s}") for s in ("svg", "png", "csv")}
        (out / f"{stem}.json").write_text(json.dumps({"files": files}))

    execute.failing = set()
    execute.made = made
    monkeypatch.setattr(room, "execute", execute)
    return execute


def test_a_complete_run_starts_afresh_next_time(no_kernels, tmp_path):
    assert room.reproduce(STEMS, tmp_path).finished == STEMS
    assert room.reproduce(STEMS, tmp_path).finished == STEMS
    assert no_kernels.made == STEMS * 2


def test_after_a_failure_only_what_is_missing_is_made(no_kernels, tmp_path):
    no_kernels.failing = {"kv_memory"}
    report = room.reproduce(STEMS, tmp_path)
    assert (report.finished, list(report.failed)) == (["decode_latency"], ["kv_memory"])
    no_kernels.failing = set()
    report = room.reproduce(STEMS, tmp_path)
    assert (report.kept, report.finished) == (["decode_latency"], ["kv_memory"])


@pytest.mark.parametrize("change", ["damaged", "missing", "quick", "code", "journal"])
def test_a_kept_figure_must_be_whole_and_of_the_same_run(no_kernels, tmp_path, monkeypatch, change):
    no_kernels.failing = {"kv_memory"}
    room.reproduce(STEMS, tmp_path)
    if change == "damaged":
        (tmp_path / "decode_latency.png").write_text("half")
    if change == "missing":
        (tmp_path / "decode_latency.csv").unlink()
    if change == "code":
        monkeypatch.setattr(room, "fingerprint", lambda: "other")
    if change == "journal":
        (tmp_path / ".reproduce.json").write_text('{"done": ["decode')
    assert room.reproduce(STEMS, tmp_path, quick=change == "quick").kept == []


def test_stems_whose_parts_cannot_be_fetched_do_not_stop_the_others(no_kernels, tmp_path, monkeypatch):
    def fetch_parts(stem, given, progress=None):
        if stem == "layer_similarity":
            raise FetchError("no network")

    monkeypatch.setattr(room.experiments, "fetch_parts", fetch_parts)
    report = room.reproduce(["layer_similarity", *STEMS], tmp_path)
    assert report.finished == STEMS
    assert "no network" in str(report.failed["layer_similarity"])


def test_unknown_stems_and_bad_folders_are_refused_before_anything_runs(no_kernels, tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean kv_memory"):
        room.reproduce(["decode_latency", "kv_memry"], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        room.reproduce(STEMS, tmp_path / "file")
    assert no_kernels.made == []


def test_notebooks_side_by_side_into_a_relative_folder(tmp_path, monkeypatch):
    """Each in a kernel of its own; papermill's working directory is the whole process's, so it must not be used."""
    monkeypatch.chdir(tmp_path)
    before = os.getcwd()
    report = room.reproduce(STEMS, "here", quick=True, jobs=2)
    assert sorted(report.finished) == STEMS
    assert os.getcwd() == before
    wanted = {f"{stem}.{s}" for stem in STEMS for s in ("svg", "png", "csv", "json")} | {"notebooks"}
    assert {p.name for p in (tmp_path / "here").iterdir()} == wanted
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_a_killed_run_is_continued(tmp_path):
    """The real thing: kill -9 after the first figure, then run the same line again."""
    line = [sys.executable, "-m", "wqlab.cli", "reproduce", *STEMS, "--quick", "--out", str(tmp_path)]
    running = subprocess.Popen(line, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not (tmp_path / ".reproduce.json").exists():
        assert running.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < until, "no figure was finished in five minutes"
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    first = (tmp_path / "decode_latency.json").read_bytes()
    again = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "1 made, 1 kept, 0 failed" in again.stdout
    assert (tmp_path / "decode_latency.json").read_bytes() == first
    assert (tmp_path / "kv_memory.svg").is_file()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".staging")], "what the killed run left was not cleared"


def test_ctrl_c_ends_at_once_and_what_is_finished_stays(tmp_path):
    line = [sys.executable, "-m", "wqlab.cli", "reproduce", *STEMS, "--quick", "--out", str(tmp_path)]
    running = subprocess.Popen(line, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while not list(tmp_path.glob(".staging-kv_memory-*/kv_memory.ipynb")):  # the second notebook is running
        assert running.poll() is None, "the run ended before it was interrupted"
        assert time.monotonic() < until
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted; what was finished stays" in err
    assert "Traceback" not in err
    assert (tmp_path / "decode_latency.json").is_file()
    assert (tmp_path / ".reproduce.json").is_file()
