"""Counters against a stand-in for ncu, one for nsight-python, and every way in which either can refuse."""

import inspect
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import types

import pandas as pd
import pytest

from wqlab.errors import MissingPartError
from wqlab.profile import counters, driver
from wqlab.profile.counters import Driver

LD, COPY = "l1tex__t_{}_pipe_lsu_mem_global_op_ld", "l1tex__t_{}_pipe_lsu_mem_global_op_ldgsts_cache_{}"
GLOBAL = [
    *(LD.format(what) for what in ("requests", "sectors")),
    *(COPY.format(what, how) for what in ("requests", "sectors") for how in ("access", "bypass")), "dram__bytes_read",
]  # fmt: skip
NEEDED = list(counters._SHARED.values())
SHARED = [*NEEDED, *counters._SHARED_IF_THERE.values()]
COLUMNS = ["launch", "kernel", "wavefronts", "conflicts", "sass_wavefronts", "sass_conflicts", "instructions", "source"]
#: Yields two callables that launch nothing; `site` puts it in place.
TWO = Driver("launched:two", (3,))


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """A folder of packages, seen here and by every driver."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "launched.py").write_text("def two(number):\n    yield lambda: None\n    yield lambda: number\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


def table(names, *launches):
    lines = ["==PROF== Connected to process 1", "noise"]
    lines.append(",".join(f'"{name}"' for name in ["ID", "Kernel Name", *(f"{name}.sum" for name in names)]))
    lines.append(",".join(['""'] * (2 + len(names))))
    lines += [",".join(f'"{x}"' for x in [i, "some_kernel", *values]) for i, values in enumerate(launches)]
    return "\n".join(lines)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in for ncu that lists metrics, copies a table to its log and notes how it was called."""

    def make(text, code=0, names=GLOBAL, version="2025.3.1.0", table_of_needed=None):
        (tmp_path / "table.csv").write_text(text)
        (tmp_path / "needed.csv").write_text(text if table_of_needed is None else table_of_needed)
        (tmp_path / "calls").write_text("")
        program = tmp_path / "bin" / "ncu"
        program.parent.mkdir(exist_ok=True)
        listed = "\\n".join(f"{name}  what it counts" for name in names)
        program.write_text(f"""#!/bin/sh
if [ "$1" = --query-metrics ]; then printf '{listed}\\n'; exit 0; fi
if [ "$1" = --version ]; then printf 'NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion {version} (build 1)\\n'; exit 0; fi
echo "$@" >> {tmp_path}/calls
table={tmp_path}/needed.csv
case "$*" in *smsp__*) table={tmp_path}/table.csv;; esac
while [ $# -gt 0 ]; do [ "$1" = --log-file ] && cp "$table" "$2"; shift; done
exit {code}
""")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(counters, "find_tool", lambda: str(program))
        return tmp_path / "calls"

    return make


@pytest.fixture
def nsight(site):
    """A stand-in for nsight-python, installed beside the tests: it counts 10, 20, ... for launch 0, 1, ..., or fails."""

    def make(fails=""):
        package, described = site / "nsight", site / "nsight_python-1.1.0.dist-info"
        for folder in (package, described):
            folder.mkdir(parents=True, exist_ok=True)
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: nsight-python\nVersion: 1.1.0\n")
        (package / "__init__.py").write_text(f"""
import runpy, sys
assert not {{"torch", "launched"}} & set(sys.modules), "nsight-python has to come before CUDA"
found = runpy.run_path({__file__!r})["module"]({fails!r})
analyze, annotate = found.analyze, found.annotate
""")

    return make


def module(fails="", value=10.0):
    """Return what nsight-python 1.1 has of what is used, with its signatures: launches are counted by their annotation."""

    class Annotate:
        open: list[str] = []  # noqa: RUF012
        seen: list[str] = []  # noqa: RUF012

        def __init__(self, name, ignore_failures=False):
            self.name = name

        def __enter__(self):
            assert not self.open
            assert self.name not in self.seen
            self.open.append(self.name)
            self.seen.append(self.name)

        def __exit__(self, *error):
            self.open.clear()
            return error[0] is None

    def kernel(_func=None, *, configs=None, runs=1, metrics=(), clock_control="none", thermal_mode="auto", output_prefix=None):
        assert thermal_mode == "off"
        assert output_prefix

        def decorate(each):
            def profile():
                each()
                if fails:
                    raise RuntimeError(fails)
                rows = [
                    {"Annotation": name, "AvgValue": value * (1 + i), "Metric": metric, "Kernel": "some_kernel"}
                    for i, name in enumerate(Annotate.seen)
                    for metric in metrics
                ]
                return types.SimpleNamespace(to_dataframe=lambda: pd.DataFrame(rows[::-1]))

            return profile

        return decorate

    return types.SimpleNamespace(analyze=types.SimpleNamespace(kernel=kernel), annotate=Annotate)


