"""SKVQ: its bound, the order of channels, clipping by hand, its policy, generations."""

import numpy as np
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [2, 4])
@pytest.mark.parametrize("calibration", [None, made_up_calibration()])
@pytest.mark.parametrize("group_size", [16, 24, 128])
def test_fp8_metadata_against_a_twin(dtype, num_bits, calibration, group_size):
    """Group by group in numpy: e4m3 numbers by their definition, the minimum the next below, the scale the next above."""
    x = outliers(dtype)
    made = {m: create("skvq", num_bits, 32, calibration=calibration, group_size=group_size, metadata=m) for m in ("fp16", "fp8")}
    quantizer = made["fp8"]
    encoded = quantizer.quantize(x)
    assert (encoded.scale.dtype, encoded.minimum.dtype) == (torch.uint8, torch.uint8)
    y = quantizer.dequantize(encoded)
    assert y.dtype == dtype
    tokens, decoded = (t.transpose(1, 2).reshape(2, 64, 64) for t in (x, y))
    order = quantizer._order(tokens)
    spread = quantizer._spread(order, tokens.shape)
    arranged, back = quantizer._clipped(tokens.gather(2, spread)).double(), decoded.gather(2, spread)
    positive = [m / 8 * 2.0**e for e in range(-6, 9) for m in range(8, 16)] + [m * 2.0**-9 for m in range(8)]
    table = np.array(sorted({sign * value for value in positive if value <= 448 for sign in (-1, 1)}))
    for part, got in zip(arranged.split(group_size, 2), back.split(group_size, 2), strict=True):
        low, high = part.amin(2, keepdim=True).numpy(), part.amax(2, keepdim=True).numpy()
        minimum = table[np.searchsorted(table, low, side="right") - 1]
        scale = table[np.searchsorted(table, (high - minimum) / (2**num_bits - 1))]
        code = np.clip(np.rint((part.numpy() - minimum) / np.where(scale == 0, 1, scale)), 0, 2**num_bits - 1)
        wanted = torch.from_numpy(code * scale + minimum)
        assert bool(((wanted - got.double()).abs() <= rounding(got)).all())
        assert bool(((part - got.double()).abs() <= torch.from_numpy(scale) / 2 * (1 + 2**-13) + rounding(got)).all())
    # What is counted is what is stored, and the order is that of the other metadata.
    counted = 8 * (encoded.scale.nbytes + encoded.minimum.nbytes) / x.numel()
    assert quantizer.bits_per_element(x.shape, dtype) == pytest.approx(num_bits + counted)
    assert quantizer.bits_per_element(x.shape, dtype) < made["fp16"].bits_per_element(x.shape, dtype)
    plain = made["fp16"].quantize(x)
    assert plain.scale.dtype == dtype
    if calibration is None and group_size < 64:
        numbers = encoded.minimum[:, 0, :, -128:].contiguous().view(torch.int16)
        assert torch.equal(numbers.sort(2).values, torch.arange(64, dtype=torch.int16).expand(2, 2, 64))
        assert torch.equal(numbers.long(), order)


def test_fp8_metadata_of_a_constant_and_of_what_e4m3_does_not_reach():
    quantizer = create("skvq", 2, 2, group_size=4, metadata="fp8")
    for value in (0.0, 1.125, -448.0):  # numbers of e4m3
        x = torch.full((1, 1, 2, 4), value)
        assert torch.equal(quantizer.dequantize(quantizer.quantize(x)), x)
    x = torch.full((1, 1, 2, 4), 1.03)
    assert (quantizer.dequantize(quantizer.quantize(x)) - x).abs().max() < 0.01
    for value in (-500.0, 500.0):
        with pytest.raises(UnsupportedError, match=r"e4m3 ends at 448.*metadata='fp16'"):
            quantizer.quantize(torch.full((1, 1, 2, 4), value))
    with pytest.raises(UnsupportedError, match=r"from 1311 to 3\.146e\+04"):
        quantizer.quantize(torch.tensor([[[[0.0, 1, 2, 32768]] * 2]]))


def test_caches_hold_fp8_metadata_and_count_them():
    held = {}
    for metadata in ("fp16", "fp8"):
        cache = QuantizedKVCache(
            "skvq", 4, policy="skvq", storage_dtype=torch.float16, method_options={"metadata": metadata, "group_size": 16}
        )
        held[metadata] = generate(cache, 300).nbytes()
    # 160 of 300 tokens are encoded, in 2 layers, keys and values; a group of 16 channels takes two bytes less.
    tokens, sides, channels = 160, 4, 64
    assert held["fp16"] - held["fp8"] == tokens * sides * channels // 16 * 2


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
    for options, match in (
        ({"clip": 0}, r"clip = 0 is outside"),
        ({"group_size": 0}, "group_size = 0"),
        ({"clip": 1.1}, "clip"),
        ({"metadata": "fp4"}, "metadata = 'fp4'"),
    ):
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
