import os
import re
from pathlib import Path

import pytest
import torch

from wqlab import bench, paths, records
from wqlab.bench import decode_cases, sanitized_launches, sanitizer
from wqlab.errors import LimitError
from wqlab.ops.mixed_decode import cuda_kernel
from wqlab.profile import environment

ENDED = "launches: 40, wrong results: 0"


@pytest.mark.parametrize(
    ("output", "code", "result", "errors"),
    [
        (f"========= COMPUTE-SANITIZER\n{ENDED}\n========= ERROR SUMMARY: 0 errors", 0, "clean", 0),
        (f"{ENDED}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "clean", 0),
        (
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n=========\n"
            "=========     at mixed_decode+0x40\n========= ERROR SUMMARY: 1 error",
            86, "found: Invalid __global__ read of size 4 bytes; at mixed_decode+0x40; ERROR SUMMARY: 1 error", 1,
        ),
        (f"========= Warning: Race\n{ENDED}\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error)", 86, "found", 2),
        ("========= Error: Target application terminated before first instrumented API call", 1, "unavailable: it ended", None),
        ("it did not end within 300 s", 124, "unavailable: it ended with exit code 124", None),
        ("a: relative error inf, wrong\nlaunches: 40, wrong results: 1\n========= ERROR SUMMARY: 0 errors", 1, "unavailable", None),
        ("========= ERROR SUMMARY: 0 errors", 0, "unavailable", None),  # no error, because nothing was launched
    ],
)  # fmt: skip
def test_what_the_tool_says(output, code, result, errors):
    found = sanitizer.read(output, code)
    assert found.result.startswith(result)
    assert found.errors == errors


def test_without_a_gpu_the_record_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environment.hardware.cache_clear()
    bench.run("sanitizer", tmp_path)
    data = records.read("sanitizer", "cpu", tmp_path).data
    assert list(data["tool"]) == 2 * ["none", *sanitizer.TOOLS]
    assert list(data["program"].str.rpartition(" ")[2].unique()) == ["cuda", "triton"]
    assert data["result"].str.startswith("unavailable: torch finds no CUDA device").all()
    assert data["errors"].isna().all()


def test_what_is_found_ends_the_bench_with_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clean, bad = sanitizer.Finding("clean", 0), sanitizer.Finding("found: Race reported", 3)
    monkeypatch.setattr(sanitizer.SanitizerBench, "_run", staticmethod(lambda group: ([clean, clean, bad], "2025.3")))
    found = sanitizer.SanitizerBench()
    assert [(h.metric, h.ours) for h in found.headlines(found.measure())] == [
        (f"{tool}, all {group} kernels", errors)
        for group in ("cuda", "triton")
        for tool, errors in (("memcheck", 0), ("racecheck", 3))
    ]
    with pytest.raises(LimitError, match="racecheck: found: Race reported"):
        found.check(found.measure())


def stand_in(folder, name, text):
    """Put a program in the place of another."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_it_runs_the_tools_as_they_want_to_be_called(tmp_path, monkeypatch):
    log = tmp_path / "log"
    python = stand_in(tmp_path, "python", f'echo "{ENDED}"')
    monkeypatch.setattr(sanitizer.sys, "executable", str(python))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    found, version = sanitizer.SanitizerBench._run("triton")
    assert [one.result.split(":")[0] for one in found] == ["clean", "unavailable", "unavailable"]
    monkeypatch.undo()
    monkeypatch.setattr(sanitizer.sys, "executable", str(python))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    stand_in(
        tmp_path, "compute-sanitizer",
        f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {log}\ncase "$1" in --version) echo "Version 2025.3.1.0";; '
        f'*) echo "{ENDED}"; echo "========= ERROR SUMMARY: 0 errors";; esac',
    )  # fmt: skip
    found, version = sanitizer.SanitizerBench._run("triton")
    assert found == [sanitizer.Finding("clean", 0)] * 3
    assert version == "2025.3.1.0"
    lines = log.read_text().splitlines()
    assert sum(f"--tool {tool} " in line for tool in sanitizer.TOOLS for line in lines) == 2
    assert all("sanitized_launches triton" in line for line in lines if "--tool" in line)
    assert all(line.startswith("1 ") for line in lines)


def test_the_program_launches_what_the_kernel_serves():
    cases = sanitized_launches.cases()
    assert {(c.head_dim, c.q_len > 1, c.mask) for c in cases} >= {(64, False, True), (128, True, True), (128, False, False)}
    for case in cases:
        built = decode_cases.build(case, torch.device("cpu"))
        assert cuda_kernel.refusal(built.query, built.cache) is None
        assert built.truth.isfinite().all()


def test_the_program_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitized_launches.main("cuda") == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_every_kernel_that_is_launched_is_among_them():
    """By the sources: a new kernel has to be added here, or be one that is never launched."""
    declared = [path.read_text() for path in (Path(paths.checkout()) / "kernels").glob("*.j2")]
    cuda = {name for text in declared for name in re.findall(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+(?:\{\{)?)", text)}
    known = {
        re.sub(r"_\d+$", "_", name) if name.startswith("bank_conflicts") else name for name in sanitized_launches.KERNELS["cuda"]
    }
    assert {name.removesuffix("{{") for name in cuda} - {"occupancy_"} == known
    compiled = [path.read_text() for path in (Path(paths.checkout()) / "wqlab" / "ops").rglob("*.py")]
    triton = {name for text in compiled for name in re.findall(r"@triton\.jit.*\ndef (_\w+_kernel)", text)}
    assert triton == set(sanitized_launches.KERNELS["triton"])