def test_copies_with_and_without_the_l1_cache_are_added_up(tool):
    tool(table(GLOBAL, ["10", "40", "1", "2", "4", "8", "1,024"], [0, 0, 0, 3, 0, 12, 7]))
    first, second = counters.global_loads(["true"], "^mixed_decode")
    assert first == {
        "kernel_index": 0, "requests": 10, "sectors": 40, "copy_requests": 3, "copy_sectors": 12, "dram_bytes": 1024,
    }  # fmt: skip
    assert second["copy_sectors"] / second["copy_requests"] == 4
    found = counters.table(TWO, "global loads", "^mixed_decode")
    assert list(found.columns) == ["launch", "kernel", *list(first)[1:], "source"]
    assert found["copy_sectors"].tolist() == [12, 12]


def test_copies_that_no_known_metric_counts_are_not_zero(tool):
    tool(table(GLOBAL, [1] * 7), names=GLOBAL[:2])
    with pytest.raises(MissingPartError, match="no metric of cp\\.async"):
        counters.global_loads(["true"], "^mixed_decode")


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (
            "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
            "Counters on the target device 0.",
            1, "ncu ended with exit code 1: ERR_NVGPUCTRPERM - The user",
        ),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 0, "counted nothing: ERR_NVGPUCTRPERM"),
        ("==WARNING== No kernels were profiled.", 0, "counted nothing: ==WARNING== No kernels were profiled"),
        ("==ERROR== Profiling is not supported on device 0 as it is in MIG mode", 1, "not supported on device 0 as it is in MIG"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute", 9, "exit code 9: Cuda driver is not compatible"),
        ("==PROF== Connected\n==ERROR== The application returned an error code (1).", 1, "returned an error code"),
        ("==ERROR== Failed to find metric regex:^dram__bytes_read$", 1, "Failed to find metric"),
        ("", 0, "counted nothing: it said nothing"),
        *((table(GLOBAL, [value] * 7), 0, f"no value of .*: it says '{told}'") for value, told in (
            ("n/a", "n/a"), ("nan", "nan"), ("(!) nan", ".*nan"), ("inf", "inf"), ("", "nothing"),
        )),
    ],
)  # fmt: skip
def test_why_ncu_cannot_count_is_said(tool, text, code, told):
    tool(text, code)
    for count in (
        lambda: counters.global_loads(["true"], "^mixed_decode"),
        lambda: counters.table(TWO, "global loads", "^mixed_decode"),
    ):
        with pytest.raises(MissingPartError, match=told):
            count()


def test_without_ncu_and_with_one_that_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "find_tool", lambda: None)
    for count in (lambda: counters.global_loads(["true"], "x"), lambda: counters.table(TWO, "shared loads", "x")):
        with pytest.raises(MissingPartError, match="ncu is not installed"):
            count()
    monkeypatch.setattr(counters, "find_tool", lambda: str(tmp_path / "ncu"))
    with pytest.raises(MissingPartError, match=r"ncu could not run: .*No such file"):
        counters.table(TWO, "shared loads", "x")


def test_a_program_that_does_not_end_is_ended(tool, tmp_path):
    tool(table(GLOBAL, [1] * 7))
    slow = tmp_path / "bin" / "ncu"
    slow.write_text(slow.read_text().replace("exit 0", "exit 0", 1).replace('echo "$@"', 'exec sleep 30; echo "$@"'))
    with pytest.raises(MissingPartError, match=r"ncu did not end within 0\.5 s"):
        counters.global_loads(["true"], "x", timeout_s=0.5)


def test_shared_loads_by_ncu(tool):
    calls = tool(table(SHARED, ["1,000", "40", 3, 4, 5], ["7", "0", 6, 7, 8]), names=SHARED)
    found = counters.table(TWO, "shared loads", "^bank_conflicts")
    assert list(found.columns) == COLUMNS
    assert found.drop(columns=["kernel", "source"]).to_numpy().tolist() == [[0, 1000, 40, 3, 4, 5], [1, 7, 0, 6, 7, 8]]
    assert set(found["kernel"]) == {"some_kernel"}
    (source,) = set(found["source"])
    assert source.startswith("ncu 2025.3.1 (nsight-python ")  # is not installed, or needs a later one
    (call,) = calls.read_text().splitlines()
    assert "--kernel-name regex:^bank_conflicts" in call
    assert call.endswith("-m wqlab.profile.driver launched:two [3]")


