"""What adapters say about a prompt: visual positions, the question's words, embeddings. And the zero-edit rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig

from wqlab import registry
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf.adapters import Adapter, for_model
from wqlab.models import smollm2
from wqlab.models.pocket import PocketVLMConfig, PocketVLMForConditionalGeneration, PocketVLMProcessor, prompt


@pytest.fixture(scope="module")
def model() -> PocketVLMForConditionalGeneration:
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    return PocketVLMForConditionalGeneration(PocketVLMConfig(text_config=text, projector_hidden_size=8)).eval()


@pytest.fixture(scope="module")
def processor() -> PocketVLMProcessor:
    return PocketVLMProcessor(AutoTokenizer.from_pretrained(smollm2.build()))


def clip(count: int, level: int) -> Any:
    return np.full((count, 8, 8, 3), level, np.uint8)


def said(processor: PocketVLMProcessor, inputs: Any, positions: torch.Tensor) -> list[str]:
    return [processor.decode(row[at]) for row, at in zip(inputs["input_ids"], positions, strict=True)]


def test_a_batch_of_two_prompts(model: Any, processor: PocketVLMProcessor) -> None:
    texts = [
        prompt.PREFIX + prompt.VIDEO + prompt.question("Which one?", ["red", "blue"]),
        prompt.PREFIX + prompt.VIDEO + prompt.question("Is the much larger of these two circles moving?"),
    ]
    inputs = processor(text=texts, videos=[clip(2, 0), clip(2, 200)])
    adapter = for_model(model)
    assert adapter.tokens_per_frame(model) == 64
    visual = adapter.visual_positions(model, inputs)
    assert visual.dtype == torch.bool
    assert visual.sum(1).tolist() == [128, 128]
    assert said(processor, inputs, visual) == [prompt.VIDEO_TOKEN * 128] * 2
    question = adapter.question_positions(model, inputs)
    assert said(processor, inputs, question) == [
        "Which one? Options: red, blue.",
        "Is the much larger of these two circles moving?",
    ]
    with torch.no_grad():
        embeddings = adapter.visual_embeddings(model, inputs)
        features = model.get_video_features(inputs["pixel_values_videos"])
        words = adapter.text_embeddings(model, inputs)
    for row in range(2):
        torch.testing.assert_close(embeddings[row], features[row])
        assert torch.equal(words[row], model.get_input_embeddings().weight[inputs["input_ids"][row][question[row]]])


def test_the_stages_of_cache_then_ask(model: Any, processor: PocketVLMProcessor) -> None:
    """The video comes first and alone, then a question, then another: each part is understood by itself."""
    adapter = for_model(model)
    video = processor(text=prompt.PREFIX + prompt.VIDEO, videos=clip(1, 9))
    assert adapter.visual_positions(model, video).sum() == 64
    assert said(processor, video, adapter.question_positions(model, video)) == [""]
    again = processor(text=prompt.follow_up("And why is that?"))
    assert said(processor, again, adapter.question_positions(model, again)) == ["And why is that?"]
    assert not adapter.visual_positions(model, again).any()
    with pytest.raises(UnsupportedError, match=r"has no visual token \(video_token_id = 4 is nowhere in input_ids\)"):
        adapter.visual_embeddings(model, again)
    whole = prompt.PREFIX + prompt.VIDEO + prompt.question("Which?") + "red" + prompt.END + prompt.follow_up("And why is that?")
    both = processor(text=whole, videos=clip(1, 9))
    assert said(processor, both, adapter.question_positions(model, both)) == ["And why is that?"]


words = st.text(st.characters(codec="utf-8", exclude_characters="<", exclude_categories=("C", "Z")), min_size=1, max_size=30)


@settings(max_examples=30)
@given(text=words, options=st.lists(words, max_size=4), frames=st.integers(0, 3), left=st.integers(0, 5))
def test_the_question_is_found_whatever_it_says(
    model: Any, processor: PocketVLMProcessor, text: str, options: list[str], frames: int, left: int
) -> None:
    opening = prompt.encode(processor.tokenizer, prompt.PREFIX)
    asked = prompt.question_ids(processor.tokenizer, text, options)
    if not frames:
        asked = prompt.encode(processor.tokenizer, prompt.question(text, options).removeprefix("\n"))
    row = [2] * left + opening + [4] * (64 * frames) + asked
    mask = torch.tensor([[0] * left + [1] * (len(row) - left)])
    inputs = {"input_ids": torch.tensor([row]), "attention_mask": mask}
    found = for_model(model).question_positions(model, inputs)
    assert said(processor, inputs, found) == [prompt.with_options(text, options)]
    assert not bool((found & for_model(model).visual_positions(model, inputs)).any())


def test_videos_that_do_not_fit_the_prompt(model: Any, processor: PocketVLMProcessor) -> None:
    inputs = processor(text=prompt.PREFIX + prompt.VIDEO, videos=clip(1, 9))
    pixels = inputs["pixel_values_videos"].repeat(2, 1, 1, 1, 1)
    with pytest.raises(ParameterError, match=r"the prompt has 64 places for video tokens \(token 4\) and the videos have 128"):
        for_model(model).visual_embeddings(model, {**inputs, "pixel_values_videos": pixels})


def test_an_unknown_family(tiny_llama: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"LlamaForCausalLM is of model type 'llama', which no adapter knows \(known: .*pocket_vlm"
    ):
        for_model(tiny_llama)


def test_a_new_family_is_one_file(tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "more_adapters"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "llama.py").write_text(
        "from wqlab.hf.adapters.pocket_vlm import PocketVLMAdapter\nfrom wqlab.registry import register\n\n"
        "@register('adapter', 'llama')\nclass LlamaAdapter(PocketVLMAdapter):\n    pass\n"
    )
    registry.names("adapter")  # before the entries are copied: a module registers only once
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._PACKAGES, "adapter", [*registry._PACKAGES["adapter"], "more_adapters"])
    monkeypatch.setitem(registry._ENTRIES, "adapter", dict(registry._ENTRIES["adapter"]))
    adapter = for_model(tiny_llama)
    assert isinstance(adapter, Adapter)
    assert type(adapter).__name__ == "LlamaAdapter"
