"""The adapters of published families, on tiny random models of the real classes: what they say is what the model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache, cache_argument, windowquant
from wqlab.hf.adapters import PlaceholderAdapter, for_model

IMAGE, VIDEO, START, END = 290, 291, 292, 293
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 7, "projection_dim": 32,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "vision_use_head": False,
}  # fmt: skip


def text(kind: str = "qwen2", **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 299,
        "pad_token_id": 0, **more,
    }  # fmt: skip


def prompts(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Token ids and mask of `rows`, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])}


@dataclass(frozen=True)
class Case:
    """A model, a batch of two prompts of different length for it, and what must be found in them.

    Parameters
    ----------
    visual : list of int
        Visual tokens of each row.
    asked : list of list of int
        Question's tokens of each row.
    per_frame : tuple of int or None
        Tokens of a frame, without and with the inputs.
    """

    model: Any
    inputs: dict[str, Any]
    visual: list[int]
    asked: list[list[int]]
    per_frame: tuple[int | None, int | None]


def llava() -> Case:
    config = transformers.LlavaConfig(vision_config=CLIP, text_config=text("llama"), image_token_index=IMAGE, image_seq_length=16)
    inputs = prompts([1, 5, *[IMAGE] * 16, 7, 9, 11], [1, 5, *[IMAGE] * 16, 6, *[IMAGE] * 16, 8])
    inputs["pixel_values"] = torch.randn(3, 3, 28, 28)
    return Case(transformers.LlavaForConditionalGeneration(config), inputs, [16, 32], [[7, 9, 11], [8]], (16, 16))


def llava_next() -> Case:
    config = transformers.LlavaNextConfig(
        vision_config=CLIP, text_config=text("llama"), image_token_index=IMAGE, image_grid_pinpoints=[[28, 56], [56, 28]]
    )
    # An image of 28 x 56 is two tiles and the whole: 16 tokens for the whole, 4 rows of 8 and a newline for the tiles.
    per = 16 + 4 * (8 + 1)
    inputs = prompts([1, 5, *[IMAGE] * per, 7, 9, 11], [1, *[IMAGE] * per, 8])
    inputs |= {"pixel_values": torch.randn(2, 3, 3, 28, 28), "image_sizes": torch.tensor([[28, 56], [28, 56]])}
    return Case(transformers.LlavaNextForConditionalGeneration(config), inputs, [per, per], [[7, 9, 11], [8]], (None, per))


def llava_onevision() -> Case:
    config = transformers.LlavaOnevisionConfig(
        vision_config=SIGLIP, text_config=text(), image_token_index=IMAGE, video_token_index=VIDEO,
        image_grid_pinpoints=[[28, 28], [28, 56]], vision_feature_layer=-1,
    )  # fmt: skip
    # A video of 3 frames of 2 x 2 tokens and one newline; an image of 28 x 28 is one tile and the whole.
    film, picture = 3 * 4 + 1, 16 + 4 * (4 + 1)
    inputs = prompts([1, 5, *[VIDEO] * film, 7, 9, 11], [1, *[IMAGE] * picture, 6, *[VIDEO] * film, 8])
    inputs |= {"pixel_values": torch.randn(1, 2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]])}
    inputs |= {"pixel_values_videos": torch.randn(2, 3, 3, 28, 28), "batch_num_images": torch.tensor([1])}
    model = transformers.LlavaOnevisionForConditionalGeneration(config)
    return Case(model, inputs, [film, picture + film], [[7, 9, 11], [8]], (4, 4))


def qwen(config: Any, model: Any, vision: dict[str, Any]) -> Case:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    made = config(
        text_config={**text(), "model_type": None, "rope_parameters": rope},
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    # Videos of 2 and 3 steps of 4 x 4 patches, four of which make a token; an image of 4 x 6 patches.
    inputs = prompts([1, 5, START, *[VIDEO] * 8, END, 7, 9], [1, START, *[IMAGE] * 6, END, START, *[VIDEO] * 12, END, 8])
    ids = inputs["input_ids"]
    inputs |= {"pixel_values_videos": torch.randn(5 * 16, 3 * 2 * 7 * 7), "video_grid_thw": torch.tensor([[2, 4, 4], [3, 4, 4]])}
    inputs |= {"pixel_values": torch.randn(24, 3 * 2 * 7 * 7), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return Case(model(made), inputs, [8, 18], [[END, 7, 9], [END, 8]], (None, 4))


def qwen2_vl() -> Case:
    return qwen(
        transformers.Qwen2VLConfig,
        transformers.Qwen2VLForConditionalGeneration,
        {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    )


def qwen2_5_vl() -> Case:
    return qwen(
        transformers.Qwen2_5_VLConfig,
        transformers.Qwen2_5_VLForConditionalGeneration,
        {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "window_size": 28, "fullatt_block_indexes": [1]},
    )


def internvl() -> Case:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": [28, 28],
        "patch_size": [7, 7],
    }  # fmt: skip
    config = transformers.InternVLConfig(vision_config=vision, text_config=text(), image_token_id=IMAGE, image_seq_length=4)
    # Words stand between the frames of a video.
    inputs = prompts([1, *[20, *[IMAGE] * 4, 21] * 3, 7, 9], [1, 20, *[IMAGE] * 4, 8])
    inputs["pixel_values"] = torch.randn(4, 3, 28, 28)
    return Case(transformers.InternVLForConditionalGeneration(config), inputs, [12, 4], [[21, 7, 9], [8]], (4, 4))


FAMILIES: dict[str, Callable[[], Case]] = {
    made.__name__: made for made in (llava, llava_next, llava_onevision, qwen2_vl, qwen2_5_vl, internvl)
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    made = FAMILIES[request.param]()
    assert made.model.config.model_type == request.param
    for weight in made.model.parameters():
        weight.data.mul_(2.0)  # far enough from zero that no two answers are alike
    made.model.eval()
    return made


def embedded(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """What the language model of `model` is given, [batch, seq, hidden]."""
    seen: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    (only,) = seen
    return only


def agrees(model: Any, inputs: dict[str, Any]) -> None:
    """The adapter's embeddings are those that the language model is given."""
    adapter, given = for_model(model), embedded(model, inputs)
    with torch.no_grad():
        found = adapter.visual_embeddings(model, inputs)
    for row, at in enumerate(adapter.visual_positions(model, inputs)):
        assert torch.equal(found[row], given[row][at])