def test_counters_that_are_not_there_are_named_and_not_zero(tool):
    tool(table(NEEDED, ["7", "0"]), names=NEEDED)
    found = counters.table(TWO, "shared loads", "x")
    assert list(found.columns) == COLUMNS
    assert found[["sass_wavefronts", "sass_conflicts", "instructions"]].isna().all(axis=None)
    assert found["source"][0].endswith("; unavailable: sass_wavefronts, sass_conflicts, instructions, which it does not count here")
    # Listed, and not collected after all: what must be there is asked for alone.
    calls = tool(table(SHARED, ["7", "0", "n/a", "4", "5"]), names=SHARED, table_of_needed=table(NEEDED, ["7", "0"]))
    found = counters.table(TWO, "shared loads", "x")
    assert found[["wavefronts", "conflicts"]].to_numpy().tolist() == [[7, 0]]
    assert "unavailable: sass_wavefronts" in found["source"][0]
    assert len(calls.read_text().splitlines()) == 2


def test_denied_counters_are_asked_for_once(tool):
    calls = tool("==ERROR== ERR_NVGPUCTRPERM", code=1, names=SHARED)
    with pytest.raises(MissingPartError, match="ERR_NVGPUCTRPERM"):
        counters.table(TWO, "shared loads", "x")
    assert len(calls.read_text().splitlines()) == 1


def test_nsight_python_and_ncu_give_the_same_table(tool, nsight):
    nsight()
    calls = tool(table(SHARED, [10] * 5, [20] * 5), names=SHARED, version="2026.2.1.0")
    found = counters.table(TWO, "shared loads", "x")
    assert calls.read_text() == ""  # the stand-in for nsight-python starts no ncu
    assert set(found["source"]) == {"nsight-python 1.1.0, ncu 2026.2.1"}
    tool(table(SHARED, [10] * 5, [20] * 5), names=SHARED, version="2026.1.9.0")
    by_ncu = counters.table(TWO, "shared loads", "x")
    assert set(by_ncu["source"]) == {"ncu 2026.1.9 (nsight-python needs ncu 2026.2.1 or later)"}
    pd.testing.assert_frame_equal(found.drop(columns="source"), by_ncu.drop(columns="source"))
    tool(table(SHARED, [10] * 5), names=SHARED, version="?")
    assert counters.table(TWO, "shared loads", "x")["source"][0].startswith("ncu of an unknown version (nsight-python needs")


def test_where_nsight_python_fails_ncu_counts_and_the_table_says_why(tool, nsight):
    nsight("no report was written")
    tool(table(SHARED, [1] * 5), names=SHARED, version="2027.1.0.0")
    found = counters.table(TWO, "shared loads", "x")
    assert found["source"][0].startswith("ncu 2027.1.0 (nsight-python ended with exit code 1: ")
    assert "RuntimeError: no report was written" in found["source"][0]
    nsight("ERR_NVGPUCTRPERM: see the log\nand more\nand more")
    calls = tool(table(SHARED, [1] * 5), names=SHARED, version="2027.1.0.0")
    with pytest.raises(MissingPartError, match="ERR_NVGPUCTRPERM"):
        counters.table(TWO, "shared loads", "x")
    assert calls.read_text() == ""


def test_the_driver_launches_each_in_an_annotation_of_its_own():
    launched = []

    def launches():
        for i in range(3):
            assert not found.annotate.open  # what makes a launch ready is not counted
            yield lambda i=i: launched.append((i, list(found.annotate.open)))

    found = module()
    counts = driver.counted(found, launches, ["a.sum", "b.sum"], "/tmp/prefix-")
    assert launched == [(0, ["0"]), (1, ["1"]), (2, ["2"])]
    assert counts == [{"kernel": "some_kernel", "counts": {"b.sum": x, "a.sum": x}} for x in (10.0, 20.0, 30.0)]
    json.dumps(driver.counted(module(value=math.nan), launches_of_nothing, ["a.sum"], "p"), allow_nan=False)
    with pytest.raises(MissingPartError, match="no value of a: it says 'nan'"):
        counters._added({"x": ["a"]}, {"a.sum": "nan"})


def launches_of_nothing():
    yield lambda: None


def test_the_driver_runs_alone_and_names_what_it_lacks(tmp_path):
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "wqlab.profile.driver", *arguments], capture_output=True, text=True)

    assert run(*TWO.command[3:]).returncode == 0
    assert shutil.which("ncu") or "nsight" in run(*TWO.command[3:], "--nsight", "a.sum", "--out", str(tmp_path / "x")).stderr
    assert "no attribute 'three'" in run("launched:three").stderr


def test_the_stand_in_has_the_signatures_of_nsight_python():
    """Where nsight-python is installed; it needs no GPU for that."""
    real = pytest.importorskip("nsight")
    used = {"metrics", "runs", "clock_control", "thermal_mode", "output_prefix"}
    assert used <= set(inspect.signature(real.analyze.kernel).parameters)
    assert next(iter(inspect.signature(real.annotate).parameters)) == "name"
    with pytest.raises(Exception, match=r"Nsight Compute|ncu"):
        driver.counted(real, launches_of_nothing, ["a.sum"], "unused-")
