"""The op `cq_encode`: its reference against brute force, how it picks a backend, its kernel in the interpreter and compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops import cq_encode
from wqlab.ops.cq_encode import reference

HERE = Path(__file__).parent


def brute_force(x, entries):
    """Return codes by loops in float64; of equally near entries numpy takes the first."""
    x, entries = x.double().numpy(), entries.double().numpy()
    batch, heads, seq, _ = x.shape
    _, groups, _, size = entries.shape
    codes = np.empty((batch, heads, seq, groups), np.uint8)
    for b, h, t, g in np.ndindex(codes.shape):
        vector = x[b, h, t, g * size : (g + 1) * size]
        codes[b, h, t, g] = ((entries[h, g] - vector) ** 2).sum(-1).argmin()
    return torch.from_numpy(codes)


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


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_reference_is_the_nearest_entry(data):
    batch, heads, seq, groups = (data.draw(st.integers(1, 3)) for _ in range(4))
    size, count = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.integers(1, 256))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    # A coarse grid makes ties, which every float computes alike.
    x = torch.randint(-4, 5, (batch, heads, seq, groups * size), generator=generator).half()
    entries = torch.randint(-4, 5, (heads, groups, count, size), generator=generator).float()
    want = brute_force(x, entries)
    for dtype in (torch.float32, torch.float64):
        found = reference.encode(x, entries, dtype)
        assert found.dtype == torch.uint8
        assert torch.equal(found, want)


@pytest.mark.parametrize("at_once", [1, 1000])
def test_the_reference_in_parts(at_once, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, entries = torch.randn(2, 2, 7, 8, generator=generator), torch.randn(2, 4, 19, 2, generator=generator)
    whole = brute_force(x, entries)
    excess, least = reference.excess(x, entries, whole)
    assert excess.eq(0).all()
    monkeypatch.setattr(reference, "_AT_ONCE", at_once)
    assert torch.equal(reference.encode(x, entries, torch.float64), whole)
    assert all(map(torch.equal, reference.excess(x, entries, whole), (excess, least)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_to_encode(dtype):
    for shape in ((0, 2, 3, 8), (1, 2, 0, 8)):
        assert reference.encode(torch.zeros(shape), torch.zeros(2, 4, 5, 2), dtype).shape == (*shape[:3], 4)


def test_excess_is_the_distance_beyond_the_nearest():
    x = torch.tensor([[[[0.0, 0.0, 1.0, 1.0]]]])
    entries = torch.tensor([[[[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 0.0], [9.0, 9.0]]]])
    excess, least = reference.excess(x, entries, torch.tensor([[[[1, 1]]]], dtype=torch.uint8))
    assert excess.flatten().tolist() == [8.0, 2.0]
    assert least.flatten().tolist() == [1.0, 0.0]
    excess, _ = reference.excess(x, entries, torch.tensor([[[[2, 3]]]], dtype=torch.uint8))
    assert excess.flatten().tolist() == [3.0, float("inf")]


def test_the_bound_grows_with_the_book_and_the_vector():
    entries = torch.tensor([[[[9.0, 10.0], [11.0, 10.0]]]])  # mean 10, 10; radius 1
    x, least = torch.tensor([[[[-3.0, 2.0]]]]), torch.tensor([[[[5.0]]]], dtype=torch.float64)
    assert reference.bound(x, entries, least).item() == 2.0**-16 * 5 + 2.0**-12 * 1 * (1 + 3 + 10)


def test_a_call_without_a_gpu_takes_the_reference_and_says_why():
    x, entries = torch.randn(1, 1, 3, 4), torch.randn(1, 2, 5, 2)
    assert torch.equal(cq_encode.encode(x, entries), reference.encode(x, entries))
    assert cq_encode.explain(x, entries) == ("reference", "x lies on cpu, and the kernel needs a CUDA device")
    assert cq_encode.explain(x, entries, "reference").reason == "asked for by name"
    with pytest.raises(UnsupportedError, match="cannot serve this call: the tensors lie on cpu"):
        cq_encode.encode(x, entries, "triton")
    with pytest.raises(UnsupportedError, match="cannot be prepared for the kernel"):
        cq_encode.prepare(entries)
    with pytest.raises(UnsupportedError, match=r"not torch.float32; pass them as they are"):
        cq_encode.prepare(entries, torch.float32)


@pytest.mark.parametrize(
    ("x", "entries", "error", "words"),
    [
        (torch.zeros(1, 1, 3, 4), torch.zeros(1, 2, 257, 2), ParameterError, "at most 256 entries"),
        (torch.zeros(1, 1, 3, 4), torch.zeros(1, 2, 0, 2), ParameterError, "of 1 or more each"),
        (torch.zeros(1, 1, 3, 4), torch.zeros(2, 5, 2), ParameterError, "are not .heads, groups"),
        (torch.zeros(1, 1, 3, 4), torch.zeros(1, 2, 5, 2).half(), UnsupportedError, "convert them with .float"),
        (torch.zeros(1, 1, 3, 4).double(), torch.zeros(1, 2, 5, 2), UnsupportedError, "x of torch.float64"),
        (torch.zeros(1, 1, 3, 6), torch.zeros(1, 2, 5, 2), ParameterError, "must be .batch, 1, seq, 4."),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 2), ParameterError, "does not fit codebooks of 1 heads"),
        (torch.zeros(1, 3, 4), torch.zeros(1, 2, 5, 2), ParameterError, "does not fit"),
        (torch.zeros(1, 1, 3, 4, device="meta"), torch.zeros(1, 2, 5, 2), ParameterError, "move one of them"),
    ],
)
def test_what_does_not_fit_is_refused(x, entries, error, words):
    with pytest.raises(error, match=words):
        cq_encode.encode(x, entries)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ParameterError, match="backend = 'cuda' is not one of auto, triton, reference"):
        cq_encode.encode(torch.zeros(1, 1, 3, 4), torch.zeros(1, 2, 5, 2), "cuda")


def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "cq_encode_interpreted.py")
    assert " passed" in run(*command, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_a_gpu():
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "cq_encode_interpreted.py")
    assert " passed" in run(*command, TRITON_INTERPRET="0")


def compile_for(architecture, cases, folder):
    """Return what cq_encode_compiled.py says per case; `TRITON_CACHE_DIR` is empty, so everything is really compiled."""
    command = ("cq_encode_compiled.py", architecture, json.dumps(cases), folder)
    lines = run(*command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder)).splitlines()
    assert len(lines) == len(cases)
    return [json.loads(line) for line in lines]


def test_the_default_tilings_compile_for_sm_90_without_spills(tmp_path):
    pytest.importorskip("triton")
    for found in compile_for(90, [{"vector_size": 2}, {"vector_size": 4}], tmp_path):
        assert found["spilled"] == 0, found
        assert found["shared"] <= 227 * 1024, found
        # Tensor cores multiply (two warps a program, which was the fastest, by mma.sync), and the largest of three scores is one
        # instruction.
        assert found["instructions"]["HMMA"] > 0, found
        assert found["instructions"]["VIMNMX3"] > found["instructions"].get("FMNMX", 0), found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_bfloat16_and_odd_groups_compile_for_old_and_new_architectures(architecture, tmp_path):
    pytest.importorskip("triton")
    cases = [{"vector_size": 2, "dtype": "bfloat16"}, {"vector_size": 4, "groups": 3}]
    for found in compile_for(architecture, cases, tmp_path):
        assert found["shared"] <= 99 * 1024, found