def test_visual_positions_are_the_placeholders(case: Case) -> None:
    positions = for_model(case.model).visual_positions(case.model, case.inputs)
    assert positions.dtype == torch.bool
    assert positions.shape == case.inputs["input_ids"].shape
    assert positions.sum(1).tolist() == case.visual
    assert set(case.inputs["input_ids"][positions].tolist()) <= {IMAGE, VIDEO}


def test_visual_embeddings_are_what_the_language_model_is_given(case: Case) -> None:
    agrees(case.model, case.inputs)
    with torch.no_grad():
        found = for_model(case.model).visual_embeddings(case.model, case.inputs)
        of_the_base = for_model(case.model.model).visual_embeddings(case.model.model, case.inputs)
    assert all(torch.isfinite(row).all() for row in found)
    assert all(torch.equal(*pair) for pair in zip(found, of_the_base, strict=True))


def test_question_and_its_embeddings(case: Case) -> None:
    adapter, ids = for_model(case.model), case.inputs["input_ids"]
    question = adapter.question_positions(case.model, case.inputs)
    assert [row[at].tolist() for row, at in zip(ids, question, strict=True)] == case.asked
    given, weight = embedded(case.model, case.inputs), case.model.get_input_embeddings().weight
    for row, words in enumerate(adapter.text_embeddings(case.model, case.inputs)):
        assert torch.equal(words, weight[case.asked[row]])
        assert torch.equal(words, given[row][question[row]])


def test_tokens_per_frame(case: Case) -> None:
    adapter = for_model(case.model)
    assert (adapter.tokens_per_frame(case.model), adapter.tokens_per_frame(case.model, case.inputs)) == case.per_frame


def test_a_prompt_of_words_only(case: Case) -> None:
    adapter, inputs = for_model(case.model), prompts([1, 5, 6, 7], [1, 8])
    assert not adapter.visual_positions(case.model, inputs).any()
    assert torch.equal(adapter.question_positions(case.model, inputs), inputs["attention_mask"] != 0)
    with pytest.raises(UnsupportedError, match=r"of 4 tokens has no visual token \(image_token_id = 290 .*processor"):
        adapter.visual_embeddings(case.model, inputs)


def test_parts_of_the_processors_output_that_are_missing(case: Case) -> None:
    adapter = for_model(case.model)
    assert isinstance(adapter, PlaceholderAdapter)
    for place in adapter.places:
        for name in (place.pixels, *place.needs):
            less = {key: value for key, value in case.inputs.items() if key != name}
            with pytest.raises(ParameterError, match=rf"places for {place.kind} tokens and the inputs have no {name} \(they have"):
                adapter.visual_embeddings(case.model, less)


