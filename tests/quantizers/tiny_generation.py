"""A tiny random model of a real class, generating on a cache: what each method's tests share."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab.evals.memory import held_bytes
from wqlab.hf import QuantizedKVCache, cache_argument

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generate(cache, prompt_tokens, new_tokens=8, counted=True):
    """Run one generation on `cache`; check what must hold for any method, and return the cache.

    `counted`: whether all that the cache refers to is its own; a calibration belongs to the model.
    """
    model = tiny_model()
    prompt = torch.randint(3, 300, (1, prompt_tokens), generator=torch.Generator().manual_seed(1))
    tokens = model.generate(prompt, **GREEDY, max_new_tokens=new_tokens, **cache_argument(model, cache))
    assert tokens.shape == (1, prompt_tokens + new_tokens)
    assert cache.get_seq_length() == prompt_tokens + new_tokens - 1  # the last token is never fed
    if counted:
        assert cache.nbytes() == held_bytes(cache)
    return cache


def generate_around(method, num_bits, **settings):
    """Generate behind prompts shorter than, as long as and longer than a window of 32; return the last cache."""
    for prompt_tokens in (1, 31, 32, 200):
        cache = generate(QuantizedKVCache(method, num_bits, storage_dtype=torch.float16, **settings), prompt_tokens)
    return cache


def rounding(decoded):
    """Return the largest error of rounding to `decoded`'s dtype, per element, in float64."""
    info = torch.finfo(decoded.dtype)
    return torch.clamp(decoded.double().abs() * info.eps, min=info.smallest_normal * info.eps) / 2 * (1 + 2**-12)
