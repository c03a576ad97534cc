"""What attention reads, seen and changed from outside."""

import pytest
import torch

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf.intercept import intercept_attention


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(1))


def as_it_is(layer, query, key, value, mask):
    return key, value, mask


@torch.inference_mode()
def test_what_is_seen_is_what_the_cache_gets_and_nothing_changes(tiny_llama, ids):
    seen = {}

    def look(layer, query, key, value, mask):
        seen[layer] = query, key, value
        return key, value, mask

    plain = tiny_llama(ids, use_cache=True)
    with intercept_attention(tiny_llama, look):
        out = tiny_llama(ids, use_cache=False)
    torch.testing.assert_close(out.logits, plain.logits)
    assert sorted(seen) == list(range(tiny_llama.config.num_hidden_layers))
    cache = getattr(plain, "past_key_values", None) or plain.cache
    for layer, (query, key, value) in seen.items():
        assert query.shape[1] == tiny_llama.config.num_attention_heads
        torch.testing.assert_close(key, cache.layers[layer].keys)
        torch.testing.assert_close(value, cache.layers[layer].values)


@torch.inference_mode()
def test_keys_in_another_order_change_nothing_when_the_mask_goes_along_and_much_when_it_stays(tiny_llama, ids):
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(2))
    places = torch.arange(ids.shape[1])

    def along(layer, query, key, value, mask):
        return key[:, :, order], value[:, :, order], (order[None] <= places[:, None])[None, None]

    def left(layer, query, key, value, mask):
        return key[:, :, order], value[:, :, order], (places[None] <= places[:, None])[None, None]

    plain = tiny_llama(ids).logits
    found = []
    for change in (along, left):
        with intercept_attention(tiny_llama, change):
            found.append((tiny_llama(ids).logits - plain).norm() / plain.norm())
    assert found[0] < 1e-5
    assert found[1] > 1e-3


@torch.inference_mode()
def test_the_models_own_attention_comes_back(tiny_llama, ids):
    before = tiny_llama.config._attn_implementation
    with pytest.raises(RuntimeError, match="on purpose"), intercept_attention(tiny_llama, as_it_is):
        raise RuntimeError("on purpose")
    assert tiny_llama.config._attn_implementation == before
    with intercept_attention(tiny_llama, as_it_is):
        tiny_llama(ids)
    assert tiny_llama.config._attn_implementation == before


@torch.inference_mode()
def test_blocks_are_not_nested(tiny_llama, ids):
    with intercept_attention(tiny_llama, as_it_is):
        with pytest.raises(ParameterError, match="leave that block first"), intercept_attention(tiny_llama, as_it_is):
            pass
        tiny_llama(ids)


def test_a_model_that_does_not_ask_is_an_error(tiny_llama):
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM does not call"), intercept_attention(tiny_llama, as_it_is):
        pass
