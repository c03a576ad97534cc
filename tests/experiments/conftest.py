"""A pocket VLM of random weights in place of the trained one, and videos that cost nothing to draw."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from wqlab import models
from wqlab.evals import pocketbench
from wqlab.experiments import (
    alpha_sweep,
    attention_sinks,
    layer_similarity,
    reorder_equivalence,
    similarity_heatmap,
    video_windows,
)
from wqlab.models.pocket.configuration import PocketVLMConfig
from wqlab.models.pocket.modeling import PocketVLMForConditionalGeneration
from wqlab.types import Input


def forget():
    """Empty what the experiments keep of a model."""
    kept = [attention_sinks._watch, layer_similarity._watch, similarity_heatmap._statistics, reorder_equivalence._watch]
    kept += [alpha_sweep._watch, alpha_sweep._scores, alpha_sweep._sweep, alpha_sweep._video_values]
    for function in [*kept, video_windows.vlm, video_windows.embed, video_windows._read, video_windows.watch]:
        function.cache_clear()


def tokenizer(text, add_special_tokens=True):
    """One token per byte."""
    return {"input_ids": list(text.encode())}


@pytest.fixture
def tiny_vlm(monkeypatch):
    """What `wqlab.models.load("pocket-vlm")` then gives; `loads` counts how often it was asked."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = PocketVLMForConditionalGeneration(PocketVLMConfig(text_config=text, projector_hidden_size=32)).eval()
    gaze = torch.randn(3, 48)
    monkeypatch.setattr(model, "get_video_features", lambda frames: (frames.flatten(3).mT.flatten(1, 2) / 128 - 1) @ gaze)

    def draw(items, device="cpu"):
        shape = items[0].num_frames, 3, 8, 8
        return torch.stack([torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(i.index)) for i in items])

    monkeypatch.setattr(pocketbench, "draw", draw)
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, note="random eyes", inputs=[Input("tiny", "0" * 64)], loads=0)
    real = models.load

    def load(name="smollm2", *args, **kwargs):
        if name != "pocket-vlm":
            return real(name, *args, **kwargs)
        loaded.loads += 1
        return loaded

    monkeypatch.setattr(models, "load", load)
    forget()
    yield loaded
    forget()