def test_pixels_of_another_prompt(case: Case) -> None:
    adapter = for_model(case.model)
    token = IMAGE if bool((case.inputs["input_ids"] == IMAGE).any()) else VIDEO
    ids = case.inputs["input_ids"].clone()
    ids[1, int((ids[1] == token).nonzero()[0])] = 6
    with pytest.raises(
        ParameterError, match=r"the prompt has \d+ places for image tokens \(token 290\) and the images have \d+: give"
    ):
        adapter.visual_embeddings(case.model, {**case.inputs, "input_ids": ids})


def test_generate_with_our_cache_in_full_precision_changes_nothing(case: Case) -> None:
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    plain, cache = case.model.generate(**case.inputs, **how), QuantizedKVCache(policy="full")
    ours = case.model.generate(**case.inputs, **how, **cache_argument(case.model, cache))
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(plain.logits))
    assert cache.get_seq_length() == plain.sequences.shape[1] - 1


def test_a_continued_prompt_whose_mask_covers_the_cache(case: Case) -> None:
    inputs = {"input_ids": torch.tensor([[6, 7]]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    assert for_model(case.model).question_positions(case.model, inputs).tolist() == [[True, True]]


def test_half_precision(case: Case) -> None:
    """Embeddings come in the dtype of the language model."""
    model = case.model.__class__(case.model.config).to(torch.bfloat16).eval()
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in case.inputs.items()}
    agrees(model, inputs)
    with torch.no_grad():
        assert {row.dtype for row in for_model(model).visual_embeddings(model, inputs)} == {torch.bfloat16}


def test_llava_next_images_of_different_sizes() -> None:
    made = llava_next()
    wide, tall = 16 + 4 * (8 + 1), 16 + 8 * (4 + 1)
    inputs = prompts([1, *[IMAGE] * wide, 7], [1, *[IMAGE] * tall, 8, 9])
    inputs |= {"pixel_values": torch.randn(2, 3, 3, 28, 28), "image_sizes": torch.tensor([[28, 56], [56, 28]])}
    agrees(made.model.eval(), inputs)
    assert for_model(made.model).tokens_per_frame(made.model, inputs) is None


def test_llava_onevision_frames_as_images() -> None:
    """Several images in one prompt are not tiled: 16 tokens and a newline each."""
    made = llava_onevision()
    inputs = prompts([1, *[IMAGE] * 17, 6, *[IMAGE] * 17, 7])
    inputs |= {"pixel_values": torch.randn(2, 1, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]] * 2)}
    agrees(made.model.eval(), {**inputs, "batch_num_images": torch.tensor([2])})


def test_llava_with_the_class_token_and_with_an_encoder_of_any_size() -> None:
    config = transformers.LlavaConfig(
        vision_config=CLIP, text_config=text("llama"), image_token_index=IMAGE, vision_feature_select_strategy="full"
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    adapter = for_model(model)
    assert adapter.tokens_per_frame(model) == 17
    agrees(model, {**prompts([1, *[IMAGE] * 17, 7]), "pixel_values": torch.randn(1, 3, 28, 28)})
    pixtral = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 7, "head_dim": 16,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=pixtral, text_config=text("llama"), image_token_index=IMAGE, vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    assert adapter.tokens_per_frame(model) is None
    inputs = prompts([1, *[IMAGE] * 16, 7], [1, *[IMAGE] * 8, 7])
    agrees(model, {**inputs, "pixel_values": torch.randn(2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28], [14, 28]])})


def test_qwen_images_without_a_video() -> None:
    made = qwen2_vl()
    inputs = prompts([1, START, *[IMAGE] * 6, END, 8])
    inputs |= {"pixel_values": torch.randn(24, 3 * 2 * 7 * 7), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    agrees(made.model.eval(), inputs)
    assert for_model(made.model).tokens_per_frame(made.model, inputs) == 6


def test_windowquant_on_every_family(case: Case) -> None:
    options = {**case.inputs, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with windowquant(case.model, window_size=4, normalize="rank", alpha=8.0) as caches:
        tokens = case.model.generate(**options)
    assert tokens.shape == case.model.generate(**options).shape
    cache = caches[0]
    assert cache.plan is not None
    assert cache.plan.windows_per_row == tuple(count // 4 for count in case.visual)
    encoded = 0
    for layer, widths in zip(cache.layers, cache.plan.bit_widths, strict=True):
        for bits in (4, 2):
            windows = [w for w, width in enumerate(widths) if width == bits]
            wanted = sum(2 * 4 for count in case.visual for w in windows if w < count // 4)
            assert layer.segments.tokens_per_width().get(bits, 0) == wanted
            encoded += wanted
    assert encoded
