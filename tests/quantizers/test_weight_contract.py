"""What holds for every registered weight quantizer; a new one is tested by being registered."""

import pytest
import torch

from wqlab import registry
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache
from wqlab.quantizers import artefact
from wqlab.quantizers.weights import (
    LinearStats,
    QuantizedWeight,
    WeightQuantizer,
    count_entries,
    create_weight_quantizer,
    reorder_by_frequency,
    weighted_error,
)

METHODS = [m for m in registry.names("method") if registry.lookup("method", m).target == "weight"]
#: Small enough for seconds on one core, with an edge in both directions for tiles and groups.
SHAPE = (96, 160)


@pytest.fixture(scope="module")
def layer():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(SHAPE[1], SHAPE[1], generator=generator) / SHAPE[1] ** 0.5
    x = torch.randn(1500, SHAPE[1], generator=generator) @ (mixed + torch.eye(SHAPE[1]))
    weight = torch.randn(SHAPE, generator=generator) * 0.02
    weight[:, 7] *= 20  # a column that stands out
    return weight, LinearStats.of_inputs(x)


@pytest.fixture(scope="module", params=METHODS)
def encoded(request, layer):
    quantizer = create_weight_quantizer(request.param)
    return quantizer, quantizer.quantize(*layer)


def test_the_registry_has_all_of_them():
    assert {"rtn_weight", "awq", "quip", "aqlm", "gptvq"} <= set(METHODS)


def test_what_is_stored_decodes(encoded, layer, tmp_path):
    quantizer, found = encoded
    weight, stats = layer
    assert isinstance(quantizer, WeightQuantizer)
    assert quantizer.name == found.method
    decoded = quantizer.dequantize(found)
    assert decoded.shape == weight.shape
    assert decoded.dtype == weight.dtype
    assert 0 < weighted_error(weight, decoded, stats.hessian) < 0.3
    tensors = {f"{part}.{name}": t for part in ("codes", "codebooks", "scales") for name, t in getattr(found, part).items()}
    artefact.write(tmp_path / "w.safetensors", tensors, {"format": "test"})
    read, _ = artefact.read(tmp_path / "w.safetensors", "test")
    parts = [{n.split(".", 1)[1]: t for n, t in read.items() if n.startswith(part)} for part in ("codes.", "codebooks.", "scales.")]
    again = QuantizedWeight(found.method, *parts, found.shape, found.dtype, found.meta)
    assert torch.equal(quantizer.dequantize(again), decoded)


def test_bits_are_those_of_the_tensors(encoded):
    quantizer, found = encoded
    bits, weights = found.bits(), SHAPE[0] * SHAPE[1]
    for part in ("codes", "codebooks", "scales"):
        held = sum(t.numel() * t.element_size() for t in getattr(found, part).values())
        assert bits[part] == pytest.approx(8 * held / weights)
    assert bits["total"] == pytest.approx(bits["codes"] + bits["codebooks"] + bits["scales"])
    assert quantizer.code_bits <= bits["codes"] < quantizer.code_bits * 1.05 + 0.05, "no more than the last byte is padding"


def test_the_same_seed_gives_the_same_weight(encoded, layer):
    quantizer, found = encoded
    again = quantizer.quantize(*layer)
    assert torch.equal(quantizer.dequantize(again), quantizer.dequantize(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_taken(encoded, layer, dtype):
    quantizer, _ = encoded
    weight, stats = layer
    decoded = quantizer.dequantize(quantizer.quantize(weight[:32].to(dtype), stats))
    assert decoded.dtype == dtype
    assert bool(torch.isfinite(decoded).all())


def test_entries_are_counted_and_only_renamed(encoded):
    quantizer, found = encoded
    indices = quantizer.entry_indices(found)
    if not quantizer.stored_entries:
        assert indices is None
        with pytest.raises(UnsupportedError, match="no codebook whose entries"):
            reorder_by_frequency(quantizer, found)
        return
    assert int(indices.max()) < quantizer.stored_entries
    again = reorder_by_frequency(quantizer, found)
    assert torch.equal(quantizer.dequantize(again), quantizer.dequantize(found))
    assert again.bits() == found.bits()
    counts = count_entries(quantizer.entry_indices(again), quantizer.stored_entries)
    assert (counts.diff(dim=1) <= 0).all()
    before = count_entries(indices, quantizer.stored_entries)
    assert torch.equal(counts.sort(1).values, before.sort(1).values)


def test_a_weight_of_zeros_and_inputs_that_never_fire(encoded, layer):
    quantizer, _ = encoded
    weight, stats = layer
    assert not quantizer.dequantize(quantizer.quantize(torch.zeros(32, SHAPE[1]), stats)).any()
    silent = stats.hessian.clone()
    silent[:8] = 0
    silent[:, :8] = 0
    mean = stats.mean_abs.clone()
    mean[:8] = 0
    decoded = quantizer.dequantize(quantizer.quantize(weight[:32], LinearStats(silent, mean, stats.tokens)))
    assert bool(torch.isfinite(decoded).all())


def test_bad_input_is_named(encoded, layer):
    quantizer, _ = encoded
    weight, stats = layer
    with pytest.raises(UnsupportedError, match="is not \\[out_features, in_features\\]"):
        quantizer.quantize(weight[None], stats)
    with pytest.raises(UnsupportedError, match=r"dtype torch.float64 is not one of"):
        quantizer.quantize(weight.double(), stats)
    with pytest.raises(ParameterError, match="statistics of 160 inputs do not belong to a layer of 80"):
        quantizer.quantize(weight[:, :80], stats)
    with pytest.raises(NonFiniteError, match="weight: 1 of"):
        quantizer.quantize(weight.index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(torch.nan)), stats)
    with pytest.raises(ParameterError, match=f"method '{quantizer.name}' quantizes weights, not a KV cache"):
        QuantizedKVCache(quantizer.name)
