"""SmoothQuant on K and V: its bound, factors by hand, calibration, generations."""

import pytest
import torch
from smoothing_cases import check_bound, made_up_calibration, outliers
from tiny_generation import generate, generate_around, tiny_model

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache, cache_argument
from wqlab.hf.calibration import calibrate
from wqlab.quantizers import DTYPES, create


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("calibration", [None, made_up_calibration()])
def test_error_bound(dtype, num_bits, role, calibration):
    check_bound(create("smoothquant", num_bits, 32, role=role, calibration=calibration), outliers(dtype))


def test_by_hand():
    """Two heads of one channel, a window of two tokens: factors sqrt(16), sqrt(4); both heads of a token share one grid."""
    x = torch.tensor([[16.0, 8.0], [4.0, 1.0]]).reshape(1, 2, 2, 1)
    quantizer = create("smoothquant", 2, 2)
    encoded = quantizer.quantize(x)
    # Smoothed tokens (4, 2) and (2, 0.5): steps 2/3 and 0.5, then the factors 4 and 2.
    torch.testing.assert_close(encoded.scale.flatten(), torch.tensor([2 / 3, 0.5, 4, 2]))
    assert encoded.minimum.flatten().tolist() == [2, 0.5]
    assert encoded.codes.flatten().tolist() == [3, 3, 0, 0]
    torch.testing.assert_close(quantizer.dequantize(encoded), x)


def test_smoothing_helps_the_other_channels():
    x = outliers(torch.float32)
    errors = []
    for alpha in (0.0, 0.5):
        quantizer = create("smoothquant", 4, 32, alpha=alpha)
        errors.append(float((quantizer.dequantize(quantizer.quantize(x)) - x)[..., :3].abs().mean()))
    assert errors[1] < errors[0] / 2


def test_a_calibration_divides_keys_by_queries_and_costs_nothing():
    calibration = made_up_calibration()
    x = outliers(torch.float32)[:, :, :5]  # no whole window is needed
    quantizer = create("smoothquant", 4, 32, calibration=calibration).for_layer(1)
    low, high, query = calibration.of("key", 1)
    expected = (torch.maximum(-low, high) / query).sqrt()
    torch.testing.assert_close(quantizer.factors(x)[0, :, 0], expected)
    assert quantizer.bits_per_element(x.shape, torch.float16) == 4 + 32 / 64
    with pytest.raises(ParameterError, match="layer 2 was not calibrated: 2 layers were"):
        quantizer.for_layer(2)
    with pytest.raises(UnsupportedError, match=r"calibrated for \[kv_heads, head_dim\] = \[2, 32\], got \[2, 16\]"):
        quantizer.quantize(x[..., :16])
    with pytest.raises(ParameterError, match=r"alpha = 2 is outside \[0, 1\]"):
        create("smoothquant", 4, alpha=2)


def test_channels_of_zeros_stay_zero():
    x = outliers(torch.float16)
    x[..., 5] = 0
    quantizer = create("smoothquant", 8, 32)
    assert float(quantizer.dequantize(quantizer.quantize(x))[..., 5].abs().max()) < 0.1
    assert not quantizer.dequantize(quantizer.quantize(torch.zeros_like(x))).any()


def test_generation():
    report = generate_around("smoothquant", 4).report()
    assert report["tokens_per_width"] == {4: 4 * 192, 16: 4 * 15}
    # Per side and layer: codes; scale and minimum of each token; 6 windows of 64 factors; the tail.
    assert report["bytes_held"] == 4 * (192 * 64 // 2 + 192 * 2 * 2 + 6 * 64 * 2 + 15 * 64 * 2)


def test_generation_with_a_calibration():
    model = tiny_model()
    calibration = calibrate(model, input_ids=torch.arange(3, 203)[None])
    cache = QuantizedKVCache("smoothquant", 4, method_options={"calibration": calibration}, storage_dtype=torch.float16)
    report = generate(cache, 200, counted=False).report()
    assert report["bytes_held"] == 4 * (192 * 64 // 2 + 192 * 2 * 2 + 15 * 64 * 2)


def test_calibrate_sees_what_a_cache_holds():
    model, text = tiny_model(), torch.arange(3, 83)[None]
    calibration = calibrate(model, input_ids=text)
    cache = QuantizedKVCache(policy="full")
    model(text, use_cache=True, **cache_argument(model, cache))
    for layer in range(2):
        keys, values = cache.layers[layer].segments.key.dequantize()[0], cache.layers[layer].segments.value.dequantize()[0]
        torch.testing.assert_close(calibration.key_low[layer], keys.amin(1))
        torch.testing.assert_close(calibration.key_high[layer], keys.amax(1))
        torch.testing.assert_close(calibration.value_low[layer], values.amin(1))
        torch.testing.assert_close(calibration.value_high[layer], values.amax(1))
    assert calibration.query_max.shape == (2, 2, 32)
    assert bool((calibration.query_max > 0).all())
