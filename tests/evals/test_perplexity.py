import math

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.evals.memory import held_bytes
from wqlab.evals.perplexity import perplexity
from wqlab.hf import QuantizedKVCache


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # attention that is far from uniform
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 200, (2, 101), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [1, 32, 50, 500])
def test_full_policy_equals_one_forward_pass(model, ids, chunk):
    result = perplexity(model, ids, lambda: QuantizedKVCache(policy="full"), chunk)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(result.nll, expected, atol=2e-5, rtol=1e-5)
    assert result.perplexity == pytest.approx(math.exp(float(expected.mean())), rel=1e-5)
    assert result.report["tokens"] == 101


def test_widths_matter_in_chunks_and_not_in_one_pass(model, ids):
    full = perplexity(model, ids, lambda: QuantizedKVCache(policy="full"))
    errors = {b: (perplexity(model, ids, lambda b=b: QuantizedKVCache(num_bits=b)).nll - full.nll).abs() for b in (2, 4, 8)}
    assert all(float(e[:, :31].max()) < 1e-4 for e in errors.values()), "the first window sees nothing quantized"
    assert errors[2][:, 32:].mean() > errors[4][:, 32:].mean() > errors[8][:, 32:].mean() > 0
    blind = perplexity(model, ids, lambda: QuantizedKVCache(num_bits=2), chunk=101)
    torch.testing.assert_close(blind.nll, full.nll, atol=2e-5, rtol=1e-5)


def test_any_cache_will_do(model, ids):
    result = perplexity(model, ids, DynamicCache)
    assert result.report == {}
    assert result.cache.get_seq_length() == 101


def test_refusals(model, ids):
    for bad in (ids[0], ids[:, :1]):
        with pytest.raises(ParameterError, match="input_ids"):
            perplexity(model, bad, QuantizedKVCache)
    with pytest.raises(ParameterError, match="chunk = 0"):
        perplexity(model, ids, QuantizedKVCache, 0)

    class Broken(torch.nn.Module):
        def forward(self, input_ids, cache=None, use_cache=True):
            return type("O", (), {"logits": torch.full((*input_ids.shape, 200), torch.nan)})

    with pytest.raises(NonFiniteError, match="tokens 0 to 32"):
        perplexity(Broken(), ids, QuantizedKVCache)


def test_held_bytes_counts_storages_once_and_views_in_full():
    base = torch.zeros(1000)
    kept = {"a": [base[:3]], "b": (base, torch.zeros(2))}
    assert held_bytes(kept) == 4008

    class Slots:
        __slots__ = ("x",)

    slots = Slots()
    slots.x = torch.zeros(5, dtype=torch.uint8)
    assert held_bytes([slots, slots, "text", torch.nn.Linear(3, 3), lambda: base]) == 4005
