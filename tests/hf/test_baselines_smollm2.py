"""Every baseline in a generation of the real SmolLM2, as its paper sets it up. What it says is judged elsewhere; here it must run,
hold what it promises, and stay near full precision where the bits allow it.
"""

import pytest
import torch

from wqlab.hf import QuantizedKVCache, cache_argument
from wqlab.hf.calibration import calibrate
from wqlab.models import load
from wqlab.models.prose import prose

#: method, bits, options, calibrated, bits per element of 160 tokens with metadata and full-precision parts, largest KL from FP16.
CASES = [
    ("fp8", 8, {}, False, 8.5, 0.01),
    ("kivi", 4, {"policy": "kivi", "residual_length": 64}, False, (128 * 5 + 32 * 16 + 96 * 5 + 64 * 16) / 320, 0.02),
    ("smoothquant", 8, {}, True, 8 + 32 / 192, 0.01),
    ("qoq", 8, {}, True, 8.5, 0.01),
    ("qoq", 4, {}, True, 4.5, 0.05),
    ("skvq", 4, {"policy": "skvq", "residual_length": 32}, True, (96 * 5 + 64 * 16) / 160, 0.05),
]


@pytest.fixture(scope="module")
def real():
    """The model, 160 tokens of prose, ranges over 300 others, and what full precision says at the last eight."""
    torch.set_num_threads(1)
    loaded = load("smollm2")
    tokens = prose(loaded.tokenizer, 160)[0]
    calibration = calibrate(loaded.model, input_ids=prose(loaded.tokenizer, 300, skip=160)[0])
    return loaded.model, tokens, calibration, last_step(loaded.model, tokens, QuantizedKVCache(policy="full"))


def last_step(model, tokens, cache):
    """Read all tokens but the last eight, then those eight from the cache; return their log-probabilities."""
    with torch.no_grad():
        model(tokens[:, :-8], use_cache=True, **cache_argument(model, cache))
        return model(tokens[:, -8:], use_cache=True, **cache_argument(model, cache)).logits[0].log_softmax(-1)


@pytest.mark.parametrize(("method", "bits", "options", "calibrated", "cost", "near"), CASES)
def test_generation_on_the_real_model(real, method, bits, options, calibrated, cost, near):
    model, tokens, calibration, full = real
    method_options = {"calibration": calibration} if calibrated else {}

    def new():
        return QuantizedKVCache(method, bits, storage_dtype=torch.float16, method_options=method_options, **options)

    cache = new()
    log_probabilities = last_step(model, tokens, cache)
    divergence = float((full.exp() * (full - log_probabilities)).sum(-1).mean())
    assert 0 < divergence < near
    assert cache.report()["bits_per_element"] == pytest.approx(cost)
    cache = new()
    out = model.generate(tokens, do_sample=False, max_new_tokens=4, eos_token_id=None, **cache_argument(model, cache))
    assert out.shape == (1, 164)
    assert cache.get_seq_length() == 163
