"""Keys without their rotary positions: whatever the positions were, and whatever is done to the cache."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, Qwen2VLConfig

from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache, cache_argument, watch_rotary
from wqlab.hf.intercept import intercept_attention
from wqlab.hf.kv_codebooks import sample_kv
from wqlab.hf.rotary import rotate, unrotate

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip


def llama(**rope):
    torch.manual_seed(0)
    parameters = {"rope_theta": 10000.0, "rope_type": "default", **rope}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters)).eval()


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def prompt():
    ids = torch.randint(3, 300, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0  # padded on the left, so the rows have other positions
    return {"input_ids": ids, "attention_mask": mask}


def held_keys(model, inputs):
    """Keys before the rotary positions, by the model's own projection."""
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(inputs["input_ids"]))
    return layer.self_attn.k_proj(hidden).unflatten(-1, (2, 16)).transpose(1, 2)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_full_precision_cache_answers_like_the_model(model, prompt, beams):
    cache = QuantizedKVCache(policy="full", rotary=watch_rotary(model))
    ours = model.generate(**prompt, **GREEDY, num_beams=beams, **cache_argument(model, cache))
    assert torch.equal(ours, model.generate(**prompt, **GREEDY, num_beams=beams))
    held = cache.layers[0].segments.key
    torch.testing.assert_close(held.tail[::beams, :, 9:70], held_keys(model, prompt)[:, :, 9:], atol=1e-5, rtol=1e-4)
    assert held.positions.dtype == torch.int32
    if beams == 1:  # the last choice of beams is each layer's own; the next pass would join them again
        assert held.positions is cache.layers[1].segments.key.positions, "layers share their positions"
        assert cache.nbytes() == 2 * 2 * held.tail.nbytes + held.positions.nbytes


def test_what_is_held_is_the_projection_itself(model, prompt):
    samples = sample_kv(model, "before", input_ids=prompt["input_ids"])
    torch.testing.assert_close(samples[0].key, held_keys(model, prompt), atol=1e-5, rtol=1e-5)


def test_scaled_frequencies_are_undone_too(prompt):
    model = llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=256)
    assert model.model.rotary_emb.attention_scaling != 1
    samples = sample_kv(model, "before", input_ids=prompt["input_ids"])
    torch.testing.assert_close(samples[0].key, held_keys(model, prompt), atol=1e-5, rtol=1e-5)


def test_crop_and_rows_keep_positions_with_their_keys(model, prompt):
    cache = QuantizedKVCache(num_bits=8, rotary=watch_rotary(model))
    with torch.no_grad():
        model(**prompt, use_cache=True, **cache_argument(model, cache))
        before = cache.layers[1].segments.key.dequantize()
        cache.crop(-5)
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        after = cache.layers[1].segments.key.dequantize()
        torch.testing.assert_close(after, before[[1, 1, 0, 0], :, :65], atol=1e-6, rtol=0)
        model(prompt["input_ids"][:, :3].repeat(2, 1), use_cache=True, **cache_argument(model, cache))
    assert cache.get_seq_length() == 68
    assert cache.layers[0].segments.key.positions is cache.layers[1].segments.key.positions
    cache.reset()
    assert cache.nbytes() == 0


def test_encoding_without_positions_is_encoding_the_projection(model, prompt):
    """The quantizer sees keys before the rotary positions: decoded, rotated keys equal those of the twin."""
    cache = QuantizedKVCache(num_bits=2, rotary=watch_rotary(model))
    with torch.no_grad():
        model(input_ids=prompt["input_ids"], use_cache=True, **cache_argument(model, cache))
    quantizer = cache.layers[0].segments.key.quantizer
    plain = quantizer.dequantize(quantizer.quantize(held_keys(model, prompt)[:, :, :64]))
    cos, sin = model.model.rotary_emb(plain, torch.arange(64).unsqueeze(0))
    want = rotate(plain, cos.unsqueeze(1), sin.unsqueeze(1))
    torch.testing.assert_close(cache.layers[0].segments.key.dequantize()[:, :, :64], want, atol=1e-4, rtol=1e-4)


