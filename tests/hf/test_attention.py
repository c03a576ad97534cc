"""The packed cache read in place: the same answers as its decoded copy through the model's own attention, on every family."""

import dataclasses
import logging

import pytest
import torch
from test_adapters_families import FAMILIES
from transformers import DynamicCache

from wqlab import windowquant
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import WindowQuantCache, attention, cache_argument, window_cache
from wqlab.hf.adapters import for_model
from wqlab.hf.attention import MAX_QUERY_TOKENS, NAME, packed_attention
from wqlab.hf.capture import decoder_layers

SEARCH = {"window_size": 4, "normalize": "rank", "alpha": 8.0}
HOW = {
    "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    torch.manual_seed(0)
    made = FAMILIES[request.param]()
    for weight in made.model.parameters():
        weight.data.mul_(2.0)
    made.model.eval()
    return made


@pytest.fixture
def reads(monkeypatch):
    """The q_len of each packed read."""
    seen = []

    def spy(query, parts, *args):
        seen.append(query.shape[2])
        return original(query, parts, *args)

    original = attention.mixed_decode
    monkeypatch.setattr(attention, "mixed_decode", spy)
    return seen


def prepared(case, **options):
    return WindowQuantCache.prepare(
        case.model, case.inputs, importance=[0.5] * len(decoder_layers(case.model)), **SEARCH, **options
    )


def answers(case, cache, inputs=None, **options):
    """Logits [new, batch, vocab] of a greedy generation, and its tokens."""
    found = case.model.generate(**(inputs or case.inputs), **cache_argument(case.model, cache), **HOW, **options)
    return torch.stack(found.logits), found.sequences


def test_every_generated_token_reads_every_layer_packed(case, reads):
    before = {part: getattr(case.model.config, part)._attn_implementation for part in case.model.config.sub_configs}
    want, tokens = answers(case, prepared(case))
    assert reads == []
    cache = prepared(case)
    with packed_attention(case.model):
        assert case.model.config.get_text_config()._attn_implementation == NAME
        assert case.model.config.vision_config._attn_implementation == before["vision_config"]
        got, same = answers(case, cache)
    assert {part: getattr(case.model.config, part)._attn_implementation for part in case.model.config.sub_configs} == before
    # Five tokens are fed back, each through every layer; the padded batch of two reads with its mask.
    assert reads == [1] * 5 * len(cache.layers)
    assert torch.equal(tokens, same)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits(case, dtype, reads):
    model = case.model.__class__(case.model.config).to(dtype).eval()
    model.load_state_dict({name: value.to(dtype) for name, value in case.model.state_dict().items()})
    given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in case.inputs.items()}
    half = type(case)(model, given, case.visual, case.asked, case.per_frame)
    want, _ = answers(half, prepared(half))
    with packed_attention(model):
        got, _ = answers(half, prepared(half))
    assert reads
    assert torch.isfinite(got).all()
    # The first logits come from the prompt, in full precision on both ways; then each layer rounds to 8 or 11 bits.
    step = torch.finfo(dtype).eps * want.abs().max()
    assert ((got[1] - want[1]).abs().max() / step) < 16


