"""transformers' QuantizedCache behind our report: bytes, what is missing, a generation per backend that is installed."""

import importlib.util

import pytest
import torch
from transformers.cache_utils import QuantizedCache

from wqlab.errors import MissingPartError, ParameterError, UnsupportedError
from wqlab.evals.memory import held_bytes
from wqlab.hf import cache_argument, transformers_cache
from wqlab.hf.transformers_cache import TransformersQuantizedCache

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_quanto = pytest.mark.skipif(not installed("optimum.quanto"), reason="optimum-quanto is not installed")
needs_hqq = pytest.mark.skipif(not installed("hqq"), reason="hqq is not installed")
needs_fp8 = pytest.mark.skipif("fp8" not in str(QuantizedCache.__init__.__code__.co_consts), reason="this transformers has no fp8")


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum-quanto"), ("hqq", "hqq")])
def test_a_missing_backend_is_named_with_the_way_to_get_it(tiny_llama, monkeypatch, backend, package):
    monkeypatch.setattr(transformers_cache, "_found", lambda module: False)
    with pytest.raises(MissingPartError, match=f"pip install {package}"):
        TransformersQuantizedCache(tiny_llama, backend)


def test_unknown_backend_and_options_are_refused(tiny_llama, monkeypatch):
    with pytest.raises(ParameterError, match="'int8' is not one of quanto, hqq, fp8"):
        TransformersQuantizedCache(tiny_llama, "int8")
    with pytest.raises(ParameterError, match="flavour"):
        TransformersQuantizedCache(tiny_llama, "fp8", flavour=1)


@needs_fp8
def test_generation_fp8(tiny_llama):
    with pytest.raises(ParameterError, match="does not support"):
        TransformersQuantizedCache(tiny_llama, "fp8", nbits=4)
    for prompt_tokens in (1, 40):
        cache = TransformersQuantizedCache(tiny_llama, "fp8")
        assert "0 tokens (transformers, fp8): 0 bytes" in cache.describe()
        prompt = torch.randint(3, 128, (2, prompt_tokens), generator=torch.Generator().manual_seed(0))
        tokens = tiny_llama.generate(prompt, **GREEDY, max_new_tokens=8, **cache_argument(tiny_llama, cache))
        assert tokens.shape == (2, prompt_tokens + 8)
        assert cache.nbytes() == held_bytes(cache)
    # 3 layers, K and V, 2 rows, 47 tokens, 2 heads of 16; a float32 scale per tensor.
    assert cache.report()["bytes_held"] == 3 * 2 * (2 * 47 * 32 + 4)
    assert cache.report()["bytes_fp16"] == 3 * 2 * 2 * 47 * 32 * 2


@needs_fp8
def test_error_bound_fp8(tiny_llama):
    """One scale per tensor: half of e4m3's step, which follows the element."""
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    cache = TransformersQuantizedCache(tiny_llama, "fp8")
    cache.update(x, x, 0)
    y = cache.update(x[:, :, :1], x[:, :, :1], 0)[0][:, :, :40]
    scale = x.abs().max() / 448
    assert bool(((x - y).abs() <= torch.maximum(x.abs() / 16, scale / 1024) * (1 + 2**-20) + x.abs() * 2**-23).all())


@needs_quanto
@pytest.mark.parametrize("nbits", [2, 4])
def test_generation_quanto(tiny_llama, nbits):
    cache = TransformersQuantizedCache(tiny_llama, "quanto", nbits=nbits, q_group_size=32, residual_length=16)
    prompt = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens = tiny_llama.generate(prompt, **GREEDY, max_new_tokens=8, **cache_argument(tiny_llama, cache))
    assert tokens.shape == (1, 48)
    # 3 layers, K and V: codes, a float32 scale and shift per group of 32; 7 tokens of 32 elements in float32.
    assert cache.report()["bytes_held"] == 3 * 2 * (40 * 32 * nbits // 8 + 40 * 8 + 7 * 32 * 4)
    assert "47 tokens (transformers, quanto)" in cache.describe()


@needs_quanto
@pytest.mark.parametrize("nbits", [2, 4])
def test_error_bound_quanto(tiny_llama, nbits):
    """Groups of 32 neighbours on an asymmetric grid that holds zero: half a step."""
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    cache = TransformersQuantizedCache(tiny_llama, "quanto", nbits=nbits, q_group_size=32)
    cache.update(x, x, 0)
    y = cache.update(x[:, :, :1], x[:, :, :1], 0)[0][:, :, :40]
    groups, decoded = x.reshape(-1, 32), y.reshape(-1, 32)
    step = (groups.amax(1).clamp_min(0) - groups.amin(1).clamp_max(0)) / (2**nbits - 1)
    assert bool(((groups - decoded).abs() <= step[:, None] / 2 * (1 + 1e-4) + 1e-6).all())


@needs_quanto
def test_a_prompt_shorter_than_a_group(tiny_llama):
    cache = TransformersQuantizedCache(tiny_llama, "quanto")
    with pytest.raises(
        UnsupportedError, match=r"1 tokens of 2 heads x 16 channels are 32 elements, no multiple of q_group_size = 64"
    ):
        tiny_llama.generate(torch.tensor([[5]]), **GREEDY, max_new_tokens=4, **cache_argument(tiny_llama, cache))
    cache = TransformersQuantizedCache(tiny_llama, "quanto", q_group_size=16)
    tiny_llama.generate(torch.tensor([[5]]), **GREEDY, max_new_tokens=4, **cache_argument(tiny_llama, cache))
    assert cache.get_seq_length() == 4


@needs_hqq
def test_generation_hqq(tiny_llama):
    cache = TransformersQuantizedCache(tiny_llama, "hqq", nbits=4, axis_key=1, axis_value=1, q_group_size=32)
    prompt = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    assert tiny_llama.generate(prompt, **GREEDY, max_new_tokens=8, **cache_argument(tiny_llama, cache)).shape == (1, 48)
    assert 0 < cache.nbytes() == held_bytes(cache)
