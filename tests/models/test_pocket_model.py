"""The pocket VLM inside transformers, with tiny random language models: generation, places, caches, saving, errors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, DynamicCache, LlamaForCausalLM

from wqlab.errors import ParameterError
from wqlab.hf import QuantizedKVCache, cache_argument
from wqlab.hf.capture import capture_attention, capture_importance
from wqlab.models.pocket import PocketVLMConfig, PocketVLMForConditionalGeneration, PocketVLMModel, modeling
from wqlab.models.pocket.vision import normalise

VIDEO = 4
FRAMES = 2
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6}


def make(**options: Any) -> PocketVLMForConditionalGeneration:
    torch.manual_seed(0)
    text = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "tie_word_embeddings": True,
    }  # fmt: skip
    model = PocketVLMForConditionalGeneration(PocketVLMConfig(text_config=text, projector_hidden_size=32, **options)).eval()
    with torch.no_grad():
        for name, weight in model.model.language_model.named_parameters():
            weight.mul_(10 if weight.ndim > 1 and "embed" not in name else 1)  # else every prompt has the same answer
        for module in model.model.vision_tower.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
    return model


@pytest.fixture(scope="module")
def model() -> PocketVLMForConditionalGeneration:
    torch.set_num_threads(2)
    return make()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    coarse = torch.randint(0, 256, (2, FRAMES, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return coarse.repeat_interleave(32, 3).repeat_interleave(32, 4)


def ids(before: tuple[int, ...] = (1, 7, 8), after: tuple[int, ...] = (9, 10, 2), frames: int = FRAMES) -> Tensor:
    return torch.tensor([[*before, *[VIDEO] * (64 * frames), *after]])


def test_generation_is_the_argmax_of_the_whole_prompt(model: Any, pixels: Tensor) -> None:
    calls: list[int] = []
    handle = model.model.vision_tower.register_forward_hook(lambda *_: calls.append(1))
    out = model.generate(input_ids=ids(), pixel_values_videos=pixels[:1], **GREEDY)
    handle.remove()
    assert calls == [1], "the encoder ran again while decoding"
    rows = ids()
    with torch.no_grad():
        for _ in range(6):
            logits = model(input_ids=rows, pixel_values_videos=pixels[:1], logits_to_keep=1).logits
            assert logits.shape == (1, 1, 128)
            rows = torch.cat([rows, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, rows)
    assert len(set(out[0, -6:].tolist())) > 2
    other = model.generate(input_ids=ids(), pixel_values_videos=pixels[1:], **GREEDY)
    assert not torch.equal(other, out), "the answer does not depend on the video"


def test_left_padding_changes_nothing(model: Any, pixels: Tensor) -> None:
    batch = torch.cat([ids(), ids(before=(0, 0, 1))])
    mask = (batch != 0).long()
    both = model.generate(input_ids=batch, attention_mask=mask, pixel_values_videos=pixels, **GREEDY)
    alone = model.generate(input_ids=ids(before=(1,)), pixel_values_videos=pixels[1:], **GREEDY)
    assert torch.equal(both[1, -6:], alone[0, -6:])
    assert torch.equal(both[:1], model.generate(input_ids=ids(), pixel_values_videos=pixels[:1], **GREEDY))


def test_eager_attention_agrees(pixels: Tensor) -> None:
    model = make()
    batch = torch.cat([ids(), ids(before=(0, 0, 1))])
    inputs = {"input_ids": batch, "attention_mask": (batch != 0).long(), "pixel_values_videos": pixels}
    with torch.no_grad():
        fast = model(**inputs).logits
        model.set_attn_implementation("eager")
        found = model(**inputs, output_attentions=True)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(found.logits[seen], fast[seen], atol=1e-4, rtol=1e-4)
    assert len(found.attentions) == 3


def test_visual_embeddings_stand_in_order(model: Any, pixels: Tensor) -> None:
    seen: list[Tensor] = []
    hook = lambda _m, _a, kwargs: seen.append(kwargs["inputs_embeds"])  # noqa: E731
    handle = model.model.language_model.register_forward_pre_hook(hook, with_kwargs=True)
    batch = torch.cat([ids(), ids(before=(1, 11, 12))])
    with torch.no_grad():
        model(input_ids=batch, pixel_values_videos=pixels)
        features = model.get_video_features(pixels)
        text = model.get_input_embeddings()(batch)
    handle.remove()
    assert features.shape == (2, 64 * FRAMES, 64)
    torch.testing.assert_close(seen[0][:, 3:-3], features)
    assert torch.equal(seen[0][:, :3], text[:, :3])
    assert torch.equal(seen[0][:, -3:], text[:, -3:])


def test_pixels_may_come_normalised_and_in_pieces(model: Any, pixels: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        expected = model.get_video_features(pixels)
        torch.testing.assert_close(model.get_video_features(normalise(pixels)), expected)
        monkeypatch.setattr(modeling, "_FRAMES_AT_ONCE", 1)
        torch.testing.assert_close(model.get_video_features(pixels), expected, atol=1e-4, rtol=1e-4)


def test_text_alone_is_the_llama_inside(model: Any) -> None:
    plain = LlamaForCausalLM(model.config.text_config).eval()
    plain.model, plain.lm_head = model.model.language_model, model.lm_head
    prompt = torch.tensor([[1, 20, 30, 2]])
    assert torch.equal(model.generate(prompt, **GREEDY), plain.generate(prompt, **GREEDY))


def test_embeddings_instead_of_ids(model: Any, pixels: Tensor) -> None:
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids()).clone()
        embeddings[:, 3:-3] = model.get_video_features(pixels[:1])
        out = model.generate(inputs_embeds=embeddings, **GREEDY)
    assert torch.equal(out, model.generate(input_ids=ids(), pixel_values_videos=pixels[:1], **GREEDY)[:, -6:])


@pytest.mark.parametrize("options", [{"policy": "full"}, {"num_bits": 2}, {"num_bits": 8}])
def test_a_quantized_cache(model: Any, pixels: Tensor, options: dict[str, Any]) -> None:
    cache = QuantizedKVCache(**options)
    out = model.generate(input_ids=ids(), pixel_values_videos=pixels[:1], **GREEDY, **cache_argument(model, cache))
    assert cache.get_seq_length() == out.shape[1] - 1
    exact = model.generate(input_ids=ids(), pixel_values_videos=pixels[:1], **GREEDY)
    # The first answer token is read off the full-precision prefill, whatever the cache makes of it afterwards.
    assert torch.equal(out[:, : -5 if "num_bits" in options else None], exact[:, : -5 if "num_bits" in options else None])
    assert options.get("num_bits", 32) in cache.report()["tokens_per_width"]


def test_the_cache_has_the_name_of_this_release(model: Any) -> None:
    name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
    for forward in (model.forward, model.model.forward):
        assert name in inspect.signature(forward).parameters
    assert list(cache_argument(model, None)) == [name]


def test_a_second_turn_on_the_same_cache(model: Any, pixels: Tensor) -> None:
    cache = DynamicCache(config=model.config.get_text_config())
    first = model.generate(input_ids=ids(), pixel_values_videos=pixels[:1], **GREEDY, **cache_argument(model, cache))
    whole = torch.cat([first, torch.tensor([[11, 12, 2]])], dim=1)
    second = model.generate(input_ids=whole, **GREEDY, **cache_argument(model, cache))
    assert torch.equal(second, model.generate(input_ids=whole, pixel_values_videos=pixels[:1], **GREEDY))


def test_loss_is_the_cross_entropy_of_the_labels(model: Any, pixels: Tensor) -> None:
    labels = ids().masked_fill(ids() == VIDEO, -100)
    with torch.no_grad():
        found = model(input_ids=ids(), pixel_values_videos=pixels[:1], labels=labels, output_hidden_states=True)
    expected = torch.nn.functional.cross_entropy(found.logits[0, :-1], labels[0, 1:])
    torch.testing.assert_close(found.loss, expected)
    assert len(found.hidden_states) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saving_and_loading(pixels: Tensor, tmp_path: Path, dtype: torch.dtype) -> None:
    model = make(video_token_id=VIDEO)
    model.model.multi_modal_projector.norm.weight.data.fill_(0.3)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert type(loaded) is PocketVLMForConditionalGeneration
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    assert loaded.model.vision_tower.stem.weight.dtype == torch.float32
    assert loaded.lm_head.weight is loaded.model.language_model.embed_tokens.weight
    with torch.no_grad():
        inputs = {"input_ids": ids(), "pixel_values_videos": pixels[:1]}
        found, expected = loaded(**inputs).logits, model(**inputs).logits
    if dtype == torch.float32:
        assert torch.equal(found, expected)
    else:
        assert found.dtype == dtype
        assert bool(torch.isfinite(found).all())
    assert type(AutoConfig.from_pretrained(tmp_path)) is PocketVLMConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is PocketVLMModel


def test_a_new_model_starts_as_the_projector_does() -> None:
    weight = make(projector_gain=0.2).model.multi_modal_projector.norm.weight
    assert torch.equal(weight, torch.full_like(weight, 0.2))


def test_captures_see_the_language_model(model: Any, pixels: Tensor) -> None:
    """What the stems attention_sinks and layer_similarity do."""
    with torch.no_grad(), capture_importance(model) as meters, capture_attention(model, [0, 32, 64]) as statistics:
        model(input_ids=ids(), pixel_values_videos=pixels[:1], use_cache=False)
    assert len(meters) == 3
    assert all(0 < meter.after_residual.value() <= 1 for meter in meters)
    assert sorted(statistics.mass) == [0, 1, 2]
    assert model.config.text_config._attn_implementation == "sdpa"


@settings(max_examples=25)
@given(places=st.integers(0, 200), frames=st.integers(0, 3))
def test_places_and_visual_tokens_must_agree(model: Any, pixels: Tensor, places: int, frames: int) -> None:
    row = torch.tensor([[1, 5, *[VIDEO] * places, 2]])
    given_pixels = pixels.flatten(0, 1)[:frames][None] if frames else None
    if places == 64 * frames:
        return
    said = rf"the prompt has {places} places for visual tokens \(token 4\) and the videos have {64 * frames} \(64 per frame\): give"
    with pytest.raises(ParameterError, match=said):
        model(input_ids=row, pixel_values_videos=given_pixels)


def test_other_inputs_that_cannot_be(model: Any, pixels: Tensor) -> None:
    with pytest.raises(ParameterError, match=r"shape \(1, 2, 3, 100, 256\) is refused: it must be \[videos, frames, 3, 256, 256\]"):
        model(input_ids=ids(), pixel_values_videos=pixels[:1, :, :, :100])
    with pytest.raises(ParameterError, match=r"shape \(2, 3, 256, 256\) is refused"):
        model.get_video_features(pixels[0])
    with pytest.raises(ParameterError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ParameterError, match="pixel_values_videos needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 64), pixel_values_videos=pixels)
