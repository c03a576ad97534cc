"""A pocket VLM of random weights and videos that cost nothing to draw."""

import re
import zlib
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from wqlab.evals import pocketbench
from wqlab.models.pocket.configuration import PocketVLMConfig
from wqlab.models.pocket.modeling import PocketVLMForConditionalGeneration
from wqlab.types import Input

VOCABULARY, HIDDEN = 160, 48
SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2}


def tokenizer(text, add_special_tokens=True):
    """One id per word or mark; the special tokens have ids of their own."""
    assert not add_special_tokens
    words = re.findall(r"<\|\w+\|>|\w+|[^\w ]", text)
    return {"input_ids": [SPECIAL.get(word) or 3 + zlib.crc32(word.encode()) % (VOCABULARY - 3) for word in words]}


@pytest.fixture(scope="session")
def tiny_vlm():
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = PocketVLMForConditionalGeneration(PocketVLMConfig(text_config=text, projector_hidden_size=32)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and parameter.dim() > 1:
                parameter.mul_(6)  # attention that is far from uniform, so that K and V matter
    return model.requires_grad_(False)


@pytest.fixture
def loaded(tiny_vlm, monkeypatch):
    """What `pocket.load` returns, for random weights; a video is noise that depends on its item alone, and is seen at a glance."""

    def draw(items, device="cpu"):
        shape = items[0].num_frames, 3, 8, 8
        frames = [torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(item.index)) for item in items]
        return torch.stack(frames).to(torch.uint8).to(device)

    def see(frames):
        gaze = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
        return (frames.flatten(3).transpose(2, 3).flatten(1, 2) / 128 - 1) @ gaze.to(frames.device)

    monkeypatch.setattr(pocketbench, "draw", draw)
    monkeypatch.setattr(tiny_vlm, "get_video_features", see)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operations this small only wait for a second thread
    weights = [Input("tiny/model.safetensors", "0" * 64)]
    yield SimpleNamespace(model=tiny_vlm, tokenizer=tokenizer, note="random weights, for tests", inputs=weights)
    torch.set_num_threads(threads)