def test_three_axes_of_positions(prompt):
    """M-RoPE: whatever three positions a token has, they are undone."""
    torch.manual_seed(0)
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 1},
        image_token_id=290, video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config).eval()
    ids = prompt["input_ids"]
    positions = torch.randint(0, 50, (3, 2, 70), generator=torch.Generator().manual_seed(2))
    seen = {}
    with torch.no_grad(), intercept_attention(model, lambda layer, q, k, v, m: (seen.setdefault(layer, k), v, m)):
        full = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    cache = QuantizedKVCache(policy="full", rotary=watch_rotary(model))
    with torch.no_grad():
        model(input_ids=ids[:, :40], position_ids=positions[..., :40], use_cache=True, **cache_argument(model, cache))
        behind = model(
            input_ids=ids[:, 40:], position_ids=positions[..., 40:], use_cache=True, **cache_argument(model, cache)
        ).logits
    torch.testing.assert_close(behind, full[:, 40:], atol=1e-5, rtol=1e-4)
    held = cache.layers[0].segments.key
    assert held.positions.shape == (2, 70, 3)
    layer = model.get_decoder().layers[0]
    hidden = layer.input_layernorm(model.get_input_embeddings()(ids))
    want = layer.self_attn.k_proj(hidden).unflatten(-1, (2, 16)).transpose(1, 2)
    torch.testing.assert_close(held.tail, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(held.dequantize(), seen[0], atol=1e-5, rtol=1e-4)


def test_partial_rotation_leaves_the_rest():
    key, angle = torch.randn(1, 2, 5, 12), torch.randn(1, 1, 5, 4)
    angle = torch.cat([angle, angle], dim=-1)
    turned = rotate(key, angle.cos(), angle.sin())
    assert torch.equal(turned[..., 8:], key[..., 8:])
    torch.testing.assert_close(unrotate(turned, angle.cos(), angle.sin()), key)
    torch.testing.assert_close(turned.norm(dim=-1), key.norm(dim=-1))


def test_positions_can_be_said(model):
    key = torch.randn(1, 2, 8, 16)
    cache = QuantizedKVCache(policy="full", rotary=watch_rotary(model))
    cache.assume_positions(torch.arange(8).unsqueeze(0))
    cache.update(key, key, 0)
    torch.testing.assert_close(cache.layers[0].segments.key.dequantize(), key)
    with pytest.raises(UnsupportedError, match=r"5 tokens of 1 rows .* positions of 8 tokens"):
        cache.update(key[:, :, :5], key[:, :, :5], 0)


def test_a_watch_is_one_per_model_and_can_be_removed():
    model = llama()
    watch = watch_rotary(model)
    assert watch_rotary(model) is watch
    watch.remove()
    assert not model.model.rotary_emb._forward_hooks
    assert watch_rotary(model) is not watch


def test_models_that_cannot_be_watched_are_named(model, monkeypatch):
    dynamic = llama(rope_type="dynamic", factor=2.0)
    with pytest.raises(UnsupportedError, match="'dynamic' changes its frequencies"):
        watch_rotary(dynamic)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    fresh = llama()
    with pytest.raises(UnsupportedError, match="in another way than by halves"):
        watch_rotary(fresh)
    assert not fresh.model.rotary_emb._forward_hooks
    monkeypatch.setattr(fresh.model, "rotary_emb", None)
    with pytest.raises(UnsupportedError, match="has no rotary_emb"):
        watch_rotary(fresh)


def test_codebooks_and_caches_must_agree(model):
    from wqlab.quantizers.codebooks import KVCodebooks

    entries, counts = torch.zeros(2, 2, 4, 8, 4).half(), torch.zeros(2, 2, 4, 8, dtype=torch.int64)
    before, after = (KVCodebooks(entries, entries, counts, counts, rotary) for rotary in ("before", "after"))
    with pytest.raises(ParameterError, match=r"keys before the rotary positions: pass rotary=watch_rotary"):
        QuantizedKVCache("cq", 2, method_options={"codebooks": before})
    with pytest.raises(ParameterError, match="keys after the rotary positions: leave rotary out"):
        QuantizedKVCache("cq", 2, method_options={"codebooks": after}, rotary=watch_rotary(model))
