"""KIVI: its groups against RTN's bound, by hand; the residual of keys and values; a generation."""

import pytest
import torch
from tiny_generation import generate_around, rounding

from wqlab.cache import policies
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache
from wqlab.quantizers import DTYPES, create


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [2, 4])
@pytest.mark.parametrize(("seq", "head_dim"), [(1, 64), (37, 80), (5, 16), (3, 33)])
def test_error_bound_of_values(dtype, num_bits, seq, head_dim):
    x = (torch.randn(2, 3, seq, head_dim, generator=torch.Generator().manual_seed(seq)) * 5 + 2).to(dtype)
    quantizer = create("kivi", num_bits, 32, role="value")
    encoded = quantizer.quantize(x)
    y = quantizer.dequantize(encoded)
    assert quantizer.bits_per_element(x.shape, dtype) == pytest.approx(
        num_bits + 8 * (encoded.scale.nbytes + encoded.minimum.nbytes) / x.numel()
    )
    for group, channels in enumerate(x.double().split(32, dim=3)):
        step = (channels.amax(3) - channels.amin(3)) / (2**num_bits - 1)
        assert torch.equal(encoded.minimum[..., group].double(), channels.amin(3))
        stored = encoded.scale[..., group].double()
        assert bool((stored >= step).all())
        assert bool((stored <= step * (1 + torch.finfo(dtype).eps)).all())
        part = y[..., 32 * group : 32 * group + 32]
        bound = stored.unsqueeze(3) / 2 * (1 + 2**-13) + rounding(part)
        assert bool(((channels - part.double()).abs() <= bound).all())


def test_keys_are_rtn_per_channel():
    x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0)).half()
    ours, rtn = create("kivi", 2, 32), create("rtn", 2, 32, "window_channel")
    assert torch.equal(ours.quantize(x).codes, rtn.quantize(x).codes)
    assert torch.equal(ours.dequantize(ours.quantize(x)), rtn.dequantize(rtn.quantize(x)))
    with pytest.raises(UnsupportedError, match="seq = 33 is no multiple of window_size = 32"):
        ours.quantize(x[:, :, :33])


def test_by_hand():
    """One token, groups of 4 channels, 2 bits: [0, 1, 2, 3] is exact, [0, 10, 20, 31] has steps of 31 / 3."""
    x = torch.tensor([0.0, 1, 2, 3, 0, 10, 20, 31]).reshape(1, 1, 1, 8)
    quantizer = create("kivi", 2, 4, role="value")
    encoded = quantizer.quantize(x)
    assert encoded.codes.flatten().tolist() == [0, 1, 2, 3] * 2
    torch.testing.assert_close(encoded.scale.flatten(), torch.tensor([1, 31 / 3]))
    expected = torch.tensor([0, 1, 2, 3, 0, 31 / 3, 62 / 3, 31])
    torch.testing.assert_close(quantizer.dequantize(encoded).flatten(), expected)


@pytest.mark.parametrize(("tokens", "keys", "values"), [(1, 0, 0), (127, 0, 0), (128, 128, 0), (129, 128, 1), (300, 256, 172)])
def test_residual(tokens, keys, values):
    rules = policies.create("kivi", window_size=32)
    assert rules.for_role("key").split(tokens) == (0, keys)
    assert rules.for_role("value").split(tokens) == (0, values)
    assert tokens - keys <= rules.for_role("key").max_tail()
    with pytest.raises(ParameterError, match=r"residual_length = 40 is no multiple of window_size = 32; .* take 64"):
        policies.create("kivi", window_size=32, residual_length=40)


def test_crop_and_rows_of_values_encoded_one_by_one():
    cache = QuantizedKVCache("kivi", 4, policy="kivi", window_size=8, residual_length=16)
    x = torch.randn(2, 2, 50, 16, generator=torch.Generator().manual_seed(0)).half()
    cache.update(x, x, 0)
    segments = cache.layers[0].segments
    before = segments.key.dequantize(), segments.value.dequantize()
    cache.crop(-27)  # 23 tokens: inside both encoded parts
    assert torch.equal(segments.key.dequantize(), before[0][:, :, :23])
    assert torch.equal(segments.value.dequantize(), before[1][:, :, :23])
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(segments.value.dequantize(), before[1][1:, :, :23])
    keys, _ = cache.update(x[:1, :, :20], x[:1, :, :20], 0)
    assert keys.shape[2] == len(segments.key) == len(segments.value) == 43


def test_generation():
    cache = generate_around("kivi", 2, policy="kivi")
    # 207 tokens: 128 keys and 79 values are encoded, 79 keys and 128 values are not.
    report = cache.report()
    assert report["tokens_per_width"] == {2: 2 * (128 + 79), 16: 2 * (79 + 128)}
    # Heads of 32: both sides have 3 bits per encoded element, 2 layers and 2 KV heads.
    assert report["bytes_held"] == 2 * 2 * 32 * 207 * (3 + 16) // 8
    assert "at 2 bits" in cache.describe()
