"""The cache inside transformers: generation, boundaries, bytes, beams, errors. Tiny random weights."""

import inspect

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab.errors import NonFiniteError, ParameterError, UnknownNameError, UnsupportedError
from wqlab.evals.memory import held_bytes
from wqlab.hf import QuantizedKVCache, cache_argument

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
#: C5: prompts around one window.
PREFILLS = (0, 5, 31, 32, 33)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(3, 300, (1, 70), generator=torch.Generator().manual_seed(1))


def kv(seq, batch=1, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, seq, dim, generator=generator), torch.randn(batch, 2, seq, dim, generator=generator)


def decoded(cache, layer=0):
    segments = cache.layers[layer].segments
    return segments.key.dequantize(), segments.value.dequantize()


def test_the_full_policy_is_the_model_itself(model, prompt):
    cache = QuantizedKVCache(policy="full")
    ours = model.generate(prompt, **GREEDY, max_new_tokens=20, **cache_argument(model, cache))
    assert torch.equal(ours, model.generate(prompt, **GREEDY, max_new_tokens=20))
    assert cache.get_seq_length() == 89  # the last token is never fed
    assert cache.report()["bits_per_element"] == 32


@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_generation_on_a_quantized_cache(model, prompt, num_bits):
    settings = {"num_bits": num_bits, "sink_windows": 1}
    runs = []
    for _ in range(2):
        cache = QuantizedKVCache(**settings)
        runs.append(model.generate(prompt, **GREEDY, max_new_tokens=40, **cache_argument(model, cache)))
    assert torch.equal(*runs), "a second cache from the same settings behaves differently"
    assert runs[0].shape == (1, 110)
    report = cache.report()
    assert report["tokens"] == 109
    assert report["tokens_per_width"] == {num_bits: 4 * 64, 32: 4 * 45}  # 2 layers x K and V
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes()) == (0, 0)
    again = model.generate(prompt, **GREEDY, max_new_tokens=40, **cache_argument(model, cache))
    assert torch.equal(again, runs[0]), "a cache behaves differently after reset"


def test_the_next_pass_reads_the_quantized_cache(model, prompt):
    """The same second chunk scores differently behind INT2 than behind FP16, and equals plain attention on the decoded cache."""
    with torch.no_grad():
        cache = QuantizedKVCache(num_bits=2)
        model(prompt[:, :64], use_cache=True, **cache_argument(model, cache))
        twin = QuantizedKVCache(policy="full")
        for layer in range(2):
            twin.update(*decoded(cache, layer), layer)
        seen = model(prompt[:, 64:], use_cache=True, **cache_argument(model, cache)).logits
        same = model(prompt[:, 64:], use_cache=True, **cache_argument(model, twin)).logits
        full = model(prompt).logits[:, 64:]
    torch.testing.assert_close(seen, same, atol=1e-6, rtol=0)
    assert float((seen - full).abs().max()) > 1e-4


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize(("residual", "sinks", "granularity"), [(0, 0, "window_channel"), (7, 1, "window")])
def test_boundaries_and_two_hundred_steps(prefill, num_bits, residual, sinks, granularity):
    options = {"residual_length": residual, "sink_windows": sinks, "granularity": granularity}
    cache = QuantizedKVCache(num_bits=num_bits, storage_dtype=torch.float16, **options)
    keys, vals = kv(prefill + 200, dim=18)
    for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, prefill + 200))]:
        k, v = cache.update(keys[:, :, start:stop], vals[:, :, start:stop], 0)
        assert k.shape == v.shape == (1, 2, stop, 18)
        assert torch.equal(k[:, :, start:], keys[:, :, start:stop]), "a token does not see itself in full precision"
        assert cache.get_seq_length() == stop
        assert cache.layers[0].segments.key.tail.shape[2] <= 31 + residual
    head = 32 * sinks
    held = decoded(cache)[0]
    error = (held - keys).abs()
    assert bool((error[:, :, head:-38].amax((1, 3)) > 0.4 / 2**num_bits / 4).all()), "a token behind the tail is not quantized"
    assert torch.equal(held[:, :, :head], keys[:, :, :head].half()), "a sink window is not in full precision"
    assert cache.nbytes() == cache.report()["bytes_held"] == held_bytes(cache)


