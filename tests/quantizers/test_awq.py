"""AWQ and round to nearest of weights: the grid, its bound, the search against a plain twin, bytes, bad inputs, a real layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.quantizers import DTYPES
from wqlab.quantizers.awq import GRID_POINTS, channel_scales
from wqlab.quantizers.weight_grid import WeightGrid
from wqlab.quantizers.weights import (
    LinearStats,
    QuantizedWeight,
    create_weight_quantizer,
    reorder_by_frequency,
    weighted_error,
)


def layer(out=24, size=80, seed=0, dtype=torch.float32):
    """A weight and inputs whose channels are correlated and of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(size) + torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(400, size, generator=generator) @ mix * torch.exp(torch.randn(size, generator=generator))
    return (torch.randn(out, size, generator=generator) * 0.05).to(dtype), LinearStats.of_inputs(x)


def twin(weight, num_bits, group_size):
    """Round group by group in float64, with the float16 scale as the only rounding of metadata."""
    decoded = torch.empty(weight.shape, dtype=torch.float64)
    steps = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group_size):
            group = weight[row, start : start + group_size].double()
            low, high = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
            exact = (high - low) / (2**num_bits - 1)
            scale = torch.tensor(exact).half()
            if float(scale) < exact:
                scale = torch.nextafter(scale, torch.tensor(torch.inf).half())
            s = float(scale)
            zero = round(-low / s) if s else 0
            codes = ((group / s).round() + zero).clamp(0, 2**num_bits - 1) if s else torch.zeros_like(group)
            decoded[row, start : start + group_size] = (codes - zero) * s
            steps[row, start : start + group_size] = s
    return decoded, steps


