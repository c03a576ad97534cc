"""FP8 against its closed-form bound, by hand, and in a generation."""

import pytest
import torch
from tiny_generation import generate_around, rounding

from wqlab.errors import ParameterError
from wqlab.quantizers import DTYPES, create


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["window_channel", "window_head", "window"])
@pytest.mark.parametrize("exponent", [-13, 0, 10])
def test_error_bound(dtype, granularity, exponent):
    x = torch.randn(2, 3, 64, 33, generator=torch.Generator().manual_seed(exponent), dtype=torch.float64)
    x = (x**3 * 2.0**exponent).clamp(-6e4, 6e4).to(dtype)
    quantizer = create("fp8", 8, 32, granularity)
    encoded = quantizer.quantize(x)
    y = quantizer.dequantize(encoded)
    scale = encoded.scale.double().repeat_interleave(32, 2)
    bound = torch.maximum(x.double().abs() / 16, scale / 1024) * (1 + 2**-20) + rounding(y)
    assert bool(((x.double() - y.double()).abs() <= bound).all())


def test_by_hand():
    """Scale 1: steps of 2 from 16 on, of 1/8 in [1, 2), of 2^-9 near 0; a tie goes to the even code."""
    x = torch.tensor([448.0, 17.0, 1.06, -1.1, 0.003, 0.0]).reshape(1, 1, 6, 1)
    encoded = create("fp8", 8, 6).quantize(x)
    assert encoded.scale.item() == 1
    assert encoded.codes.flatten().tolist() == [0x7E, 0x58, 0x38, 0xB9, 0x02, 0x00]
    decoded = create("fp8", 8, 6).dequantize(encoded).flatten().tolist()
    assert decoded == [448, 16, 1.0, -1.125, 2 * 2**-9, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_range_and_zeros(dtype):
    limit = torch.finfo(dtype).max
    x = torch.tensor([limit, -limit, 0, 1.0]).to(dtype).reshape(1, 1, 4, 1)
    quantizer = create("fp8", 8, 4)
    assert bool(torch.isfinite(quantizer.dequantize(quantizer.quantize(x))).all())
    zeros = torch.zeros_like(x)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(zeros)), zeros)


def test_only_eight_bits():
    with pytest.raises(ParameterError, match="num_bits = 4"):
        create("fp8", 4)


def test_generation():
    cache = generate_around("fp8", 8)
    report = cache.report()
    assert report["tokens_per_width"] == {8: 4 * 192, 16: 4 * 15}
    # Codes of a byte, one scale of 2 bytes per window and channel; 2 KV heads of 32, K and V, 2 layers.
    assert report["bytes_held"] == 4 * 2 * 32 * (192 + 6 * 2 + 15 * 2)
    assert "at 8 bits" in cache.describe()
