"""AQLM against float64 and brute force: codes, losses, bytes, labels, real layers against round to nearest."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import bitstream
from wqlab.quantizers.aqlm import AQLMQuantizer, _State
from wqlab.quantizers.ldlq import damped
from wqlab.quantizers.weights import LinearStats, weighted_error

SMALL = AQLMQuantizer(num_entries=16, vector_size=4, sweeps=4)


def layer(out=24, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(size) + torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(400, size, generator=generator) @ mixed
    return torch.randn(out, size, generator=generator) * 0.02, LinearStats.of_inputs(x)


def rtn(weight, num_bits, group):
    """Asymmetric grids over groups of columns, with unrounded scales and minima."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    step = (high - low) / (2**num_bits - 1)
    return (((grouped - low) / step).round() * step + low).flatten(1)


@settings(max_examples=8, deadline=None)
@given(
    out=st.integers(1, 30), groups=st.integers(1, 6), size=st.sampled_from([2, 4, 8]), entries=st.sampled_from([2, 5, 32]),
    residuals=st.sampled_from([1, 2]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_decodes_from_its_bytes_and_never_loses_more(out, groups, size, entries, residuals, seed):
    weight, stats = layer(out, groups * size, seed)
    quantizer = AQLMQuantizer(num_entries=entries, num_residuals=residuals, vector_size=size, sweeps=2, seed=seed)
    found = quantizer.quantize(weight, stats)
    bits = quantizer.spec.index_bits
    codes = bitstream.unpack(found.codes["codes"], bits, groups * residuals).reshape(out, groups, residuals)
    books, scale = found.codebooks["entries"].double(), found.scales["scale"].double()
    twin = torch.zeros(out, groups * size, dtype=torch.float64)
    for row, group, residual in itertools.product(range(out), range(groups), range(residuals)):
        twin[row, group * size : (group + 1) * size] += books[residual, codes[row, group, residual]] * scale[row]
    torch.testing.assert_close(quantizer.dequantize(found).double(), twin, atol=1e-7, rtol=1e-5)
    assert all(after <= before for before, after in itertools.pairwise(found.losses))
    hessian = damped(stats.hessian, quantizer.damping)
    assert found.losses[-1] == pytest.approx(weighted_error(weight, twin, hessian), rel=1e-4)


def test_the_search_finds_the_best_pair_when_the_beam_is_wide():
    generator = torch.Generator().manual_seed(0)
    target, entries = torch.randn(40, 4, generator=generator), torch.randn(2, 16, 4, generator=generator)
    wide = AQLMQuantizer(num_entries=16, vector_size=4, beam=16)
    sums = (entries[0][:, None] + entries[1][None]).reshape(-1, 4)
    best = (target[:, None].double() - sums.double()).square().sum(2).min(1).values
    for first in (0, 1):
        found = wide._search(target, entries, torch.zeros(2, 40, dtype=torch.int64), first)
        distance = (target - entries[0][found[0]] - entries[1][found[1]]).double().square().sum(1)
        torch.testing.assert_close(distance, best, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_a_narrow_beam_never_leaves_a_better_pair(first):
    generator = torch.Generator().manual_seed(1)
    target, entries = torch.randn(60, 4, generator=generator), torch.randn(2, 16, 4, generator=generator)
    present = torch.randint(0, 16, (2, 60), generator=generator)

    def distance(codes):
        return (target - entries[0][codes[0]] - entries[1][codes[1]]).square().sum(1)

    narrow = AQLMQuantizer(num_entries=16, vector_size=4, beam=1)
    assert (distance(narrow._search(target, entries, present, first)) <= distance(present) + 1e-6).all()


def test_one_group_of_columns_is_coded_in_the_metric_of_the_output():
    """With one group there is nothing to make up for: the codes must be the best of all pairs by brute force."""
    weight, stats = layer(12, 4)
    wide = AQLMQuantizer(num_entries=16, vector_size=4, beam=16)
    hessian = damped(stats.hessian, wide.damping).float()
    state = wide._start(weight)
    found = wide._coded(state, weight, hessian, 0)
    sums = (state.entries[0][:, None] + state.entries[1][None]).reshape(-1, 4).double()
    lost = sums[None] * state.scale.double().unsqueeze(2) - weight.double().unsqueeze(1)
    best = torch.einsum("rki,ij,rkj->rk", lost, hessian.double(), lost).min(1).values
    off = found.decoded().double() - weight.double()
    torch.testing.assert_close((off @ hessian.double() * off).sum(1), best, rtol=1e-4, atol=1e-9)


def test_better_than_round_to_nearest_at_equal_code_bits():
    weight, stats = layer(128, 128)
    quantizer = AQLMQuantizer(num_entries=64, vector_size=4)  # 12 bits for four weights: 3
    found = quantizer.quantize(weight, stats)
    assert quantizer.code_bits == found.bits()["codes"] == 3
    own = weighted_error(weight, quantizer.dequantize(found), stats.hessian)
    assert own < weighted_error(weight, rtn(weight, 3, 128), stats.hessian) / 2
    assert len(found.losses) > 2
    assert found.losses[-1] < found.losses[0] / 1.5, "learning gains on the start"


def test_bytes_of_the_published_form():
    weight, stats = layer(4, 576)
    found = AQLMQuantizer(sweeps=0).quantize(weight, stats)
    assert found.codes["codes"].shape == (4, 576 // 8 * 3)
    assert found.codebooks["entries"].shape == (2, 4096, 8)
    assert found.codebooks["entries"].dtype == torch.float16
    assert 8 * found.codebooks["entries"].nbytes / 576**2 == pytest.approx(3.16, abs=0.005), "on a layer of 576 x 576"
    assert str(AQLMQuantizer().spec) == "VQ<8,4096,2>"


def test_fewer_vectors_than_entries_are_exact_and_leave_the_rest_zero():
    weight, stats = layer(3, 8)
    quantizer = AQLMQuantizer(num_entries=64, vector_size=4)
    found = quantizer.quantize(weight, stats)
    torch.testing.assert_close(quantizer.dequantize(found), weight, atol=2e-5, rtol=2e-3)
    used = quantizer.entry_indices(found).unique(dim=1).shape[1]
    assert used <= 6
    assert (found.codebooks["entries"][0].abs().sum(1) == 0).sum() >= 64 - 6


def test_the_scale_of_a_row_is_the_best_one():
    weight, stats = layer()
    found = SMALL.quantize(weight, stats)
    state = SMALL._state(found)
    hessian = damped(stats.hessian, SMALL.damping)
    before = weighted_error(weight, state.decoded(), hessian)
    for factor in (0.9, 1.1):
        moved = _State(state.codes, state.entries, state.scale * factor)
        assert weighted_error(weight, moved.decoded(), hessian) > before


@pytest.mark.parametrize(
    "options",
    [
        {"num_entries": 1},
        {"num_entries": 2**17},
        {"num_residuals": 3},
        {"beam": 0},
        {"sweeps": -1},
        {"seed": 0.5},
        {"damping": 0.0},
    ],
)
def test_options_outside_their_limits_are_named(options):
    (name,) = options
    with pytest.raises(ParameterError, match=f"aqlm: {name} = "):
        AQLMQuantizer(**options)


def test_columns_must_fill_vectors():
    weight, stats = layer(4, 12)
    with pytest.raises(UnsupportedError, match="in_features = 12 is no multiple of the vector size 8"):
        AQLMQuantizer().quantize(weight, stats)


def test_a_real_layer_loses_less_than_round_to_nearest_with_a_bit_more():
    from wqlab.hf.linears import collect_stats, decoder_linears
    from wqlab.models import load
    from wqlab.models.prose import prose

    loaded = load("smollm2")
    decoder = loaded.model.model
    decoder.layers = decoder.layers[:1]
    stats = collect_stats(decoder, [{"input_ids": prose(loaded.tokenizer, 600)[0]}])
    name, linear = next((n, m) for n, m in decoder_linears(decoder).items() if n.endswith("k_proj"))
    weight = linear.weight.detach()[:64].float()
    quantizer = AQLMQuantizer(num_entries=256, sweeps=3)  # 2 bits per weight; 4,096 entries would be as many as there are vectors
    own = weighted_error(weight, quantizer.dequantize(quantizer.quantize(weight, stats[name])), stats[name].hessian)
    assert own < weighted_error(weight, rtn(weight, 3, 64), stats[name].hessian)
