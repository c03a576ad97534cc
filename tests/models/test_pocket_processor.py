"""From words and videos to inputs: places, padding, messages, limits, errors. With SmolLM2's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor, AutoTokenizer

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.models import clip_path, smollm2
from wqlab.models.pocket import PocketVLMConfig, PocketVLMProcessor, prompt

ASK = prompt.question("Which one?", ["red", "blue"])
TEXT = prompt.PREFIX + prompt.VIDEO + ASK


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(smollm2.build())


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> PocketVLMProcessor:
    """Small frames, so that a hundred of them cost nothing."""
    return PocketVLMProcessor(tokenizer, frame_size=8)


def clip(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def test_the_placeholder_is_a_token_of_its_own(tokenizer: Any) -> None:
    assert prompt.encode(tokenizer, prompt.VIDEO_TOKEN) == [PocketVLMConfig().video_token_id]


def test_inputs_are_the_pieces_that_training_uses(processor: PocketVLMProcessor, tokenizer: Any) -> None:
    frames = clip(3)
    inputs = processor(text=TEXT, videos=frames)
    pieces = [*prompt.prefix_ids(tokenizer), *[4] * 192, *prompt.question_ids(tokenizer, "Which one?", ["red", "blue"])]
    assert inputs["input_ids"].tolist() == [pieces]
    assert inputs["attention_mask"].tolist() == [[1] * len(pieces)]
    assert torch.equal(inputs["pixel_values_videos"][0], torch.from_numpy(frames).permute(0, 3, 1, 2))
    assert sorted(inputs) == sorted(processor.model_input_names)


def test_a_file_is_read_and_sampled(tokenizer: Any) -> None:
    inputs = PocketVLMProcessor(tokenizer)(text=TEXT, videos=str(clip_path("bikes")), num_frames=3)
    assert inputs["pixel_values_videos"].shape == (1, 3, 3, 256, 256)
    assert inputs["pixel_values_videos"].dtype == torch.uint8
    assert int((inputs["input_ids"] == 4).sum()) == 192


def test_thirty_two_frames_unless_told_and_all_of_a_short_video(processor: PocketVLMProcessor) -> None:
    assert processor(text=TEXT, videos=clip(50))["pixel_values_videos"].shape[1] == 32
    assert processor(text=TEXT, videos=clip(50), num_frames=7)["pixel_values_videos"].shape[1] == 7
    assert processor(text=TEXT, videos=clip(5), num_frames=7)["pixel_values_videos"].shape[1] == 5


def test_a_batch_is_padded_on_the_left(processor: PocketVLMProcessor) -> None:
    texts = [TEXT, prompt.PREFIX + prompt.VIDEO + prompt.question("Which one of all of these is it, and why?"), "Hello"]
    for videos in ([clip(2), clip(2, 1)], np.stack([clip(2), clip(2, 1)]), [[clip(2)], [clip(2, 1)], []]):
        inputs = processor(text=texts, videos=videos)
        assert inputs["pixel_values_videos"].shape == (2, 2, 3, 8, 8)
        assert inputs["attention_mask"][:, -1].tolist() == [1, 1, 1]
        assert int(inputs["attention_mask"][2].sum()) == 1
        assert (inputs["input_ids"] == 4).sum(1).tolist() == [128, 128, 0]
    single = processor(text=TEXT, videos=clip(2))["input_ids"][0]
    assert torch.equal(inputs["input_ids"][0, -len(single) :], single)


def test_text_alone_and_lists(processor: PocketVLMProcessor, tokenizer: Any) -> None:
    inputs = processor(text="Hello there", return_tensors=None)
    assert inputs["input_ids"] == [prompt.encode(tokenizer, "Hello there")]
    assert "pixel_values_videos" not in inputs


def test_messages_give_the_same_prompt(processor: PocketVLMProcessor) -> None:
    frames = clip(3)
    words = prompt.with_options("Which one?", ["red", "blue"])
    for key in ("video", "path"):
        video = frames if key == "video" else str(clip_path("bikes"))
        chat: list[Any] = [{"role": "user", "content": [{"type": "video", key: video}, {"type": "text", "text": words}]}]
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True, "processor_kwargs": {"num_frames": 3}}
        found, expected = processor.apply_chat_template(chat, **options), processor(text=TEXT, videos=video, num_frames=3)
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert torch.equal(found["pixel_values_videos"], expected["pixel_values_videos"])
    chat += [{"role": "assistant", "content": "red"}, {"role": "user", "content": "Why?"}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == TEXT + "red" + prompt.END + prompt.follow_up("Why?")
    with pytest.raises(Exception, match="reads parts of type video and text, not image"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "image", "path": "a.png"}]}])


def test_saving_and_loading(tokenizer: Any, tmp_path: Path) -> None:
    PocketVLMConfig().save_pretrained(tmp_path)
    PocketVLMProcessor(tokenizer, num_frames=9, context=1000).save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is PocketVLMProcessor
    assert (loaded.num_frames, loaded.context, loaded.chat_template) == (9, 1000, prompt.CHAT_TEMPLATE)
    assert loaded.decode(loaded(text=TEXT, videos=np.zeros((1, 4, 4, 3), np.uint8))["input_ids"][0]).endswith("assistant\n")


@settings(max_examples=15)
@given(words=st.integers(0, 3000), context=st.integers(200, 8192))
def test_the_number_of_frames_that_is_said_to_fit_does_fit(tokenizer: Any, words: int, context: int) -> None:
    processor = PocketVLMProcessor(tokenizer, frame_size=2, context=context)
    text = prompt.VIDEO + " word" * words
    used = words + 32
    limit = max(context - used, 0) // 64
    said = f"{limit + 1} frames are {64 * (limit + 1):,} visual tokens; beside {words:,} tokens of text and room for an answer, "
    said += f"the context of {context:,} tokens holds {limit} frames: "
    said += f"pass num_frames={limit} or less" if limit else "shorten the text"
    with pytest.raises(ParameterError) as caught:
        processor(text=text, videos=clip(limit + 1), num_frames=200)
    assert str(caught.value) == said
    if limit:
        assert processor(text=text, videos=clip(limit), num_frames=200)["input_ids"].shape[1] == 64 * limit + words


def test_several_videos_share_the_context(processor: PocketVLMProcessor) -> None:
    with pytest.raises(ParameterError, match=r"160 frames .* holds 127 frames: pass num_frames=63 or less"):
        processor(text=prompt.VIDEO * 2, videos=[clip(80), clip(80)], num_frames=100)
    assert processor(text=prompt.VIDEO * 2, videos=[clip(80), clip(80)], num_frames=63)["input_ids"].shape == (1, 2 * 63 * 64)


def test_frames_of_a_long_file_are_not_read_in_vain(tokenizer: Any) -> None:
    said = r"250 frames are 16,000 visual tokens; .* the context of 400 tokens holds 5 frames: pass num_frames=5 or less"
    with pytest.raises(ParameterError, match=said):
        PocketVLMProcessor(tokenizer, context=400)(text=TEXT, videos=clip_path("bikes"), num_frames=1000)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"text": TEXT}, "the text has 1 <video> and 0 videos were given: write <video> once for each video"),
        ({"text": ASK, "videos": clip(2)}, "the text has 0 <video> and 1 videos were given"),
        ({"text": TEXT + "what is a <video> in HTML?", "videos": clip(2)}, "the text has 2 <video> and 1 videos were given"),
        ({"text": TEXT + "<reponame>", "videos": clip(2)}, "the text contains <reponame>, which stands for visual tokens here"),
        ({"text": [TEXT, TEXT], "videos": [clip(2), clip(3)]}, "equally many frames, these have 2, 3; pass num_frames=2"),
        ({"text": TEXT, "videos": clip(2), "num_frame": 2}, "unknown arguments num_frame; known: text, videos, num_frames"),
        ({"text": TEXT, "videos": clip(2), "num_frames": 0}, "num_frames = 0 is refused: it must be at least 1"),
        ({"text": TEXT, "videos": 3}, "frames must be uint8 RGB"),
        ({"text": TEXT, "videos": "none.mp4"}, r"none\.mp4: no such file"),
        ({"videos": clip(2)}, "text = None is refused: give a prompt, with <video> where the video goes"),
    ],
)
def test_calls_that_cannot_be(processor: PocketVLMProcessor, call: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        processor(**call)


def test_pictures_and_sound_are_refused(processor: PocketVLMProcessor) -> None:
    for name in ("images", "audio"):
        with pytest.raises(UnsupportedError, match="reads text and videos; for a picture give a video of one frame"):
            processor(text="a", **{name: [1]})
