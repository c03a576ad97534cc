"""Codebooks learnt from a model: what is sampled, what is kept, and what the real SmolLM2's keys say."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.hf import QuantizedKVCache, cache_argument, kv_codebooks, learn_codebooks, watch_rotary
from wqlab.hf.kv_codebooks import sample_kv
from wqlab.hf.rotary import rotate
from wqlab.quantizers import create
from wqlab.quantizers.codebooks import KVCodebooks


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def text():
    return torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rotary", ["before", "after"])
def test_fisher_weights_are_squared_gradients(model, text, rotary):
    """Against finite differences of the loss, one number of a key and one of a value moved at a time."""
    samples = sample_kv(model, rotary, fisher=True, input_ids=text[:1, :12])
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks
    layer, head, token, channel, step = 1, 1, 4, 3, 1e-2
    for role, weights in (("key", samples[layer].key_weights), ("value", samples[layer].value_weights)):
        moved = [loss_with(model, text[:1, :12], role, rotary, (layer, head, token, channel), sign * step) for sign in (1, -1)]
        gradient = (moved[0] - moved[1]) / (2 * step)
        assert float(weights[0, head, token, channel]) == pytest.approx(gradient**2, rel=0.02, abs=1e-9)


def loss_with(model, text, role, rotary, at, step):
    """The summed loss in float64 with one key (before or behind its positions) or value moved."""
    layer, head, token, channel = at
    model = model.double()
    module = model.model.layers[layer].self_attn
    projection = module.k_proj if role == "key" else module.v_proj

    def move(linear, args, output):
        output[0, token, head * 8 + channel] += step
        return output

    try:
        if role == "key" and rotary == "after":
            from wqlab.hf.intercept import intercept_attention

            def change(number, query, key, value, mask):
                if number == layer:
                    key = key.clone()
                    key[0, head, token, channel] += step
                return key, value, mask

            with torch.no_grad(), intercept_attention(model, change):
                logits = model(text, use_cache=False).logits
        else:
            handle = projection.register_forward_hook(move)
            with torch.no_grad():
                logits = model(text, use_cache=False).logits
            handle.remove()
    finally:
        model.float()
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], text[0, 1:], reduction="sum"))


@pytest.mark.parametrize(("num_bits", "rotary", "fisher"), [(2, "before", False), (4, "after", True)])
def test_learnt_codebooks_serve_a_generation(model, text, num_bits, rotary, fisher):
    books = learn_codebooks(model, num_bits, rotary, fisher, num_entries=32, input_ids=text)
    assert (books.num_layers, str(books.spec)) == (2, f"VQ<{8 // num_bits},32,1>")
    assert (books.key_counts.diff(dim=-1) <= 0).all(), "most frequent first"
    watch = watch_rotary(model) if rotary == "before" else None
    cache = QuantizedKVCache("cq", num_bits, method_options={"codebooks": books}, rotary=watch)
    out = model.generate(text[:, :40], do_sample=False, max_new_tokens=8, eos_token_id=None, **cache_argument(model, cache))
    assert out.shape == (2, 48)
    assert cache.report()["tokens_per_width"][num_bits] == 2 * 2 * 32


def test_an_interrupted_run_goes_on(model, text, tmp_path, monkeypatch, caplog):
    path = tmp_path / "books.safetensors"
    options = {"num_bits": 4, "num_entries": 8, "input_ids": text}
    want = learn_codebooks(model, **options)
    real, learnt = kv_codebooks.codebooks.learn, []

    def learn(*args):
        if len(learnt) == 2:  # the first layer's keys and values are done
            raise KeyboardInterrupt
        learnt.append(1)
        return real(*args)

    monkeypatch.setattr(kv_codebooks.codebooks, "learn", learn)
    with pytest.raises(KeyboardInterrupt):
        learn_codebooks(model, path=path, **options)
    assert not path.exists()
    assert [p.name for p in (tmp_path / "books.safetensors.layers").iterdir()] == ["000.safetensors"]
    learnt.clear()
    found = learn_codebooks(model, path=path, **options)
    assert len(learnt) == 2, "the first layer was read"
    assert torch.equal(found.key, want.key)
    assert torch.equal(found.value_counts, want.value_counts)
    assert [p.name for p in tmp_path.iterdir()] == ["books.safetensors"]
    monkeypatch.setattr(kv_codebooks.codebooks, "learn", lambda *args: pytest.fail("it learnt again"))
    assert torch.equal(learn_codebooks(model, path=path, **options).key, want.key)
    with pytest.raises(ParameterError, match=r"was learnt from something else: .*seed 0; asked for: .*seed 1; name another path"):
        learn_codebooks(model, path=path, seed=1, **options)


def test_a_damaged_layer_is_set_aside(model, text, tmp_path, caplog):
    path = tmp_path / "books.safetensors"
    folder = tmp_path / "books.safetensors.layers"
    folder.mkdir()
    (folder / "001.safetensors").write_bytes(b"no tensors")
    with caplog.at_level(logging.WARNING):
        learn_codebooks(model, num_bits=4, num_entries=8, path=path, input_ids=text)
    assert "kept as 001.safetensors.damaged" in caplog.text
    assert [p.name for p in folder.iterdir()] == ["001.safetensors.damaged"]
    KVCodebooks.load(path)


def test_bad_input_is_named(model, text):
    with pytest.raises(ParameterError, match="num_bits = 3 is not one of 2, 4"):
        learn_codebooks(model, 3, input_ids=text)
    with pytest.raises(ParameterError, match="needs input_ids or inputs_embeds; it got nothing"):
        learn_codebooks(model, 4)
    embeddings = model.get_input_embeddings()(text).detach()
    with pytest.raises(ParameterError, match="fisher = True needs input_ids"):
        learn_codebooks(model, 4, fisher=True, inputs_embeds=embeddings)
    with pytest.raises(NonFiniteError, match="calibration: layer 0: key is not finite"):
        learn_codebooks(model, 4, inputs_embeds=embeddings.index_fill(1, torch.tensor([5]), torch.nan))


@pytest.fixture(scope="module")
def real():
    from wqlab.models import load
    from wqlab.models.prose import prose

    torch.set_num_threads(1)
    loaded = load("smollm2")
    before = [
        sample_kv(loaded.model, "before", input_ids=prose(loaded.tokenizer, n, skip)[0]) for n, skip in ((1024, 0), (256, 4096))
    ]
    watch, after = watch_rotary(loaded.model), []
    for samples in before:
        positions = torch.arange(samples[0].key.shape[2], dtype=torch.int32).unsqueeze(0)
        angles = watch.angles(positions, torch.float32)
        after.append([replace(layer, key=rotate(layer.key, *angles)) for layer in samples])
    return {"before": before, "after": after}


@pytest.mark.parametrize("num_bits", [2, 4])
def test_on_real_keys_cq_is_below_round_to_nearest(real, num_bits):
    """Held-out prose, one head of layers over the whole depth; RTN per channel over windows of 256: 0.125 bits for scales."""
    lost = {keys: [] for keys in (*real, "rtn")}
    for layer in (1, 14, 28):
        for keys, (learning, held_out) in real.items():
            entries, counts = kv_codebooks.codebooks.learn(learning[layer].key[:, :1], 8 // num_bits)
            books = KVCodebooks(*[entries[None]] * 2, *[counts[None]] * 2, keys)
            lost[keys].append(error(create("cq", num_bits, codebooks=books), held_out[layer].key[:, :1]))
        lost["rtn"].append(error(create("rtn", num_bits, 256), real["after"][1][layer].key[:, :1]))
    mean = {way: sum(values) / len(values) for way, values in lost.items()}
    assert mean["before"] < mean["after"], "keys lie on fewer directions before the rotary positions"
    assert mean["before"] < mean["rtn"]


def error(quantizer, x):
    return float((quantizer.dequantize(quantizer.quantize(x)) - x).square().sum() / x.square().sum())
