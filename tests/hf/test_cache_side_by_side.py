import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab.errors import UnsupportedError
from wqlab.hf import QuantizedKVCache, SideBySideCache, cache_argument

SETTINGS = ({"policy": "full"}, {"num_bits": 4}, {"num_bits": 2, "granularity": "window", "residual_length": 3})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    return LlamaForCausalLM(config).eval()


def test_each_row_is_what_its_cache_alone_makes_of_it(model):
    ids = torch.randint(3, 100, (1, 70), generator=torch.Generator().manual_seed(0))
    together = SideBySideCache([QuantizedKVCache(**s) for s in SETTINGS])
    with torch.no_grad():
        for start in (0, 40, 69):
            stop = {0: 40, 40: 69, 69: 70}[start]
            rows = model(ids[:, start:stop].expand(3, -1), use_cache=True, **cache_argument(model, together)).logits
        assert together.get_seq_length() == 70
        for row, settings, cache in zip(rows, SETTINGS, together.caches, strict=True):
            alone = QuantizedKVCache(**settings)
            for start, stop in ((0, 40), (40, 69), (69, 70)):
                logits = model(ids[:, start:stop], use_cache=True, **cache_argument(model, alone)).logits
            torch.testing.assert_close(row, logits[0], atol=1e-5, rtol=1e-4)
            assert cache.report() == alone.report()
    together.crop(-10)
    assert {cache.get_seq_length() for cache in together.caches} == {60}
    together.reset()
    assert together.get_seq_length() == 0


def test_generate_runs_and_rows_stay_where_they_are(model):
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(1)).expand(3, -1)
    cache = SideBySideCache([QuantizedKVCache(**s) for s in SETTINGS])
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6}
    tokens = model.generate(ids, **greedy, **cache_argument(model, cache))
    assert torch.equal(tokens[:1], model.generate(ids[:1], **greedy))
    with pytest.raises(UnsupportedError, match="3 caches side by side need a batch of as many rows, got 1"):
        model(ids[:1], use_cache=True, **cache_argument(model, cache))
    for operation in (cache.reorder_cache, cache.batch_select_indices):
        with pytest.raises(UnsupportedError, match="no beams"):
            operation(torch.tensor([0, 0, 0]))
