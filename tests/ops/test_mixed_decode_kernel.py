"""The Triton kernel of `mixed_decode`: run in the interpreter, compiled for a GPU that is not here, and run on one that is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run(*command, **environment):
    """Run Python in a process of its own: interpreter and compiler do not share one, and each is chosen when triton is imported."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=HERE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _needs_triton():
    pytest.importorskip("triton")


def test_the_kernel_equals_the_reference_and_float64_in_the_interpreter():
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "mixed_decode_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_equals_the_reference_and_float64_on_a_gpu():
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "mixed_decode_interpreted.py", TRITON_INTERPRET="0")


def compile_for(architecture, shapes, folder):
    lines = run(
        "mixed_decode_compiled.py", architecture, json.dumps(shapes), folder, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder)
    )
    return [json.loads(line) for line in lines.splitlines()]


#: [head_dim, q_len, query heads per KV head]
SHAPES = [[64, 1, 7], [80, 1, 1], [96, 1, 3], [128, 1, 7], [256, 64, 1]]


def test_every_head_size_compiles_for_sm_90_without_spills(tmp_path):
    found = compile_for(90, SHAPES, tmp_path)
    assert [[f["head_dim"], f["q_len"], f["group"]] for f in found] == SHAPES
    for kernels in found:
        for name in ("partial", "combine"):
            assert kernels[name]["spilled"] == 0, kernels
            assert 16 <= kernels[name]["registers"] <= 255, kernels
            assert kernels[name]["shared"] <= 227 * 1024, kernels


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 86, 89])
def test_other_architectures_compile_too(architecture, tmp_path):
    for kernels in compile_for(architecture, SHAPES, tmp_path):
        assert kernels["partial"]["spilled"] == 0, kernels
        assert kernels["partial"]["shared"] <= 99 * 1024, kernels
