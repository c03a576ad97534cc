"""RTN against a float64 twin, over shapes, dtypes, widths and granularities; constant groups; refused inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.quantizers import create

SPANS = {"window_channel": (3,), "window_head": (3, 4), "window": (1, 3, 4)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GRANULARITIES = tuple(SPANS)


def check(x, num_bits, granularity, size):
    """Assert the documented bound of every element, in float64, and return the decoded tensor."""
    quantizer = create("rtn", num_bits, size, granularity)
    encoded = quantizer.quantize(x)
    y = quantizer.dequantize(encoded)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert encoded.codes.dtype == torch.uint8
    assert int(encoded.codes.max()) < 2**num_bits
    info = torch.finfo(x.dtype)
    tiny = info.smallest_normal * info.eps  # the smallest subnormal
    batch, heads, seq, dim = x.shape
    groups = x.double().reshape(batch, heads, seq // size, size, dim)
    low, high = groups.amin(SPANS[granularity], keepdim=True), groups.amax(SPANS[granularity], keepdim=True)
    true_step = (high - low) / (2**num_bits - 1)
    scale, minimum = encoded.scale.double().unsqueeze(3), encoded.minimum.double().unsqueeze(3)
    assert torch.equal(minimum, low)  # the minimum is exact
    assert bool((scale >= true_step).all())
    assert bool((scale <= torch.maximum(true_step * (1 + info.eps), true_step + tiny)).all())
    decoded = y.double().reshape(groups.shape)
    rounding = torch.clamp(decoded.abs() * info.eps, min=tiny) / 2
    assert bool(((groups - decoded).abs() <= scale / 2 * (1 + 2**-13) + rounding * (1 + 2**-12)).all())
    return y


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.sampled_from([1, 2, 8, 32]))
    shape = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        size * draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 5, 80, 96])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    exponent = draw(st.integers(-150, 127) if dtype != torch.float16 else st.integers(-26, 15))
    offset = draw(st.sampled_from([0.0, 1.0, -3.0, 100.0]))
    x = (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 + offset) * 2.0**exponent
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype), size


@settings(max_examples=150, deadline=None)
@given(data=tensors(), num_bits=st.sampled_from([2, 4, 8]), granularity=st.sampled_from(GRANULARITIES))
def test_error_is_within_half_a_step(data, num_bits, granularity):
    x, size = data
    check(x, num_bits, granularity, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_whole_range_of_the_dtype(dtype, num_bits):
    limit = torch.finfo(dtype).max
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).mul(limit).clamp(-limit, limit).to(dtype).reshape(1, 1, 64, 1)
    assert bool(torch.isfinite(check(x, num_bits, "window_channel", 64)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_range_below_the_smallest_step_is_exact(dtype):
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = (torch.arange(8, dtype=torch.float64) % 2 * tiny).to(dtype).reshape(1, 1, 8, 1)
    assert torch.equal(check(x, 4, "window_channel", 8), x)


@pytest.mark.parametrize("head_dim", [96, 80, 33])
@pytest.mark.parametrize("num_bits", [2, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_odd_head_sizes_in_a_positive_range(head_dim, num_bits, granularity):
    """A masked lane that reads 0 would stretch a range of [2, 3]."""
    x = (torch.rand(1, 2, 64, head_dim, generator=torch.Generator().manual_seed(1)) + 2).half()
    check(x, num_bits, granularity, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("value", [0.0, -0.0, 7.3, -1e-7, "max"])
def test_constant_tensors_are_exact(dtype, num_bits, granularity, value):
    x = torch.full((1, 2, 64, 6), torch.finfo(dtype).max if value == "max" else value, dtype=dtype)
    assert torch.equal(check(x, num_bits, granularity, 32), x)


def test_zero_padded_window_is_exact_beside_others():
    x = torch.randn(1, 2, 96, 8, generator=torch.Generator().manual_seed(2)).half()
    x[:, :, 32:64] = 0
    for granularity in GRANULARITIES:
        assert bool((check(x, 2, granularity, 32)[:, :, 32:64] == 0).all())


def test_one_constant_channel_among_others_is_exact():
    x = torch.randn(2, 2, 64, 8, generator=torch.Generator().manual_seed(3)).half()
    x[..., 5] = 1.2345
    assert torch.equal(check(x, 2, "window_channel", 32)[..., 5], x[..., 5])


def test_windows_are_independent():
    x = torch.randn(1, 2, 96, 8, generator=torch.Generator().manual_seed(4)).half()
    quantizer = create("rtn", 4, 32)
    whole, part = quantizer.quantize(x), quantizer.quantize(x[:, :, 32:64])
    assert torch.equal(whole.codes[:, :, 32:64], part.codes)
    assert torch.equal(whole.scale[:, :, 1:2], part.scale)


@pytest.mark.parametrize(
    ("granularity", "bits", "dtype", "expected"),
    [
        ("window_channel", 2, torch.float16, 3.0),
        ("window_channel", 4, torch.float16, 5.0),
        ("window_channel", 4, torch.float32, 6.0),
        ("window_head", 4, torch.float16, 4 + 32 / (32 * 64)),
        ("window", 2, torch.bfloat16, 2 + 32 / (3 * 32 * 64)),
    ],
)
def test_bits_count_the_metadata(granularity, bits, dtype, expected):
    quantizer = create("rtn", bits, 32, granularity)
    assert quantizer.bits_per_element((1, 3, 64, 64), dtype) == expected
    encoded = quantizer.quantize(torch.randn(1, 3, 64, 64).to(dtype))
    metadata = 8 * (encoded.scale.nbytes + encoded.minimum.nbytes)
    assert bits + metadata / encoded.codes.numel() == expected


def test_refused_inputs_name_the_value():
    quantizer = create("rtn", 4, 32, role="value")
    with pytest.raises(UnsupportedError, match=r"seq = 40 .* window_size = 32"):
        quantizer.quantize(torch.zeros(1, 1, 40, 8))
    with pytest.raises(UnsupportedError, match="float64"):
        quantizer.quantize(torch.zeros(1, 1, 32, 8).double())
    with pytest.raises(UnsupportedError, match=r"\[32, 8\]"):
        quantizer.quantize(torch.zeros(32, 8))
    x = torch.zeros(1, 1, 32, 8)
    x[0, 0, 3, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    with pytest.raises(NonFiniteError, match=r"value: 3 of 256 elements .*1 NaN, 2 infinite"):
        quantizer.quantize(x)
    for wrong, match in (
        ({"num_bits": 3}, "num_bits = 3"),
        ({"window_size": 0}, "window_size = 0"),
        ({"granularity": "row"}, "row"),
    ):
        with pytest.raises(ParameterError, match=match):
            create("rtn", **wrong)
    with pytest.raises(ParameterError, match="flavour"):
        create("rtn", flavour=1)