def test_several_questions_on_one_cache(case, reads):
    """A question of several tokens is causal among itself; a crop takes it back, and the next one is asked."""
    model, inputs = case.model, case.inputs
    questions = [torch.randint(20, 200, (2, count)) for count in (7, 1, 12)]
    language, embed = model.model.language_model, model.get_input_embeddings()
    length = inputs["input_ids"].shape[1]
    padding = inputs["attention_mask"]

    def ask_all(cache):
        found = []
        model(**inputs, **cache_argument(model, cache), use_cache=True)
        for question in questions:
            mask = torch.cat([padding, torch.ones_like(question)], 1)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, length:]
            output = language(
                inputs_embeds=embed(question), attention_mask=mask, position_ids=positions, use_cache=True,
                **cache_argument(language, cache),
            )  # fmt: skip
            found.append(output.last_hidden_state)
            cache.crop(length)
            assert cache.get_seq_length() == length
        return torch.cat(found, 1)

    with torch.no_grad():
        want = ask_all(prepared(case))
        with packed_attention(model):
            got = ask_all(prepared(case))
    assert sorted(set(reads)) == [1, 7, 12]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_cache_filled_inside_is_read_outside_and_the_reverse(case, reads):
    model = case.model

    def step(cache):
        ids = torch.full((2, 1), 30)
        mask = torch.cat([case.inputs["attention_mask"], torch.ones_like(ids)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        with torch.no_grad():
            output = model.model.language_model(
                inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, position_ids=positions, use_cache=True,
                **cache_argument(model.model.language_model, cache),
            )  # fmt: skip
        return output.last_hidden_state

    def filled(cache):
        with torch.no_grad():
            model(**case.inputs, **cache_argument(model, cache), use_cache=True)
        return cache

    with packed_attention(model):
        cache = filled(prepared(case))
    want = step(cache)
    assert reads == []
    outside = filled(prepared(case))
    with packed_attention(model):
        # Nothing says yet that its attention is ours, so the first step is decoded; the second one knows.
        torch.testing.assert_close(step(outside), want, rtol=1e-4, atol=1e-4)
        assert reads == []
        outside.crop(-1)
        torch.testing.assert_close(step(outside), want, rtol=1e-4, atol=1e-4)
    assert reads == [1] * len(outside.layers)


def test_masks_that_say_more_than_padding_read_the_decoded_copy(case, reads):
    """A tree of drafted tokens, a bias, a window that slides, a long question: right, though not packed."""
    model, length = case.model, case.inputs["input_ids"].shape[1]
    language = model.model.language_model
    drafted = torch.full((2, 3), 30)
    seen = torch.cat([case.inputs["attention_mask"], torch.ones_like(drafted)], 1).bool()
    tree = seen[:, None, None].repeat(1, 1, 3, 1) & torch.ones(3, length + 3, dtype=torch.bool).tril(length)
    tree[:, :, 2, length + 1] = False  # the third token is a brother of the second
    bias = torch.zeros(tree.shape).masked_fill(~tree, torch.finfo(torch.float32).min)

    def step(cache, mask, ids=drafted):
        positions = torch.full_like(ids, length) + torch.arange(ids.shape[1])
        with torch.no_grad():
            model(**case.inputs, **cache_argument(model, cache), use_cache=True)
            return language(
                inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, position_ids=positions, use_cache=True,
                **cache_argument(language, cache),
            ).last_hidden_state  # fmt: skip

    long = torch.full((2, MAX_QUERY_TOKENS + 1), 30)
    whole = torch.cat([case.inputs["attention_mask"], torch.ones_like(long)], 1)
    want = [step(prepared(case), tree), step(prepared(case), whole, long)]
    with packed_attention(model):
        got = [step(prepared(case), tree), step(prepared(case), whole, long)]
        biased = step(prepared(case), bias)
    assert reads == []
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(biased, want[0], rtol=1e-4, atol=1e-4)


def test_a_window_that_slides(reads):
    """Qwen2 with sliding-window layers: each token sees the last eight only."""
    torch.manual_seed(0)
    made = FAMILIES["internvl"]()
    config = made.model.config
    text = config.text_config
    text.use_sliding_window, text.sliding_window, text.layer_types = True, 8, ["sliding_attention", "full_attention"]
    model = type(made.model)(config).eval()
    case = type(made)(model, made.inputs, made.visual, made.asked, made.per_frame)
    want, _ = answers(case, prepared(case))
    with packed_attention(model):
        got, _ = answers(case, prepared(case))
    assert reads
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_block_hooks_the_attention_and_its_cache_goes_on(case, reads, caplog):
    model = case.model
    inputs = dict(case.inputs)
    with caplog.at_level(logging.INFO, logger="wqlab"), windowquant(model, **SEARCH) as caches:
        first = model.generate(**inputs, **HOW)
        assert len(reads) == 5 * len(caches[0].layers)
        assert "bits/element" in caplog.text
        held = caches[0].get_seq_length()
        longer = {**inputs, "input_ids": first.sequences}
        more = inputs["attention_mask"].new_ones(2, first.sequences.shape[1] - inputs["attention_mask"].shape[1])
        longer["attention_mask"] = torch.cat([inputs["attention_mask"], more], 1)
        if "mm_token_type_ids" in inputs:
            longer["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(more)], 1)
        second = model.generate(**longer, **HOW, **cache_argument(model, caches[0]))
        assert len(caches) == 1
        assert caches[0].get_seq_length() == held + 6
    assert torch.equal(second.sequences[:, : first.sequences.shape[1]], first.sequences)
    reads.clear()
    with windowquant(model, attention="dequantize", **SEARCH) as caches:
        assert torch.equal(model.generate(**inputs, **HOW).sequences, first.sequences)
    assert reads == []


def test_other_caches_work_inside(case, reads):
    want, _ = answers(case, DynamicCache())
    with packed_attention(case.model):
        got, _ = answers(case, DynamicCache())
    assert reads == []
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_models_whose_attention_we_cannot_replace(case, monkeypatch):
    model = case.model
    options = {"importance": [0.5] * len(decoder_layers(model)), **SEARCH}
    with packed_attention(model), pytest.raises(ParameterError, match="reads packed caches already"), packed_attention(model):
        pass
    # It says that it cannot.
    with monkeypatch.context() as patch:
        for kind in {type(module) for module in model.modules() if hasattr(module, "_can_set_attn_implementation")}:
            patch.setattr(kind, "_can_set_attn_implementation", classmethod(lambda cls: False))
        with pytest.raises(UnsupportedError, match="attention='dequantize'"), windowquant(model, **options):
            pass
    # It says that it can, and one layer computes its attention by itself.
    last = decoder_layers(model)[-1].self_attn
    original = type(last).forward

    def by_itself(*args, **kwargs):
        last.config = type(last.config)(**{**last.config.to_dict(), "attn_implementation": "sdpa"})
        try:
            return original(last, *args, **kwargs)
        finally:
            last.config = model.config.get_text_config()

    monkeypatch.setattr(last, "forward", by_itself)
    with windowquant(model, **options) as caches, pytest.raises(UnsupportedError, match=r"layer 1 .*attention='dequantize'"):
        model.generate(**case.inputs, **HOW)
    with windowquant(model, attention="dequantize", **options) as caches:
        model.generate(**case.inputs, **HOW)
    assert caches[0].get_seq_length()
    with pytest.raises(ParameterError, match="neither 'packed' nor"), windowquant(model, attention="eager"):
        pass


def test_the_words_that_windows_are_compared_with(case):
    options = {"importance": [0.5] * len(decoder_layers(case.model)), **SEARCH}
    question = WindowQuantCache.prepare(case.model, case.inputs, **options)
    everything = WindowQuantCache.prepare(case.model, case.inputs, text="all", **options)
    assert question.plan.num_windows == everything.plan.num_windows
    adapter, ids = for_model(case.model), case.inputs["input_ids"]
    read, visual = case.inputs["attention_mask"] != 0, adapter.visual_positions(case.model, case.inputs)
    weight = case.model.get_input_embeddings().weight
    for row, words in enumerate(adapter.text_embeddings(case.model, case.inputs, "all")):
        assert torch.equal(words, weight[ids[row][read[row] & ~visual[row]]])
        assert len(words) > len(case.asked[row])
    with pytest.raises(ParameterError, match="text = 'some'"):
        WindowQuantCache.prepare(case.model, case.inputs, text="some", **options)
    # Nothing is asked after the first row's video.
    short = {**case.inputs, "input_ids": case.inputs["input_ids"].clone()}
    short["attention_mask"] = case.inputs["attention_mask"].clone()
    short["attention_mask"][0, -len(case.asked[0]) :] = 0
    with pytest.raises(ParameterError, match=r"row 0 of the prompt has no text .*text='all'"):
        WindowQuantCache.prepare(case.model, short, **options)


def test_a_second_turn_at_16_bits_is_that_of_the_plain_cache(case, monkeypatch):
    """Positions of images included. (Not that of one long prompt: there Qwen2.5-VL counts positions otherwise by itself.)"""
    model, inputs = case.model, case.inputs
    new = torch.randint(20, 200, (2, 5))
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], new], 1)}
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(new)], 1)
    if "mm_token_type_ids" in inputs:
        longer["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(new).int()], 1)
    plain = DynamicCache()
    model.generate(**inputs, max_new_tokens=1, **cache_argument(model, plain))
    want = model.generate(**for_model(model).without_pixels(longer), **HOW, **cache_argument(model, plain))

    def all_full(*args, **options):
        plan = search(*args, **options)
        return dataclasses.replace(plan, bit_widths=torch.full_like(torch.as_tensor(plan.bit_widths), 16))

    search = window_cache.search
    monkeypatch.setattr(window_cache, "search", all_full)
    with windowquant(model, importance=[0.5] * len(decoder_layers(model)), **SEARCH) as caches:
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3)
        assert caches[0].get_seq_length() == inputs["input_ids"].shape[1] + 2
        caches[0].crop(inputs["input_ids"].shape[1])
        got = model.generate(**longer, **HOW, **cache_argument(model, caches[0]))
        with pytest.raises(UnsupportedError, match="visual tokens behind"):
            model.generate(
                input_ids=torch.cat([got.sequences, inputs["input_ids"]], 1), max_new_tokens=1, **cache_argument(model, caches[0])
            )
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-3, atol=1e-3)
