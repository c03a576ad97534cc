"""Shared by all tests: no network for the hub, few threads, and a tiny random model of a real class."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Also for the kernels and commands that tests start: processes side by side, of two threads each, wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

import matplotlib
import pytest
import torch
from hypothesis import settings

# Not through the environment: kernels that tests start must keep their inline backend.
matplotlib.use("agg")
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
# Deadlines are timed assertions in disguise: on a busy machine they fail for no reason.
settings.register_profile("wqlab", deadline=None)
settings.load_profile("wqlab")


@pytest.fixture
def tiny_llama():
    """A random two-layer Llama with grouped queries; for shapes and paths, never for results."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
