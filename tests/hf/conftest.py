"""A tiny random pocket VLM: shapes and paths, never results."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from wqlab.models import smollm2
from wqlab.models.pocket import PocketVLMConfig, PocketVLMForConditionalGeneration, PocketVLMProcessor


@pytest.fixture(scope="session")
def pocket_model():
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    return PocketVLMForConditionalGeneration(PocketVLMConfig(text_config=text, projector_hidden_size=8)).eval()


@pytest.fixture(scope="session")
def pocket_processor():
    return PocketVLMProcessor(AutoTokenizer.from_pretrained(smollm2.build()))
