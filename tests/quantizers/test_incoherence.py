"""The rotation: orthogonal for every size, the matrix that it claims to be, signs as bits, outliers spread."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab.quantizers.incoherence import random_signs, rotate, rotate_back


def signs_of(size, seed=0):
    return random_signs(size, torch.Generator().manual_seed(seed))


def plus_minus(signs, size):
    """Return the signs as a list, bit by bit."""
    return [-1.0 if signs.tolist()[i // 8] >> (i % 8) & 1 else 1.0 for i in range(size)]


def matrix(signs, size):
    """Return the rotation in float64, element by element from its definition: y = matrix @ x."""
    power = size & -size
    odd = size // power
    rows = []
    for k in range(odd):
        for a in range(power):
            row = []
            for i in range(odd):
                dct = math.cos(math.pi * k * (2 * i + 1) / (2 * odd)) * math.sqrt((1 if k == 0 else 2) / odd)
                row += [dct * (-1) ** bin(a & b).count("1") / math.sqrt(power) for b in range(power)]
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64) * torch.tensor(plus_minus(signs, size), dtype=torch.float64)


@settings(max_examples=40)
@given(size=st.integers(1, 130), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_it_is_its_matrix_and_orthogonal(size, seed, dtype):
    signs = signs_of(size, seed)
    exact = 1e-6 if dtype == torch.float32 else 1e-13
    rotated = rotate(torch.eye(size, dtype=dtype), signs)
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated.T.double(), matrix(signs, size), rtol=0, atol=exact)
    gram = rotated.double() @ rotated.double().T
    torch.testing.assert_close(gram, torch.eye(size, dtype=torch.float64), rtol=0, atol=exact)
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    torch.testing.assert_close(rotate_back(rotate(x, signs), signs), x, rtol=0, atol=8 * exact)
    torch.testing.assert_close(rotate(rotate_back(x, signs), signs), x, rtol=0, atol=8 * exact)


@pytest.mark.parametrize("size", [64, 192, 576, 1536, 1376, 2048])
def test_orthonormal_in_float32_for_the_sizes_of_models(size):
    rotated = rotate(torch.eye(size), signs_of(size))
    gram = rotated.double() @ rotated.double().T
    assert float((gram - torch.eye(size)).abs().max()) < 1e-6
    assert float(rotated.abs().max()) <= math.sqrt(2 / size) * (1 + 1e-5), "an element stands out"


def test_signs():
    signs = signs_of(21)
    assert (signs.dtype, signs.shape) == (torch.uint8, (3,))
    assert int(signs[2]) < 2**5, "bits past the size are zero"
    assert torch.equal(signs, signs_of(21))
    assert not torch.equal(signs_of(576), signs_of(576, 1))
    minus = plus_minus(signs_of(8000), 8000).count(-1.0)
    assert 3800 < minus < 4200
    # A Hadamard matrix of one element leaves the signs alone.
    assert [float(rotate(torch.ones(1), signs_of(1, seed))[0]) for seed in range(20)].count(-1.0) in range(3, 18)


@pytest.mark.parametrize("outlier", ["column", "row", "element"])
def test_outliers_are_spread(outlier):
    """Peaks of 20 to 180 root mean squares come down to those of Gaussian numbers, about five in a hundred thousand."""
    weight = torch.randn(192, 576, generator=torch.Generator().manual_seed(0))
    place = {"column": (slice(None), 7), "row": (3, slice(None)), "element": (5, 9)}[outlier]
    weight[place] *= 5000 if outlier == "element" else 50
    rotated = rotate(rotate(weight, signs_of(576)).T, signs_of(192, 1)).T

    def peak(w):
        return float(w.abs().max() / w.square().mean().sqrt())

    assert peak(weight) > 15
    assert peak(rotated) < 6
    torch.testing.assert_close(rotated.square().sum(), weight.square().sum(), rtol=1e-5, atol=0)
