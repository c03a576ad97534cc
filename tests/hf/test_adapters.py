"""What adapters say about a prompt: visual positions, the question's words, embeddings. And the zero-edit rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab import registry
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf.adapters import Adapter, for_model
from wqlab.models.pocket import PocketVLMProcessor, prompt


def clip(count: int, level: int) -> Any:
    return np.full((count, 8, 8, 3), level, np.uint8)


def said(pocket_processor: PocketVLMProcessor, inputs: Any, positions: torch.Tensor) -> list[str]:
    return [pocket_processor.decode(row[at]) for row, at in zip(inputs["input_ids"], positions, strict=True)]


def test_a_batch_of_two_prompts(pocket_model: Any, pocket_processor: PocketVLMProcessor) -> None:
    texts = [
        prompt.PREFIX + prompt.VIDEO + prompt.question("Which one?", ["red", "blue"]),
        prompt.PREFIX + prompt.VIDEO + prompt.question("Is the much larger of these two circles moving?"),
    ]
    inputs = pocket_processor(text=texts, videos=[clip(2, 0), clip(2, 200)])
    adapter = for_model(pocket_model)
    assert adapter.tokens_per_frame(pocket_model) == 64
    visual = adapter.visual_positions(pocket_model, inputs)
    assert visual.dtype == torch.bool
    assert visual.sum(1).tolist() == [128, 128]
    assert said(pocket_processor, inputs, visual) == [prompt.VIDEO_TOKEN * 128] * 2
    question = adapter.question_positions(pocket_model, inputs)
    assert said(pocket_processor, inputs, question) == [
        "Which one? Options: red, blue.",
        "Is the much larger of these two circles moving?",
    ]
    with torch.no_grad():
        embeddings = adapter.visual_embeddings(pocket_model, inputs)
        features = pocket_model.get_video_features(inputs["pixel_values_videos"])
        words = adapter.text_embeddings(pocket_model, inputs)
    for row in range(2):
        torch.testing.assert_close(embeddings[row], features[row])
        assert torch.equal(words[row], pocket_model.get_input_embeddings().weight[inputs["input_ids"][row][question[row]]])


def test_the_stages_of_cache_then_ask(pocket_model: Any, pocket_processor: PocketVLMProcessor) -> None:
    """The video comes first and alone, then a question, then another: each part is understood by itself."""
    adapter = for_model(pocket_model)
    video = pocket_processor(text=prompt.PREFIX + prompt.VIDEO, videos=clip(1, 9))
    assert adapter.visual_positions(pocket_model, video).sum() == 64
    assert said(pocket_processor, video, adapter.question_positions(pocket_model, video)) == [""]
    again = pocket_processor(text=prompt.follow_up("And why is that?"))
    assert said(pocket_processor, again, adapter.question_positions(pocket_model, again)) == ["And why is that?"]
    assert not adapter.visual_positions(pocket_model, again).any()
    with pytest.raises(UnsupportedError, match=r"has no visual token \(video_token_id = 4 is nowhere in input_ids\)"):
        adapter.visual_embeddings(pocket_model, again)
    whole = prompt.PREFIX + prompt.VIDEO + prompt.question("Which?") + "red" + prompt.END + prompt.follow_up("And why is that?")
    both = pocket_processor(text=whole, videos=clip(1, 9))
    assert said(pocket_processor, both, adapter.question_positions(pocket_model, both)) == ["And why is that?"]


words = st.text(st.characters(codec="utf-8", exclude_characters="<", exclude_categories=("C", "Z")), min_size=1, max_size=30)


@settings(max_examples=30)
@given(text=words, options=st.lists(words, max_size=4), frames=st.integers(0, 3), left=st.integers(0, 5))
def test_the_question_is_found_whatever_it_says(
    pocket_model: Any, pocket_processor: PocketVLMProcessor, text: str, options: list[str], frames: int, left: int
) -> None:
    opening = prompt.encode(pocket_processor.tokenizer, prompt.PREFIX)
    asked = prompt.question_ids(pocket_processor.tokenizer, text, options)
    if not frames:
        asked = prompt.encode(pocket_processor.tokenizer, prompt.question(text, options).removeprefix("\n"))
    row = [2] * left + opening + [4] * (64 * frames) + asked
    mask = torch.tensor([[0] * left + [1] * (len(row) - left)])
    inputs = {"input_ids": torch.tensor([row]), "attention_mask": mask}
    found = for_model(pocket_model).question_positions(pocket_model, inputs)
    assert said(pocket_processor, inputs, found) == [prompt.with_options(text, options)]
    assert not bool((found & for_model(pocket_model).visual_positions(pocket_model, inputs)).any())


def test_videos_that_do_not_fit_the_prompt(pocket_model: Any, pocket_processor: PocketVLMProcessor) -> None:
    inputs = pocket_processor(text=prompt.PREFIX + prompt.VIDEO, videos=clip(1, 9))
    pixels = inputs["pixel_values_videos"].repeat(2, 1, 1, 1, 1)
    with pytest.raises(ParameterError, match=r"the prompt has 64 places for video tokens \(token 4\) and the videos have 128"):
        for_model(pocket_model).visual_embeddings(pocket_model, {**inputs, "pixel_values_videos": pixels})


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
