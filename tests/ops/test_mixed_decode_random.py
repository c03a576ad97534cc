"""Random calls, as `wqlab bench mixed_decode_errors` draws them by the thousand: some on the emulated GPU, more on a real one."""

import emulated
import pytest
import torch

from wqlab.bench import mixed_decode_errors
from wqlab.bench.decode_cases import build, draw, relative_error


@pytest.mark.parametrize("seed", [0, 2, 5, 8, 11, 31])
def test_the_emulated_kernel_is_within_the_limit(seed):
    built = build(draw(seed, 128), torch.device("cpu"))
    assert relative_error(emulated.attend(built.query, built.cache), built.truth) < mixed_decode_errors.LIMITS["float16"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_hundred_cases_on_a_gpu(monkeypatch):
    monkeypatch.setattr(mixed_decode_errors, "CUDA_CASES", 100)
    monkeypatch.setattr(mixed_decode_errors, "TRITON_CASES", 0)
    found = mixed_decode_errors.MixedDecodeErrorsBench()
    found.check(found.measure())
