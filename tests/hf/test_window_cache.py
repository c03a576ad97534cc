"""WindowQuant in real generation, on a tiny random pocket VLM: shapes and paths, never results."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.evals.memory import held_bytes
from wqlab.hf.cache import cache_argument
from wqlab.hf.window_cache import NONE, WindowQuantCache, window_positions, windowquant
from wqlab.models.pocket import prompt
from wqlab.types import WindowPlan


def ask(pocket_processor, *questions, frames=2):
    rng = np.random.default_rng(0)
    videos = [rng.integers(0, 255, (frames, 16, 16, 3), dtype=np.uint8) for _ in questions]
    return pocket_processor(text=[prompt.PREFIX + prompt.VIDEO + prompt.question(q) for q in questions], videos=videos)


def plan_of(widths, size=32, rows=1):
    widths = np.array(widths)
    return WindowPlan(widths, size, (widths.shape[1],) * rows, (0,) * rows, 2.0, "none", "given")


def run(pocket_model, inputs, cache=None, **options):
    given = cache_argument(pocket_model, cache) if cache is not None else {}
    return pocket_model.generate(**inputs, **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)


def test_without_a_plan_and_at_16_bits_it_is_the_plain_cache(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "What is it?")
    want = run(pocket_model, inputs, DynamicCache())
    assert torch.equal(run(pocket_model, inputs, WindowQuantCache()), want)
    cache = WindowQuantCache()
    cache.follow(plan_of([[16] * 4] * 3), inputs["input_ids"] == pocket_model.config.video_token_id)
    assert torch.equal(run(pocket_model, inputs, cache), want)
    # Positions are all that is held beside the tokens.
    assert cache.report()["tokens_per_width"].keys() == {32}


def test_each_layer_holds_its_plan_and_the_bytes_it_reports(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "What is it?")
    widths = [[16, 4, 2, 2], [16, 2, 2, 2], [16, 4, 4, 16]]
    cache = WindowQuantCache()
    cache.follow(plan_of(widths), inputs["input_ids"] == pocket_model.config.video_token_id)
    run(pocket_model, inputs, cache)
    for layer, wanted in zip(cache.layers, widths, strict=True):
        found = layer.segments.tokens_per_width()
        assert found.get(4, 0) == 2 * 32 * wanted.count(4)
        assert found.get(2, 0) == 2 * 32 * wanted.count(2)
    assert cache.report()["bytes_held"] == cache.nbytes() == held_bytes([layer.segments for layer in cache.layers])
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 5
    assert "bits/element" in cache.describe()
    assert cache.describe().endswith("windows at 16/4/2 bits in layers 0: 1/1/2, 1: 1/0/3, 2: 2/2/0")
    assert "\n" not in cache.describe()


def test_a_float32_model_may_hold_what_a_gpu_would(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "What is it?")
    with windowquant(pocket_model, normalize="rank", storage_dtype=torch.float16) as caches:
        pocket_model.generate(**inputs, max_new_tokens=4, do_sample=False)
    report = caches[0].report()
    assert 16 in report["tokens_per_width"]
    assert 32 not in report["tokens_per_width"]
    assert all(t.dtype != torch.float32 for layer in caches[0].layers for t in layer.segments.tensors())
    with pytest.raises(ParameterError, match="storage_dtype"):
        WindowQuantCache(storage_dtype=torch.float64)


def test_the_block_searches_plans_and_leaves_the_model_as_it_was(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "Which object is red?")
    before = {name: value.clone() for name, value in pocket_model.state_dict().items()}
    with windowquant(pocket_model, window_size=32, normalize="rank") as caches:
        tokens = pocket_model.generate(**inputs, max_new_tokens=4, do_sample=False)
        pocket_model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert len(caches) == 2
    assert tokens.shape[0] == 1
    plan = caches[0].plan
    assert plan.num_layers == 3
    assert plan.num_windows == 4
    assert (plan.bit_widths[:, 0] == 16).all()
    assert "generate" not in vars(pocket_model)
    assert all(torch.equal(value, before[name]) for name, value in pocket_model.state_dict().items())
    np.testing.assert_array_equal(caches[0].plan.bit_widths, caches[1].plan.bit_widths)


def test_left_padding_changes_no_row(pocket_model, pocket_processor):
    texts = ["Is it red?", "Which of these objects can be seen in the second half of the video?"]
    both = ask(pocket_processor, *texts)
    visual = both["input_ids"] == pocket_model.config.video_token_id
    cache = WindowQuantCache()
    cache.follow(plan_of([[16, 4, 2, 2]] * 3, rows=2), visual)
    together = run(pocket_model, both, cache)[:, -6:]
    for row in range(2):
        kept = both["attention_mask"][row].bool()
        alone = {
            "input_ids": both["input_ids"][row : row + 1, kept],
            "attention_mask": both["attention_mask"][row : row + 1, kept],
            "pixel_values_videos": both["pixel_values_videos"][row : row + 1],
        }
        single = WindowQuantCache()
        single.follow(plan_of([[16, 4, 2, 2]] * 3), alone["input_ids"] == pocket_model.config.video_token_id)
        assert torch.equal(run(pocket_model, alone, single)[0, -6:], together[row])


def test_beams_follow_the_packed_rows(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "What is it?")
    visual = inputs["input_ids"] == pocket_model.config.video_token_id

    def beams(widths):
        cache = WindowQuantCache()
        cache.follow(plan_of(widths), visual)
        return run(pocket_model, inputs, cache, num_beams=3)

    assert torch.equal(beams([[16] * 4] * 3), run(pocket_model, inputs, DynamicCache(), num_beams=3))
    assert beams([[16, 2, 4, 2]] * 3).shape[1] == inputs["input_ids"].shape[1] + 6


def test_a_chunked_prompt_stays_whole_until_its_last_chunk(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "What is it?")
    embeddings = pocket_model.get_input_embeddings()(inputs["input_ids"])
    visual = inputs["input_ids"] == pocket_model.config.video_token_id
    decoder: LlamaForCausalLM = copy.deepcopy(pocket_model.model.language_model)

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


def test_bad_input_is_refused_by_name(pocket_model, pocket_processor, tiny_llama):
    inputs = ask(pocket_processor, "What is it?")
    with pytest.raises(UnsupportedError, match="llama"), windowquant(tiny_llama):
        pass
    with windowquant(pocket_model) as caches:
        with pytest.raises(UnsupportedError, match="no visual tokens"):
            pocket_model.generate(input_ids=torch.tensor([[1, 5, 6]]), max_new_tokens=1)
        with pytest.raises(ParameterError, match="leave it out"):
            pocket_model.generate(**inputs, past_key_values=DynamicCache(), max_new_tokens=1)
        with pytest.raises(ParameterError, match="already"), windowquant(pocket_model):
            pass
    assert caches == []
    cache = WindowQuantCache()
    run(pocket_model, inputs, cache)
    with pytest.raises(ParameterError, match="empty cache"):
        cache.follow(plan_of([[16] * 4] * 3), inputs["input_ids"] == pocket_model.config.video_token_id)
    with windowquant(pocket_model, window_size=512) as caches, pytest.raises(ParameterError, match="window"):
        pocket_model.generate(**inputs, max_new_tokens=1)
    assert "generate" not in vars(pocket_model)