@pytest.mark.parametrize("dim", [96, 80, 33])
def test_odd_head_sizes(dim):
    cache = QuantizedKVCache(num_bits=4)
    x = torch.rand(1, 2, 64, dim, generator=torch.Generator().manual_seed(0)).half() + 2
    cache.update(x, x, 0)
    assert float((decoded(cache)[0] - x).abs().max()) <= 1 / 15 / 2 + 2**-9
    k, v = cache.update(x[:, :, :1], x[:, :, :1], 0)
    query = torch.randn(1, 2, 1, dim).half()
    expected = torch.nn.functional.scaled_dot_product_attention(query, decoded(cache)[0], decoded(cache)[1])
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(query, k, v), expected)


def test_rows_and_crops_equal_the_decoded_twin():
    cache = QuantizedKVCache(num_bits=4, sink_windows=1)
    cache.update(*kv(200, batch=3), 0)
    cache.update(*kv(200, batch=3, seed=1), 1)
    twins = [list(decoded(cache, layer)) for layer in range(2)]

    def both(ours, theirs):
        ours()
        for layer in range(2):
            twins[layer] = [theirs(t) for t in twins[layer]]
            assert all(torch.equal(a, b) for a, b in zip(decoded(cache, layer), twins[layer], strict=True))
            assert cache.get_seq_length(layer) == twins[layer][0].shape[2]
        assert cache.nbytes() == held_bytes(cache)

    rows = torch.tensor([2, 0, 0])
    both(lambda: cache.reorder_cache(rows), lambda t: t.index_select(0, rows))
    both(lambda: cache.crop(-70), lambda t: t[:, :, :130])
    both(lambda: cache.batch_repeat_interleave(2), lambda t: t.repeat_interleave(2, 0))
    both(lambda: cache.batch_select_indices(torch.tensor([5, 1])), lambda t: t[[5, 1]])
    both(lambda: cache.crop(100), lambda t: t[:, :, :100])  # the meaning of a positive number before transformers 5.24
    both(lambda: cache.crop(0), lambda t: t)


def test_beam_search_runs_and_full_precision_beams_are_the_models(model, prompt):
    beams = {"num_beams": 3, "max_new_tokens": 12, **GREEDY}
    ours = model.generate(prompt, **beams, **cache_argument(model, QuantizedKVCache(policy="full")))
    assert torch.equal(ours, model.generate(prompt, **beams))
    assert model.generate(prompt, **beams, **cache_argument(model, QuantizedKVCache(num_bits=2))).shape == (1, 82)


@pytest.mark.parametrize("which", [0, 1])
def test_nan_names_layer_and_tensor_and_changes_nothing(which):
    cache = QuantizedKVCache()
    for layer in range(3):
        cache.update(*kv(40), layer)
    bad = kv(4)
    bad[which][0, 1, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=rf"layer 2: {('key', 'value')[which]}: 1 of 128 elements .*bfloat16"):
        cache.update(*bad, 2)
    assert cache.get_seq_length(2) == 40
    with pytest.raises(UnsupportedError, match=r"layer 1: key .*\[2, 2, 16\]"):
        cache.update(*kv(1, batch=2), 1)


def test_settings_are_refused_at_construction():
    for settings, error in (
        ({"num_bits": 5}, ParameterError),
        ({"method": "rtm"}, UnknownNameError),
        ({"policy": "none"}, UnknownNameError),
        ({"residual": 3}, ParameterError),
        ({"storage_dtype": torch.int8}, ParameterError),
        ({"window_size": 2.5}, ParameterError),
    ):
        with pytest.raises(error):
            QuantizedKVCache(**settings)


def test_describe_is_one_line(model):
    cache = QuantizedKVCache(num_bits=2, storage_dtype=torch.float16)
    assert "0 tokens (none): 0 bytes" in cache.describe()
    cache.update(*kv(128), 0)
    assert cache.describe() == "128 tokens (100% at 2 bits): 3,072 bytes, 3.00 bits/element, 5.33x smaller than FP16"


def test_argument_name_follows_the_model(model):
    assert list(cache_argument(model, 1)) == [
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ]

    class Old:
        def forward(self, input_ids, past_key_values=None): ...

    assert cache_argument(Old(), 1) == {"past_key_values": 1}
