"""Random decoders: the shape is the one asked for, and fewer kernels give the same logits."""

import pytest
import torch

from wqlab.models.random_decoder import fused, qwen2


@pytest.fixture(scope="module")
def model():
    return qwen2(2, 64, 96, 4, 2, 101, device=torch.device("cpu"), dtype=torch.float32)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_weights_are_finite_and_of_the_shape(model):
    assert model.config.num_key_value_heads == 2
    assert model.lm_head.weight.shape == (101, 64)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.model.rotary_emb.inv_freq.device.type == "cpu"


def test_fused_layers_compute_the_same(model):
    ids = torch.randint(0, 101, (3, 7), generator=torch.Generator().manual_seed(0))
    want = logits(model, ids)
    assert want.std() > 0.01
    with fused(model, compiled=False):
        torch.testing.assert_close(logits(model, ids), want, rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert torch.equal(logits(model, ids), want)


@pytest.mark.slow
def test_compiled_layers_compute_the_same(model):
    ids = torch.randint(0, 101, (3, 7), generator=torch.Generator().manual_seed(0))
    want = logits(model, ids)
    with fused(model):
        torch.testing.assert_close(logits(model, ids), want, rtol=1e-4, atol=1e-5)
