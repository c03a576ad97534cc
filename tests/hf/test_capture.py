import itertools

import pytest
import torch

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.hf.capture import capture_attention, capture_importance, decoder_layers


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 64), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_importance_equals_hidden_states_recomputed_by_hand(tiny_llama, ids):
    with capture_importance(tiny_llama) as meters:
        states = tiny_llama.base_model(ids, output_hidden_states=True).hidden_states
    base = tiny_llama.base_model
    positions = torch.arange(ids.shape[1])[None]
    rotary = base.rotary_emb(states[0], positions)
    causal = torch.full((64, 64), float("-inf")).triu(1)[None, None]
    for index, layer in enumerate(base.layers):
        h = states[index]
        a, _ = layer.self_attn(layer.input_layernorm(h), position_embeddings=rotary, attention_mask=causal)
        cosine = torch.nn.functional.cosine_similarity
        assert meters[index].after_residual.value() == pytest.approx(cosine(h, h + a, dim=-1).mean().item(), abs=1e-5)
        assert meters[index].attention_output.value() == pytest.approx(cosine(h, a, dim=-1).mean().item(), abs=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("query_block", [1, 7, 256])
def test_attention_equals_eager_maps(tiny_llama, ids, query_block):
    edges = [0, 1, 4, 32]
    with capture_attention(tiny_llama, edges, query_block) as statistics:
        captured = tiny_llama.base_model(ids).last_hidden_state
    tiny_llama.set_attn_implementation("eager")
    eager = tiny_llama.base_model(ids, output_attentions=True)
    torch.testing.assert_close(captured, eager.last_hidden_state, rtol=1e-4, atol=1e-5)
    for layer, maps in enumerate(eager.attentions):
        rows = maps[0, :, 32:].double()
        want = torch.stack([rows[:, :, a:b].sum(-1).mean(1) for a, b in itertools.pairwise(edges)], dim=1)
        torch.testing.assert_close(statistics.mass[layer], want, rtol=1e-5, atol=1e-7)


@torch.inference_mode()
def test_logits_before_softmax_explain_the_mass(tiny_llama, ids):
    """One key per group and one query: the ratio of masses is the exponential of the difference of logits."""
    with capture_attention(tiny_llama, [0, 1, 2, 63]) as statistics:
        tiny_llama.base_model(ids)
    for layer in statistics.mass:
        logit, mass = statistics.logit[layer], statistics.mass[layer]
        torch.testing.assert_close((logit[:, 0] - logit[:, 1]).exp(), mass[:, 0] / mass[:, 1], rtol=1e-4, atol=1e-6)


def test_the_models_own_attention_comes_back(tiny_llama, ids):
    before = tiny_llama.config._attn_implementation
    with pytest.raises(RuntimeError, match="on purpose"), capture_attention(tiny_llama, [0, 8]):
        raise RuntimeError("on purpose")
    assert tiny_llama.config._attn_implementation == before
    with pytest.raises(RuntimeError, match="on purpose"), capture_importance(tiny_llama):
        raise RuntimeError("on purpose")
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(tiny_llama))


@pytest.mark.parametrize("edges", [[], [0], [1, 4], [0, 4, 4], [0, 9, 3]])
def test_refuses_edges(tiny_llama, edges):
    with pytest.raises(ParameterError, match="edges"), capture_attention(tiny_llama, edges):
        pass


@torch.inference_mode()
def test_refuses_a_prompt_no_longer_than_the_keys(tiny_llama, ids):
    with pytest.raises(ParameterError, match="more than 64 tokens"), capture_attention(tiny_llama, [0, 64]):
        tiny_llama.base_model(ids)


@torch.inference_mode()
def test_nan_weights_name_the_layer(tiny_llama, ids):
    tiny_llama.base_model.layers[1].self_attn.v_proj.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="layer 1"), capture_importance(tiny_llama):
        tiny_llama.base_model(ids)


def test_models_without_decoder_layers_are_refused():
    with pytest.raises(UnsupportedError, match="Linear has no decoder layers"):
        decoder_layers(torch.nn.Linear(2, 2))