@settings(max_examples=25)
@given(
    out=st.integers(1, 5),
    size=st.integers(1, 70),
    num_bits=st.sampled_from([2, 4, 8]),
    group_size=st.integers(1, 40),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_round_to_nearest_is_its_twin_and_keeps_the_bound(out, size, num_bits, group_size, offset, dtype, seed):
    weight = (torch.randn(out, size, generator=torch.Generator().manual_seed(seed)) + offset).to(dtype)
    stats = LinearStats(torch.eye(size), torch.ones(size), 1)
    quantizer = create_weight_quantizer("rtn_weight", num_bits=num_bits, group_size=group_size)
    decoded = quantizer.dequantize(quantizer.quantize(weight, stats))
    expected, steps = twin(weight, num_bits, group_size)
    assert decoded.dtype == dtype
    rounding = torch.finfo(dtype).eps * 4
    # Ties of float32 may fall the other way in float64: then both neighbours are half a step away.
    assert bool(((decoded.double() - weight.double()).abs() <= steps * (0.5 + 1e-4) + rounding * 8).all())
    same = torch.isclose(decoded.double(), expected, rtol=rounding, atol=1e-6)
    assert same.double().mean() > 0.95


def test_by_hand():
    """[-1, 2] in four levels has step 1 and zero point 1; an all-positive group reaches down to 0."""
    weight = torch.tensor([[-1.0, 0.4, 0.6, 2.0, 3.0, 2.1], [0.0, 0, 0, 0, -6, -6]])
    found = WeightGrid(2, 4).encode(weight)
    assert found.codes.tolist() == [[0, 1, 2, 3, 3, 2], [0, 0, 0, 0, 0, 0]]
    assert found.scale.tolist() == [[1, 1], [0, 2]]
    assert found.zero.tolist() == [[1, 0], [0, 3]]
    assert WeightGrid(2, 4).decode(found).tolist() == [[-1, 0, 1, 2, 3, 2], [0, 0, 0, 0, -6, -6]]


def test_tiny_and_huge_weights():
    stats = LinearStats(torch.eye(8), torch.ones(8), 1)
    quantizer = create_weight_quantizer("rtn_weight")
    tiny = torch.full((1, 8), 1e-9)
    assert float((quantizer.dequantize(quantizer.quantize(tiny, stats)) - tiny).abs().max()) <= 2**-24 / 2
    half = torch.tensor([[65504.0, -65504, 1, 0, 0, 0, 0, 0]]).half()
    assert bool(torch.isfinite(quantizer.dequantize(quantizer.quantize(half, stats))).all())
    with pytest.raises(UnsupportedError, match="65504"):
        quantizer.quantize(torch.full((1, 8), 1e6), stats)
    with pytest.raises(UnsupportedError, match="65504"):
        create_weight_quantizer("awq").quantize(torch.full((1, 8), 1e6), stats)


@pytest.mark.parametrize("num_bits", [2, 4])
def test_the_search_is_a_plain_search(num_bits):
    """Every ratio tried in float64, one by one; the kept scales are the best of them."""
    weight, stats = layer()
    quantizer = create_weight_quantizer("awq", num_bits=num_bits, group_size=32)
    stored = quantizer.quantize(weight, stats)
    errors, scales = [], []
    for step in range(20):
        s = (stats.mean_abs.double() ** (step / 20)).clamp_min(1e-4)
        s = (s / (s.max() * s.min()).sqrt()).half().double()
        decoded, _ = twin(weight * s.float(), num_bits, 32)
        errors.append(weighted_error(weight, decoded / s, stats.hessian))
        scales.append(s)
    best = min(range(20), key=errors.__getitem__)
    assert 0 < best < 19, "the case says nothing: the best ratio lies at an end"
    torch.testing.assert_close(stored.scales["channel"].double(), scales[best], rtol=1e-3, atol=0)
    error = weighted_error(weight, quantizer.dequantize(stored), stats.hessian)
    assert error == pytest.approx(min(errors), rel=1e-3)
    plain = create_weight_quantizer("rtn_weight", num_bits=num_bits, group_size=32)
    assert error < 0.9 * weighted_error(weight, plain.dequantize(plain.quantize(weight, stats)), stats.hessian)


def test_channel_scales():
    scales = channel_scales(torch.tensor([0.0, 0.5, 2, 8]))
    assert scales.shape == (GRID_POINTS, 4)
    assert scales[0].tolist() == [1, 1, 1, 1]
    assert bool(torch.isfinite(scales).all())
    assert bool((scales > 0).all())
    torch.testing.assert_close(scales.amax(1).double() * scales.amin(1).double(), torch.ones(20).double(), rtol=2e-3, atol=0)
    assert bool((scales[1:, 1:].diff(dim=1) > 0).all()), "larger activations, larger scales"
    assert bool((channel_scales(torch.zeros(5)) == 1).all())


def test_without_the_search_it_is_round_to_nearest():
    weight, stats = layer()
    plain, off = create_weight_quantizer("rtn_weight"), create_weight_quantizer("awq", search=False)
    a, b = plain.quantize(weight, stats), off.quantize(weight, stats)
    assert torch.equal(plain.dequantize(a), off.dequantize(b))
    assert a.bits() == b.bits()
    assert (plain.learns_from_data, off.learns_from_data) == (False, True)


@pytest.mark.parametrize("method", ["awq", "rtn_weight"])
@pytest.mark.parametrize(("num_bits", "size"), [(4, 80), (2, 81), (8, 128), (4, 131)])
def test_bits_by_hand_and_a_round_trip_through_bytes(method, num_bits, size):
    weight, stats = layer(size=size, dtype=torch.float16)
    quantizer = create_weight_quantizer(method, num_bits=num_bits, group_size=32)
    stored = quantizer.quantize(weight, stats)
    groups, weights = -(-size // 32), 24 * size
    codes = 24 * -(-size * num_bits // 8)
    scales = 24 * groups * 2 + 24 * -(-groups * num_bits // 8) + (2 * size if method == "awq" else 0)
    expected = {"codes": 8 * codes / weights, "codebooks": 0, "scales": 8 * scales / weights}
    assert stored.bits() == pytest.approx(expected | {"total": sum(expected.values())})
    assert quantizer.code_bits == num_bits
    back = QuantizedWeight(
        method, load(save(stored.codes)), {}, load(save(stored.scales)), stored.shape, stored.dtype, dict(stored.meta)
    )
    # Read by an object of other options: bits and groups belong to what is stored.
    assert torch.equal(create_weight_quantizer(method).dequantize(back), quantizer.dequantize(stored))


def test_the_same_twice_and_no_codebook():
    weight, stats = layer()
    quantizer = create_weight_quantizer("awq")
    a, b = (quantizer.quantize(weight, stats) for _ in range(2))
    assert all(torch.equal(a.scales[name], b.scales[name]) for name in a.scales)
    assert torch.equal(a.codes["codes"], b.codes["codes"])
    assert quantizer.entry_indices(a) is None
    assert quantizer.stored_entries == 0
    with pytest.raises(UnsupportedError, match="no codebook"):
        reorder_by_frequency(quantizer, a)


def test_channels_that_never_fire():
    weight, stats = layer()
    x = torch.randn(300, 80, generator=torch.Generator().manual_seed(1))
    x[:, 5::7] = 0
    quantizer = create_weight_quantizer("awq")
    for inputs in (x, torch.zeros(10, 80)):
        decoded = quantizer.dequantize(quantizer.quantize(weight, LinearStats.of_inputs(inputs)))
        assert bool(torch.isfinite(decoded).all())
    zeros = torch.zeros(4, 80)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(zeros, stats)), zeros)


@pytest.mark.parametrize("method", ["awq", "rtn_weight"])
@pytest.mark.parametrize("options", [{"num_bits": 3}, {"num_bits": True}, {"group_size": 0}, {"group_size": 1.5}, {"bits": 4}])
def test_bad_options(method, options):
    with pytest.raises(ParameterError):
        create_weight_quantizer(method, **options)


def test_bad_search():
    with pytest.raises(ParameterError, match="search = 1"):
        create_weight_quantizer("awq", search=1)


@pytest.mark.parametrize("method", ["awq", "rtn_weight"])
def test_bad_inputs(method):
    weight, stats = layer()
    quantizer = create_weight_quantizer(method)
    broken = weight.clone()
    broken[3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match="1 NaN"):
        quantizer.quantize(broken, stats)
    with pytest.raises(ParameterError, match="80 inputs"):
        quantizer.quantize(weight[:, :79], stats)
    with pytest.raises(UnsupportedError, match="float64"):
        quantizer.quantize(weight.double(), stats)
    with pytest.raises(UnsupportedError, match="shape"):
        quantizer.quantize(weight[0], stats)


def test_a_real_layer():
    """SmolLM2's first key and middle output projections, on prose that the search did not read."""
    from wqlab.models import load as load_model
    from wqlab.models.prose import prose

    torch.set_num_threads(1)
    loaded = load_model("smollm2")
    layers = [loaded.model.model.layers[0].self_attn.k_proj, loaded.model.model.layers[15].self_attn.o_proj]
    inputs = {0: [], 1: []}
    hooks = [m.register_forward_pre_hook(lambda _, a, i=i: inputs[i].append(a[0][0].float())) for i, m in enumerate(layers)]
    with torch.no_grad():
        for skip in (0, 384):
            loaded.model(prose(loaded.tokenizer, 384, skip=skip)[0])
    for hook in hooks:
        hook.remove()
    for i, module in enumerate(layers):
        weight = module.weight.detach()
        learnt, fresh = (LinearStats.of_inputs(x) for x in inputs[i])
        errors = {}
        for method in ("rtn_weight", "awq"):
            quantizer = create_weight_quantizer(method)
            decoded = quantizer.dequantize(quantizer.quantize(weight, learnt))
            errors[method] = weighted_error(weight, decoded, learnt.hessian), weighted_error(weight, decoded, fresh.hessian)
        assert errors["awq"][0] < errors["rtn_weight"][0] < 0.05
        assert errors["awq"][1] < errors["rtn_weight"][1]
