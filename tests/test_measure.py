"""`wqlab measure`, with small benches of a package of its own in the place of the real ones."""

import json
import textwrap

import pytest
import torch

from wqlab import bench, cli, measure, records, registry
from wqlab.errors import MissingPartError, OutputError, ParameterError, UnknownNameError
from wqlab.ops.mixed_decode import cuda_kernel
from wqlab.profile import environment

BENCH = """
import os, pandas as pd
from wqlab.bench import Bench, Headline
from wqlab.errors import LimitError, MissingPartError
from wqlab.registry import register

@register("bench", "{name}")
class Small(Bench):
    name, description = "{name}", "small"
    columns, uses_gpu = {{"x": "a number"}}, {uses_gpu}

    def measure(self, quick=False):
        {body}
        return pd.DataFrame({{"x": [float(os.environ.get("SMALL_X", 2))]}})

    def check(self, data):
        {check}

    def headlines(self, data):
        claim = "table11-latency"
        return [Headline("x of {name}", float(data.x[0]), 3.5, "ms", claim), Headline("none", float("nan"), None, "ratio", claim)]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Benches good, limited, missing, broken and fatal, and no others; returns a function that adds one."""
    folder = tmp_path / "small_benches"
    folder.mkdir()
    (folder / "__init__.py").write_text("")

    def add(name, body="pass", check="pass", uses_gpu=True):
        (folder / f"{name}.py").write_text(textwrap.dedent(BENCH).format(name=name, body=body, check=check, uses_gpu=uses_gpu))

    registry.names("bench")  # a module that is first imported below would register itself in what is thrown away
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._PACKAGES, "bench", ["small_benches"])
    monkeypatch.setitem(registry._ENTRIES, "bench", {})
    add("good")
    yield add
    import sys

    for name in [n for n in sys.modules if n.startswith("small_benches")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environment.hardware.cache_clear()
    yield
    environment.hardware.cache_clear()


def test_the_others_run_when_one_fails(package, tmp_path):
    package("broken", 'raise RuntimeError("CUDA error: out of\\n memory")')
    package("fatal", "os.abort()")
    package("limited", check='raise LimitError("1 of 1 cases is wrong: seeds 7")')
    package("missing", 'raise MissingPartError("needs a part")')
    events = []
    report = measure.measure(out=tmp_path / "out", quick=True, listener=lambda *event: events.append(event[:2]))
    assert report.measured == ["good"]
    assert report.failed["broken"] == "RuntimeError: CUDA error: out of memory"
    assert "exit code -6" in report.failed["fatal"]
    assert report.failed["limited"] == "1 of 1 cases is wrong: seeds 7"
    assert report.failed["missing"] == "needs a part"
    # A record outside a limit is shown as well, and named.
    assert [row["bench"] for row in report.rows] == ["good"] * 2 + ["limited"] * 2
    assert events == [
        ("", "planned"), *((name, event) for name, last in (("broken", "failed"), ("fatal", "failed"), ("good", "finished"),
        ("limited", "failed"), ("missing", "failed")) for event in ("started", last)),
    ]  # fmt: skip


def test_ours_theirs_and_the_papers_number_stand_side_by_side(package, tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(records, "root", lambda: shipped)
    old = bench.get("good").measure()
    records.write("good", "h200", old * 2, {"x": "a number"}, environment.provenance("wqlab bench good"), shipped)
    report = measure.measure(["good"], tmp_path / "out")
    # The second headline has no number, and its unit is not that of the claim.
    assert report.rows == [
        {"bench": "good", "metric": "x of good", "unit": "ms", "ours": 2.0, "recorded": 4.0, "theirs": 3.5, "paper": 48.0,
         "claim": "table11-latency"},
        {"bench": "good", "metric": "none", "unit": "ratio", "ours": None, "recorded": None, "theirs": None, "paper": None,
         "claim": "table11-latency"},
    ]  # fmt: skip
    assert json.loads(records.dump_json(report.to_dict()))["key"] == "cpu"
    with pytest.raises(ParameterError, match="compared with"):
        measure.measure(["good"], shipped)


def test_what_measures_nothing_of_a_gpu_runs_only_when_it_is_named(package, tmp_path):
    package("calibration", uses_gpu=False)
    report = measure.measure(out=tmp_path, quick=True)
    assert (report.measured, report.left_out) == (["good"], ["calibration"])
    assert "not measured unless named with --only: calibration" in measure.footnote(report)
    assert measure.measure(["calibration"], tmp_path, quick=True).measured == ["calibration"]


def test_resume_keeps_what_the_same_code_made(package, tmp_path, monkeypatch):
    package("other")
    out = tmp_path / "out"
    assert measure.measure(["good"], out).measured == ["good"]
    monkeypatch.setenv("SMALL_X", "9")
    report = measure.measure(["good", "other"], out, resume=True)
    assert (report.kept, report.measured) == (["good"], ["other"])
    assert [row["ours"] for row in report.rows] == [2.0, None, 9.0, None]
    # Without it, with other code, for a quick run, after damage: again.
    assert measure.measure(["good"], out).measured == ["good"]
    monkeypatch.setattr(measure, "fingerprint", lambda: "other code")
    monkeypatch.setattr(environment, "git_commit", lambda: "abc+changes")
    assert measure.measure(["good"], out, resume=True).measured == ["good"]
    assert measure.measure(["good"], out, resume=True).kept == ["good"]
    assert measure.measure(["good"], out, resume=True, quick=True).measured == ["good"]
    (out / "cpu" / "good.csv").write_text("x\n1\n")
    assert measure.measure(["good"], out, resume=True).measured == ["good"]
    (out / "cpu" / ".measure.json").write_text("{half")
    assert measure.measure(["good"], out, resume=True).measured == ["good"]


def test_resume_keeps_what_wqlab_bench_made_at_the_same_clean_commit(package, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "git_commit", lambda: "abc")
    bench.run("good", tmp_path)
    assert measure.measure(["good"], tmp_path, resume=True).kept == ["good"]
    monkeypatch.setattr(environment, "git_commit", lambda: "def")
    assert measure.measure(["good"], tmp_path, resume=True).measured == ["good"]


def test_what_can_be_refused_is_before_anything_runs(package, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_run", lambda *_: pytest.fail("it measured"))
    with pytest.raises(UnknownNameError, match="did you mean good"):
        measure.measure(["goods"], tmp_path / "out")
    with pytest.raises(MissingPartError, match="--only"):
        measure.measure(out=tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        measure.measure(["good"], tmp_path / "file")


@pytest.mark.parametrize(("tested", "mark"), [({(9, 0)}, "have passed"), (set(), "untested architecture")])
def test_untested_architectures_are_marked(package, tmp_path, monkeypatch, tested, mark):
    monkeypatch.setattr(cuda_kernel, "TESTED", frozenset(tested))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    here = measure.machine()
    assert here == measure.Machine("NVIDIA H200", "h200", "sm_90", bool(tested))
    report = measure.Report(here, tmp_path)
    assert mark in measure.footnote(report)
    assert ("untested" in str(measure.table(report).columns[2].header)) == (not tested)


def run(capsys, *words):
    with pytest.raises(SystemExit) as done:
        cli.main(["measure", *words])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def test_the_command(package, tmp_path, capsys):
    out = str(tmp_path / "out")
    code, text, err = run(capsys, "--only", "good", "--out", out)
    assert (code, err) == (0, "")
    assert "finished good" in text
    assert "x of good" in text
    assert "theirs, same run" in text
    package("bad", 'raise MissingPartError("needs a part")')
    code, text, err = run(capsys, "--only", "good", "--only", "bad", "--resume", "--out", out, "--json")
    found = json.loads(text)
    assert code == 1
    assert found["kept"] == ["good"]
    assert found["failed"] == {"bad": "needs a part"}
    assert found["tested"] is False
    assert "bad failed or broke a limit" in err.splitlines()[-1]


def test_ctrl_c_loses_nothing_and_says_how_to_go_on(package, tmp_path, capsys, monkeypatch):
    package("later")
    real = measure._run

    def interrupted(name, *rest):
        if name == "later":
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(measure, "_run", interrupted)
    out = tmp_path / "out"
    code, _, err = run(capsys, "--quick", "--out", str(out))
    assert code == 130
    assert "measure --resume" in err
    monkeypatch.setattr(measure, "_run", real)
    assert measure.measure(out=out, quick=True, resume=True).kept == ["good"]


def test_every_committed_record_has_headlines_that_can_be_shown(monkeypatch):
    benches = set(registry.names("bench"))
    for described in sorted(records.root().glob("*/*.json")):
        if described.stem not in benches:  # put together from other records
            assert described.stem == "mixed_decode_runs"
            continue
        for headline in bench.get(described.stem).headlines(records.read(described.stem, described.parent.name).data):
            assert headline.metric
            assert headline.unit
