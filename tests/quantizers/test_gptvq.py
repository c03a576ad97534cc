"""GPTVQ: feedback against a float64 twin, tiles at the edges, bytes, labels, losses, real layers against round to nearest."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.quantizers import kmeans
from wqlab.quantizers.ldlq import damped
from wqlab.quantizers.weights import LinearStats, QuantizedWeight, create_weight_quantizer, reorder_by_frequency, weighted_error

torch.set_num_threads(1)


def layer(out=40, size=96, seed=0, dtype=torch.float32):
    """A weight with an outlying column, and inputs whose channels are correlated and of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(600, size, generator=generator) @ mix * torch.exp(torch.randn(size, generator=generator))
    weight = torch.randn(out, size, generator=generator) * 0.05
    weight[:, 3] *= 10
    return weight.to(dtype), LinearStats.of_inputs(x)


def small(**options):
    return create_weight_quantizer("gptvq", **({"num_entries": 16, "tile": 32} | options))


def looked_up(found, tile):
    """The decoded weight in float64, vector by vector."""
    codes, entries = found.codes["codes"].tolist(), found.codebooks["entries"].double()
    rows = [torch.cat([entries[r // tile, 4 * g // tile, code] for g, code in enumerate(row)]) for r, row in enumerate(codes)]
    return torch.stack(rows)


@settings(max_examples=12)
@given(out=st.integers(1, 70), groups=st.integers(1, 20), num_entries=st.sampled_from([2, 16, 200]), seed=st.integers(0, 9))
def test_any_shape(out, groups, num_entries, seed):
    weight, stats = layer(out, 4 * groups, seed)
    quantizer = small(num_entries=num_entries, seed=seed)
    found = quantizer.quantize(weight, stats)
    rows, columns = -(-out // 32), -(-4 * groups // 32)
    assert found.codebooks["entries"].shape == (rows, columns, num_entries, 4)
    decoded = quantizer.dequantize(found)
    assert torch.equal(decoded.double(), looked_up(found, 32))
    assert list(found.losses) == sorted(found.losses, reverse=True)
    assert found.losses[-1] == pytest.approx(weighted_error(weight, decoded, stats.hessian), rel=1e-6)
    indices = quantizer.entry_indices(found)
    assert indices.shape == (rows * columns, 32 * 8)
    # The same numbers, tile by tile.
    for number, positions in enumerate(indices):
        down, right = divmod(number, columns)
        own = found.codes["codes"][32 * down : 32 * down + 32, 8 * right : 8 * right + 8].flatten().long()
        assert torch.equal(positions[: len(own)], own)
        assert (positions[len(own) :] == -1).all()
        unread = torch.ones(num_entries, dtype=torch.bool)
        unread[own] = False
        if num_entries > len(own):
            assert not found.codebooks["entries"][down, right, len(own) :][unread[len(own) :]].any()
    again = reorder_by_frequency(quantizer, found)
    assert torch.equal(quantizer.dequantize(again), decoded)


def test_the_bytes_decode_and_are_counted_by_hand():
    weight, stats = layer(300, 264, dtype=torch.float16)
    quantizer = create_weight_quantizer("gptvq", refine=0)
    assert str(quantizer.spec) == "VQ<4,256,1>"
    assert (quantizer.spec.scope, quantizer.spec.switch_axes) == ("tile 256x256", "MN")
    assert (quantizer.code_bits, quantizer.stored_entries) == (2, 256)
    found = quantizer.quantize(weight, stats)
    assert found.codebooks["entries"].dtype == torch.float16
    tensors = load(save(found.codes | found.codebooks))
    again = QuantizedWeight("gptvq", {"codes": tensors["codes"]}, {"entries": tensors["entries"]}, {}, (300, 264), torch.float16)
    decoded = quantizer.dequantize(again)
    assert decoded.dtype == torch.float16
    assert torch.equal(decoded, looked_up(found, 256).half())
    weights = 300 * 264
    # Tiles of 256 x 256, 256 x 8, 44 x 256 and 44 x 8.
    books = 4 * 256 * 4 * 16 / weights
    assert found.bits() == pytest.approx({"codes": 2, "codebooks": books, "scales": 0, "total": 2 + books})


@pytest.mark.parametrize("tile", [8, 24])
def test_feedback_is_that_of_a_twin_without_blocks(tile):
    """The twin removes the quantized columns from the inverse Hessian one group at a time, in float64, without Cholesky factors.

    The error goes to all columns on the right at once; k-means and the choice of entries are the quantizer's own.
    """
    weight, stats = layer(20, 48)
    quantizer = small(tile=tile, refine=0)
    found = quantizer.quantize(weight, stats)
    inverse = torch.linalg.inv(damped(stats.hessian, 0.01))
    left = weight.double()
    decoded = quantizer.dequantize(found).double()
    for begin in range(0, 48, 4):
        own, later = slice(begin, begin + 4), slice(begin + 4, None)
        metric = torch.linalg.inv(inverse[own, own])
        error = left[:, own] - decoded[:, own]
        for row in range(20):
            apart = left[row, own] - found.codebooks["entries"][row // tile, begin // tile].double()
            costs = (apart @ metric * apart).sum(1)
            chosen = costs[int(found.codes["codes"][row, begin // 4])]
            assert float(chosen) <= float(costs.min()) * 1.001 + 1e-9, "not the nearest entry"
        left[:, later] -= error @ metric @ inverse[own, later]
        inverse = inverse - inverse[:, own] @ metric @ inverse[own]


def test_what_helps():
    weight, stats = layer(64, 128)
    errors = {}
    for feedback in (True, False):
        found = small(tile=64, feedback=feedback, refine=40).quantize(weight, stats)
        errors[feedback] = found.losses
        assert found.losses[1] < found.losses[0], "the last fit lowers the error"
    assert errors[True][0] < 0.8 * errors[False][0]
    assert errors[True][1] < errors[False][1]


def test_the_last_fit_reaches_the_least_squares():
    """All entries at once from dense normal equations in float64, against the loss of the fitted ones."""
    weight, stats = layer(24, 16)
    quantizer = small(num_entries=4, tile=16, refine=400)
    found = quantizer.quantize(weight, stats)
    root = torch.linalg.cholesky(damped(stats.hessian, 0.01))
    rows, columns = 2, 1
    design = torch.zeros(24, 16, rows * columns * 4 * 4, dtype=torch.float64)
    for row in range(24):
        for group in range(4):
            entry = row // 16 * 4 + int(found.codes["codes"][row, group])
            for place in range(4):
                design[row, 4 * group + place, 4 * entry + place] = 1
    outputs = torch.einsum("rce,cd->rde", design, root).reshape(24 * 16, -1)
    wanted = (weight.double() @ root).flatten()
    best = wanted - outputs @ torch.linalg.lstsq(outputs, wanted, driver="gelsd").solution
    lost = (quantizer.dequantize(found).double() - weight.double()) @ root
    assert float(lost.square().sum()) == pytest.approx(float(best.square().sum()), rel=2e-3)


def test_fewer_vectors_than_entries():
    weight, stats = layer(3, 16)
    quantizer = create_weight_quantizer("gptvq")
    found = quantizer.quantize(weight, stats)
    assert found.codebooks["entries"].shape == (1, 1, 256, 4)
    assert int(found.codebooks["entries"].abs().sum(-1).count_nonzero()) <= 12
    assert weighted_error(weight, quantizer.dequantize(found), stats.hessian) < 1e-5
    assert found.bits()["codebooks"] == 256 * 4 * 16 / 48


def test_weights_beyond_float16_and_inputs_that_never_fire():
    weight, stats = layer(8, 16)
    quantizer = small()
    decoded = quantizer.dequantize(quantizer.quantize(weight * 1e7, stats))
    assert float(decoded.abs().max()) <= 65504
    hessian, mean = stats.hessian.clone(), stats.mean_abs.clone()
    hessian[:5], hessian[:, :5], mean[:5] = 0, 0, 0
    decoded = quantizer.dequantize(quantizer.quantize(weight, LinearStats(hessian, mean, 600)))
    assert torch.isfinite(decoded).all()
    decoded = quantizer.dequantize(quantizer.quantize(weight, LinearStats(torch.zeros(16, 16), torch.zeros(16), 1)))
    assert float((decoded - weight).abs().mean()) < float(weight.abs().mean())


def test_refused():
    for options, match in (
        ({"num_entries": 257}, "num_entries = 257 is not a whole number from 2 to 256"),
        ({"num_entries": 1}, "num_entries = 1"),
        ({"tile": 30}, "tile = 30 is no multiple of the vector size 4"),
        ({"refine": -1}, "refine = -1"),
        ({"seed": True}, "seed = True"),
        ({"feedback": 1}, "feedback = 1 is neither"),
        ({"damping": 0.0}, r"damping = 0.0 is outside \(0, 1\]"),
    ):
        with pytest.raises(ParameterError, match=match):
            create_weight_quantizer("gptvq", **options)
    weight, stats = layer(8, 18)
    with pytest.raises(UnsupportedError, match="in_features = 18 is no multiple of the vector size 4"):
        small().quantize(weight, stats)
    weight, stats = layer(8, 16)
    found = small().quantize(weight, stats)
    with pytest.raises(ParameterError, match=r"an order \[1, 16\] is not \[1, 16\] with a permutation in each row"):
        small().relabel(found, torch.zeros(1, 16, dtype=torch.int64))
    weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="weight: 1 of 128"):
        small().quantize(weight, stats)


def test_the_seed_decides_the_start(monkeypatch):
    weight, stats = layer(32, 64)
    seen = []
    learn = kmeans.learn

    def watched(*args, seed, **options):
        seen.append(seed)
        return learn(*args, seed=seed, **options)

    monkeypatch.setattr(kmeans, "learn", watched)
    first = small(seed=5).quantize(weight, stats)
    assert seen == [5, 6], "a start of its own for each column tile"
    assert torch.equal(small(seed=5).quantize(weight, stats).codes["codes"], first.codes["codes"])
    assert not torch.equal(small(seed=6).quantize(weight, stats).codes["codes"], first.codes["codes"])


def round_to_nearest(weight, num_bits, group=64):
    """Asymmetric grids over groups of 64 columns, with unrounded scales and minima."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    step = (high - low) / (2**num_bits - 1)
    return (((grouped - low) / step).round() * step + low).flatten(1)


def test_a_real_layer_loses_less_than_round_to_nearest_with_a_bit_more(real_layer):
    weight, stats = real_layer
    quantizer = create_weight_quantizer("gptvq")
    found = quantizer.quantize(weight, stats)
    own = weighted_error(weight, quantizer.dequantize(found), stats.hessian)
    plain = {bits: weighted_error(weight, round_to_nearest(weight, bits), stats.hessian) for bits in (2, 3)}
    assert own < plain[2] / 8
    assert own < plain[3]
    assert found.losses[1] < found.losses[0]
    # 64 rows of 3 tiles: the codebooks of so small a piece cost more than its codes.
    assert found.bits()["codes"] == 2


@pytest.fixture(scope="module")
def real_layer():
    """96 rows of the key projection of SmolLM2's first layer, and what 600 tokens of prose are like there."""
    from wqlab.hf.linears import collect_stats, decoder_linears
    from wqlab.models import load as load_model
    from wqlab.models.prose import prose

    loaded = load_model("smollm2")
    decoder = loaded.model.model
    decoder.layers = decoder.layers[:1]
    stats = collect_stats(decoder, [{"input_ids": prose(loaded.tokenizer, 600)[0]}])
    name, linear = next((n, m) for n, m in decoder_linears(decoder).items() if n.endswith("k_proj"))
    return linear.weight.detach()[:96].float(), stats[name]
