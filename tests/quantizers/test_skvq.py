"""SKVQ: its bound, the order of channels, clipping by hand, its policy, generations."""

import pytest
import torch
from smoothing_cases import made_up_calibration, outliers
from tiny_generation import generate, generate_around, rounding, tiny_model

from wqlab.cache import policies
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache
from wqlab.hf.calibration import calibrate
from wqlab.quantizers import DTYPES, create
from wqlab.quantizers.skvq import channel_order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [2, 4])
@pytest.mark.parametrize("clip", [0.92, 1.0])
@pytest.mark.parametrize("calibration", [None, made_up_calibration()])
@pytest.mark.parametrize("group_size", [16, 24, 128])
def test_error_bound(dtype, num_bits, clip, calibration, group_size):
    x = outliers(dtype)
    quantizer = create("skvq", num_bits, 32, clip=clip, calibration=calibration, group_size=group_size)
    encoded = quantizer.quantize(x)
    y = quantizer.dequantize(encoded)
    tokens, decoded = (t.transpose(1, 2).reshape(2, 64, 64) for t in (x, y))
    spread = quantizer._spread(quantizer._order(tokens), tokens.shape)
    assert torch.equal(spread.sort(2).values, torch.arange(64).expand(2, 64, 64)), "not a permutation"
    arranged, back = tokens.gather(2, spread), decoded.gather(2, spread)
    for group, (part, got) in enumerate(zip(arranged.split(group_size, 2), back.split(group_size, 2), strict=True)):
        wide = (part.amax(2, keepdim=True).double() - part.amin(2, keepdim=True).double()) * (1 - clip) / 2
        scale = encoded.scale[:, 0, :, group : group + 1].double()
        edge = 2 * rounding(part.abs().amax(2, keepdim=True))
        bound = wide + scale / 2 * (1 + 2**-13) + rounding(got) + edge
        assert bool(((part.double() - got.double()).abs() <= bound).all())
    counted = 8 * (encoded.scale.nbytes + encoded.minimum.nbytes) / x.numel()
    assert quantizer.bits_per_element(x.shape, dtype) == pytest.approx(num_bits + counted)


def test_order_puts_like_ranges_together():
    low = -torch.tensor([1.0, 50, 1.1, 8, 49, 0.9, 8.2, 51])
    order = channel_order(low, -low, 3).tolist()
    assert [sorted(order[:3]), sorted(order[3:5]), sorted(order[5:])] == [[0, 2, 5], [3, 6], [1, 4, 7]]


def test_by_hand():
    """Clip 0.8 of [0, 10] is [1, 9], steps of 8 / 3; channels 0 and 2 are alike, and so are 1 and 3."""
    x = torch.tensor([[0.0, 100, 10, 90], [10.0, 0, 0, 20]])
    quantizer = create("skvq", 2, 2, clip=0.8)
    encoded = quantizer.quantize(x[None, None])
    torch.testing.assert_close(encoded.scale[0, 0], torch.tensor([[8.0, 8], [8, 16]]) / 3)
    assert encoded.codes.flatten().tolist() == [0, 3, 3, 0, 3, 0, 0, 3]
    expected = torch.tensor([[1.0, 99, 9, 91], [9, 2, 1, 18]])
    torch.testing.assert_close(quantizer.dequantize(encoded)[0, 0], expected)


def test_reordering_helps_where_ranges_differ():
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    x[..., ::2] *= 20  # every group of neighbours holds both kinds
    ordered = create("skvq", 4, 32, clip=1.0)
    error = (ordered.dequantize(ordered.quantize(x)) - x)[..., 1::2].abs().mean()
    plain = create("kivi", 4, 32, role="value")
    assert error < (plain.dequantize(plain.quantize(x)) - x)[..., 1::2].abs().mean() / 3


def test_refused_settings():
    for options, match in (({"clip": 0}, r"clip = 0 is outside"), ({"group_size": 0}, "group_size = 0"), ({"clip": 1.1}, "clip")):
        with pytest.raises(ParameterError, match=match):
            create("skvq", 2, **options)
    calibrated = create("skvq", 2, calibration=made_up_calibration())
    with pytest.raises(ParameterError, match="layer 2 was not calibrated"):
        calibrated.for_layer(2)
    with pytest.raises(UnsupportedError, match="calibrated for 64 channels in all KV heads, got 32"):
        calibrated.quantize(torch.zeros(1, 2, 32, 16))


@pytest.mark.parametrize(("tokens", "head", "encoded"), [(3, 3, 0), (133, 5, 0), (164, 5, 0), (165, 5, 32), (300, 5, 160)])
def test_policy(tokens, head, encoded):
    assert policies.create("skvq").split(tokens) == (head, encoded)
    assert policies.create("skvq", window_size=1).split(tokens) == (head, max(tokens - 133, 0))


def test_generation():
    report = generate_around("skvq", 2, policy="skvq").report()
    # 207 tokens: 5 sinks, 64 encoded (74 have left the window of 128), 138 in the tail; two groups of 32 over 64 channels.
    assert report["tokens_per_width"] == {2: 4 * 64, 16: 4 * 143}
    assert report["bytes_held"] == 4 * (64 * 64 // 4 + 64 * 2 * 2 * 2 + 2 * 64 * 2 + 143 * 64 * 2)


def test_generation_with_a_calibration_token_by_token():
    calibration = calibrate(tiny_model(), input_ids=torch.arange(3, 203)[None])
    options = {"calibration": calibration, "group_size": 32}
    cache = QuantizedKVCache("skvq", 2, "skvq", window_size=1, method_options=options, storage_dtype=torch.float16)
    report = generate(cache, 200, counted=False).report()
    assert report["tokens_per_width"] == {2: 4 * 74, 16: 4 * 133}
    assert report["bytes_held"] == 4 * (74 * 64 // 4 + 74 * 2 * 2 * 2 + 133 * 64 * 2)
