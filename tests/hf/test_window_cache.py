"""WindowQuant in real generation, on a tiny random pocket VLM: shapes and paths, never results."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.evals.memory import held_bytes
from wqlab.hf.cache import cache_argument
from wqlab.hf.window_cache import NONE, WindowQuantCache, window_positions, windowquant
from wqlab.models import smollm2
from wqlab.models.pocket import PocketVLMConfig, PocketVLMForConditionalGeneration, PocketVLMProcessor, prompt
from wqlab.types import WindowPlan


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    return PocketVLMForConditionalGeneration(PocketVLMConfig(text_config=text, projector_hidden_size=8)).eval()


@pytest.fixture(scope="module")
def processor():
    return PocketVLMProcessor(AutoTokenizer.from_pretrained(smollm2.build()))


def ask(processor, *questions, frames=2):
    rng = np.random.default_rng(0)
    videos = [rng.integers(0, 255, (frames, 16, 16, 3), dtype=np.uint8) for _ in questions]
    return processor(text=[prompt.PREFIX + prompt.VIDEO + prompt.question(q) for q in questions], videos=videos)


def plan_of(widths, size=32, rows=1):
    widths = np.array(widths)
    return WindowPlan(widths, size, (widths.shape[1],) * rows, (0,) * rows, 2.0, "none", "given")


def run(model, inputs, cache=None, **options):
    given = cache_argument(model, cache) if cache is not None else {}
    return model.generate(**inputs, **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)


def test_without_a_plan_and_at_16_bits_it_is_the_plain_cache(model, processor):
    inputs = ask(processor, "What is it?")
    want = run(model, inputs, DynamicCache())
    assert torch.equal(run(model, inputs, WindowQuantCache()), want)
    cache = WindowQuantCache()
    cache.follow(plan_of([[16] * 4] * 3), inputs["input_ids"] == model.config.video_token_id)
    assert torch.equal(run(model, inputs, cache), want)
    # Positions are all that is held beside the tokens.
    assert cache.report()["tokens_per_width"].keys() == {32}


def test_each_layer_holds_its_plan_and_the_bytes_it_reports(model, processor):
    inputs = ask(processor, "What is it?")
    widths = [[16, 4, 2, 2], [16, 2, 2, 2], [16, 4, 4, 16]]
    cache = WindowQuantCache()
    cache.follow(plan_of(widths), inputs["input_ids"] == model.config.video_token_id)
    run(model, inputs, cache)
    for layer, wanted in zip(cache.layers, widths, strict=True):
        found = layer.segments.tokens_per_width()
        assert found.get(4, 0) == 2 * 32 * wanted.count(4)
        assert found.get(2, 0) == 2 * 32 * wanted.count(2)
    assert cache.report()["bytes_held"] == cache.nbytes() == held_bytes([layer.segments for layer in cache.layers])
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 5
    assert "bits/element" in cache.describe()


def test_a_float32_model_may_hold_what_a_gpu_would(model, processor):
    inputs = ask(processor, "What is it?")
    with windowquant(model, normalize="rank", storage_dtype=torch.float16) as caches:
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    report = caches[0].report()
    assert 16 in report["tokens_per_width"]
    assert 32 not in report["tokens_per_width"]
    assert all(t.dtype != torch.float32 for layer in caches[0].layers for t in layer.segments.tensors())
    with pytest.raises(ParameterError, match="storage_dtype"):
        WindowQuantCache(storage_dtype=torch.float64)


def test_the_block_searches_plans_and_leaves_the_model_as_it_was(model, processor):
    inputs = ask(processor, "Which object is red?")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with windowquant(model, window_size=32, normalize="rank") as caches:
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert len(caches) == 2
    assert tokens.shape[0] == 1
    plan = caches[0].plan
    assert plan.num_layers == 3
    assert plan.num_windows == 4
    assert (plan.bit_widths[:, 0] == 16).all()
    assert "generate" not in vars(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    np.testing.assert_array_equal(caches[0].plan.bit_widths, caches[1].plan.bit_widths)


def test_left_padding_changes_no_row(model, processor):
    texts = ["Is it red?", "Which of these objects can be seen in the second half of the video?"]
    both = ask(processor, *texts)
    visual = both["input_ids"] == model.config.video_token_id
    cache = WindowQuantCache()
    cache.follow(plan_of([[16, 4, 2, 2]] * 3, rows=2), visual)
    together = run(model, both, cache)[:, -6:]
    for row in range(2):
        kept = both["attention_mask"][row].bool()
        alone = {
            "input_ids": both["input_ids"][row : row + 1, kept],
            "attention_mask": both["attention_mask"][row : row + 1, kept],
            "pixel_values_videos": both["pixel_values_videos"][row : row + 1],
        }
        single = WindowQuantCache()
        single.follow(plan_of([[16, 4, 2, 2]] * 3), alone["input_ids"] == model.config.video_token_id)
        assert torch.equal(run(model, alone, single)[0, -6:], together[row])


def test_beams_follow_the_packed_rows(model, processor):
    inputs = ask(processor, "What is it?")
    visual = inputs["input_ids"] == model.config.video_token_id

    def beams(widths):
        cache = WindowQuantCache()
        cache.follow(plan_of(widths), visual)
        return run(model, inputs, cache, num_beams=3)

    assert torch.equal(beams([[16] * 4] * 3), run(model, inputs, DynamicCache(), num_beams=3))
    assert beams([[16, 2, 4, 2]] * 3).shape[1] == inputs["input_ids"].shape[1] + 6


def test_a_chunked_prompt_stays_whole_until_its_last_chunk(model, processor):
    inputs = ask(processor, "What is it?")
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    visual = inputs["input_ids"] == model.config.video_token_id
    decoder: LlamaForCausalLM = copy.deepcopy(model.model.language_model)

    def feed(borders):
        cache = WindowQuantCache()
        cache.follow(plan_of([[16, 4, 2, 2]] * 3), visual)
        for start, end in pairwise(borders):
            decoder(inputs_embeds=embeddings[:, start:end], use_cache=True, **cache_argument(decoder, cache))
            packed = [bool(layer.segments.packed) for layer in cache.layers]
            assert packed == [end == borders[-1]] * 3
        return [x for layer in cache.layers for x in layer.segments.dequantize()]

    length = embeddings.shape[1]
    for one, two in zip(feed([0, length]), feed([0, 20, 90, length]), strict=True):
        # A decoded value may be one step off where a rounding border lies between two orders of summation.
        assert ((one - two).abs() > 1e-4).float().mean() < 0.01


def test_positions_of_windows_are_each_rows_own():
    visual = torch.zeros(2, 20, dtype=torch.bool)
    visual[0, 2:14] = True
    visual[1, 9:18] = True
    found = window_positions(visual, 4, 3)
    assert found[0].flatten().tolist() == list(range(2, 14))
    assert found[1, :2].flatten().tolist() == list(range(9, 17))
    assert found[1, 2].tolist() == [NONE] * 4


def test_bad_input_is_refused_by_name(model, processor, tiny_llama):
    inputs = ask(processor, "What is it?")
    with pytest.raises(UnsupportedError, match="llama"), windowquant(tiny_llama):
        pass
    with windowquant(model) as caches:
        with pytest.raises(UnsupportedError, match="no visual tokens"):
            model.generate(input_ids=torch.tensor([[1, 5, 6]]), max_new_tokens=1)
        with pytest.raises(ParameterError, match="leave it out"):
            model.generate(**inputs, past_key_values=DynamicCache(), max_new_tokens=1)
        with pytest.raises(ParameterError, match="already"), windowquant(model):
            pass
    assert caches == []
    cache = WindowQuantCache()
    run(model, inputs, cache)
    with pytest.raises(ParameterError, match="empty cache"):
        cache.follow(plan_of([[16] * 4] * 3), inputs["input_ids"] == model.config.video_token_id)
    with windowquant(model, window_size=512) as caches, pytest.raises(ParameterError, match="window"):
        model.generate(**inputs, max_new_tokens=1)
    assert "generate" not in vars(model)
