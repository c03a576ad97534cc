"""QoQ's KV4: its bound, rotary pairs, by hand, calibration, generations."""

import pytest
import torch
from smoothing_cases import check_bound, made_up_calibration, outliers
from tiny_generation import generate, generate_around, tiny_model

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache
from wqlab.hf.calibration import calibrate
from wqlab.quantizers import DTYPES, create


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("calibration", [None, made_up_calibration()])
def test_error_bound(dtype, num_bits, role, calibration):
    check_bound(create("qoq", num_bits, 32, role=role, calibration=calibration), outliers(dtype))


def test_rotary_pairs_share_a_factor_and_values_have_none():
    x = outliers(torch.float32)
    factors = create("qoq", 4, 32).factors(x)
    assert torch.equal(factors[..., :16], factors[..., 16:])
    assert create("qoq", 4, 32, role="value").factors(x) is None
    with pytest.raises(UnsupportedError, match="head_dim = 33 is odd"):
        create("qoq", 4, 32).quantize(torch.zeros(1, 1, 32, 33))
    create("qoq", 4, 32, role="value").quantize(torch.zeros(1, 1, 7, 33))
    with pytest.raises(ParameterError, match="num_bits = 2 is not one of 4, 8"):
        create("qoq", 2)


def test_a_factor_of_pairs_commutes_with_the_rotary_embedding():
    x = outliers(torch.float64)[:1]
    factors = create("qoq", 4, 32).smooth(x.abs().amax(2, keepdim=True), None)
    angle = torch.arange(64)[:, None] * 0.37 ** torch.arange(16)

    def rotate(k):
        a, b = k[..., :16], k[..., 16:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    torch.testing.assert_close(rotate(x / factors) * factors, rotate(x))


def test_by_hand():
    """One head of two channels, largest 16 and 4: both are divided by 4; a step of a token is its range / 15."""
    x = torch.tensor([[16.0, 1.0], [-8.0, 4.0]]).reshape(1, 1, 2, 2)
    quantizer = create("qoq", 4, 2)
    encoded = quantizer.quantize(x)
    torch.testing.assert_close(encoded.scale.flatten(), torch.tensor([3.75 / 15, 3 / 15, 4, 4]))
    assert encoded.minimum.flatten().tolist() == [0.25, -2]
    assert encoded.codes.flatten().tolist() == [15, 0, 0, 15]
    torch.testing.assert_close(quantizer.dequantize(encoded), x)


def test_generation():
    report = generate_around("qoq", 4).report()
    assert report["tokens_per_width"] == {4: 4 * 192, 16: 4 * 15}
    # Per side and layer: codes; scale and minimum of each token and head; the tail. Keys: 6 windows of 64 factors.
    assert report["bytes_held"] == 4 * (192 * 64 // 2 + 192 * 2 * 2 * 2 + 15 * 64 * 2) + 2 * 6 * 64 * 2


def test_generation_with_a_calibration():
    calibration = calibrate(tiny_model(), input_ids=torch.arange(3, 203)[None])
    cache = QuantizedKVCache("qoq", 4, method_options={"calibration": calibration}, storage_dtype=torch.float16)
    assert generate(cache, 200, counted=False).report()["bytes_held"] == 4 * (192 * 64 // 2 + 192 * 2 * 2 * 2 + 15 * 64 * 2)
