"""Weight quantizers in a model's linear layers: statistics, files, and the model afterwards."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.hf import collect_stats, quantize_linears
from wqlab.hf.linears import decoder_linears, encode_linears, load_weight, mean_bits
from wqlab.quantizers.weights import LinearStats, create_weight_quantizer, reorder_by_frequency, weighted_error


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def passes():
    ids = torch.randint(3, 300, (4, 20), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids[:2]}, {"input_ids": ids[2:]}]


def test_all_linear_layers_of_the_decoder_and_no_others(model):
    names = list(decoder_linears(model))
    assert len(names) == 2 * 7
    assert names[0] == "model.layers.0.self_attn.q_proj"
    assert "lm_head" not in names
    with pytest.raises(UnsupportedError, match="no decoder layers"):
        decoder_linears(torch.nn.Linear(2, 2))


def test_statistics_are_those_of_the_inputs(model, passes):
    stats = collect_stats(model, passes)
    ids = torch.cat([p["input_ids"] for p in passes])
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).flatten(0, 1)
    found = stats["model.layers.0.self_attn.k_proj"]
    twin = LinearStats.of_inputs(x)
    assert found.tokens == twin.tokens == 80
    torch.testing.assert_close(found.hessian, twin.hessian)
    torch.testing.assert_close(found.mean_abs, twin.mean_abs)
    assert stats["model.layers.1.mlp.down_proj"].hessian.shape == (48, 48)
    assert not any(m._forward_pre_hooks for m in decoder_linears(model).values())


def test_the_model_computes_with_decoded_weights_and_gets_its_own_back(model, passes):
    stats = collect_stats(model, passes)
    before = {name: linear.weight.detach().clone() for name, linear in decoder_linears(model).items()}
    logits = model(**passes[0]).logits
    quantizer = create_weight_quantizer("rtn_weight", num_bits=4)
    with quantize_linears(model, "rtn_weight", stats, num_bits=4) as bits:
        for name, linear in decoder_linears(model).items():
            assert torch.equal(linear.weight, quantizer.dequantize(quantizer.quantize(before[name], stats[name])))
        assert not torch.allclose(model(**passes[0]).logits, logits)
        counted = mean_bits(bits)
    assert counted["codes"] == 4
    assert counted["total"] == pytest.approx(counted["codes"] + counted["scales"])
    assert all(torch.equal(linear.weight, before[name]) for name, linear in decoder_linears(model).items())
    with pytest.raises(ZeroDivisionError), quantize_linears(model, "rtn_weight", stats, num_bits=2):
        _ = 1 / 0
    assert torch.equal(model(**passes[0]).logits, logits)


def test_files_are_read_again_and_damaged_ones_set_aside(model, passes, tmp_path, monkeypatch, caplog):
    stats = collect_stats(model, passes)
    first = dict(encode_linears(model, "rtn_weight", stats, tmp_path))
    assert len(list(tmp_path.iterdir())) == 14
    name = "model.layers.1.mlp.up_proj"
    weight, counts, about = load_weight(tmp_path / f"{name}.safetensors")
    assert (weight.method, weight.shape, counts, about["method"]) == ("rtn_weight", (48, 32), None, "rtn_weight")
    (tmp_path / f"{name}.safetensors").write_bytes(b"damaged")
    quantized = []
    real = type(create_weight_quantizer("rtn_weight")).quantize
    monkeypatch.setattr(type(create_weight_quantizer("rtn_weight")), "quantize", lambda *a: quantized.append(1) or real(*a))
    with caplog.at_level(logging.WARNING):
        again = dict(encode_linears(model, "rtn_weight", stats, tmp_path))
    assert len(quantized) == 1
    assert f"kept as {name}.safetensors.damaged" in caplog.text
    quantizer = create_weight_quantizer("rtn_weight")
    for layer, encoded in first.items():
        assert torch.equal(quantizer.dequantize(encoded), quantizer.dequantize(again[layer]))
        assert encoded.bits() == again[layer].bits()
    list(encode_linears(model, "rtn_weight", stats, tmp_path, num_bits=2))
    assert len(quantized) == 15, "other options are not read from these files"
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    list(encode_linears(model, "rtn_weight", stats, tmp_path, num_bits=2))
    assert len(quantized) == 16, "another weight is not read from its file"


def test_frequencies_are_kept_and_entries_sorted(model, passes, tmp_path):
    stats = collect_stats(model, passes)
    list(encode_linears(model, "gptvq", stats, tmp_path))
    weight, counts, _ = load_weight(tmp_path / "model.layers.0.mlp.up_proj.safetensors")
    assert counts.sum() == 48 * 32 / 4
    assert (counts.diff(dim=1) <= 0).all()
    quantizer = create_weight_quantizer("gptvq")
    again = reorder_by_frequency(quantizer, weight)
    assert torch.equal(quantizer.dequantize(again), quantizer.dequantize(weight))


def test_bad_input_is_named(model, passes):
    stats = collect_stats(model, passes)
    with pytest.raises(ParameterError, match="passes was empty"):
        collect_stats(model, [])
    with pytest.raises(ParameterError, match=r"model.layers.0.self_attn.q_proj has no statistics"):
        list(encode_linears(model, "rtn_weight", {}))
    with pytest.raises(ParameterError, match="method 'kivi' quantizes KV caches, not weights"):
        list(encode_linears(model, "kivi", stats))
    with pytest.raises(ParameterError, match=r"rtn_weight: .*unexpected keyword argument 'nonsense'"):
        list(encode_linears(model, "rtn_weight", stats, nonsense=1))
    with pytest.raises(NonFiniteError, match="calibration: the Hessian"):
        LinearStats(torch.full((2, 2), torch.nan), torch.zeros(2), 1)
    with pytest.raises(ParameterError, match=r"hessian \[2, 3\]"):
        LinearStats(torch.zeros(2, 3), torch.zeros(2), 1)
    model.model.embed_tokens.weight.data[7] = torch.nan
    with pytest.raises(NonFiniteError, match="calibration"):
        collect_stats(model, [{"input_ids": torch.tensor([[5, 7]])}])


def test_the_weighted_error_is_that_of_the_output():
    x, w, d = torch.randn(50, 6), torch.randn(4, 6), torch.randn(4, 6)
    stats = LinearStats.of_inputs(x)
    want = ((x @ (d - w).T).double().square().sum() / (x @ w.T).double().square().sum()).item()
    assert weighted_error(w, d, stats.hessian) == pytest.approx(want, rel=1e-5)
    assert weighted_error(torch.zeros(4, 6), torch.zeros(4, 6), stats.hessian) == 0
    assert weighted_error(torch.zeros(4, 6), d, stats.hessian) == float("inf")
