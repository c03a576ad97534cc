"""The benches of vector quantization on models of random weights: every row is what doing it by hand gives."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab import models
from wqlab.bench import get, vq_caches, vq_ways, vq_weights
from wqlab.evals.perplexity import perplexity
from wqlab.evals.scoring import Setting, score_settings
from wqlab.hf import QuantizedKVCache, collect_stats, learn_codebooks, quantize_linears, watch_rotary
from wqlab.models import pocket

SIZE = vq_ways.Size(2, 96, 3, 8)
CQ = vq_ways.CacheWay("cq", 2, rotary="before")
CACHES = (
    vq_ways.CacheWay("rtn", 4),
    vq_ways.CacheWay("kivi", 2, "kivi"),
    CQ,
    vq_ways.CacheWay("cq", 4, rotary="after", fisher=True),
)
WEIGHTS = (vq_ways.Weights("rtn_weight", {"num_bits": 4}), vq_ways.PAIR[0])


@pytest.fixture
def small(monkeypatch, tmp_path, loaded):
    """Both benches at a size of seconds, with a tiny Llama in SmolLM2's place and the tiny pocket VLM in its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    text = torch.randint(3, 200, (1, 400), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(models, "load", lambda name: SimpleNamespace(model=model, tokenizer=None))
    # By its module: the package has a function of the same name.
    monkeypatch.setattr(
        importlib.import_module("wqlab.models.prose"), "prose", lambda tokenizer, n, skip=0: (text[:, skip : skip + n], None)
    )
    monkeypatch.setattr(pocket, "load", lambda **options: loaded)
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path))
    for bench in (vq_weights, vq_caches):
        monkeypatch.setattr(bench, "ON_CPU", SIZE)
    monkeypatch.setattr(vq_caches, "CACHES", CACHES)
    monkeypatch.setattr(vq_weights, "WEIGHTS", WEIGHTS)
    return model, *(text[:, start : start + 192].reshape(2, 96) for start in (0, 192))


def mean(table, metric, **which):
    for column, value in which.items():
        table = table[table[column] == value]
    (row,) = table[table["metric"] == metric].to_dict("records")
    return row


def test_caches(small, loaded):
    model, taught, judged = small
    table = get("vq_caches").measure()
    assert tuple(table.columns) == tuple(vq_ways.COLUMNS)
    assert set(table["setting"]) == {"fp16", *(way.label for way in CACHES)}
    full = perplexity(model, judged, lambda: QuantizedKVCache(policy="full"), chunk=96).nll.double().mean(1)
    assert mean(table, "nll", setting="fp16")["value"] == pytest.approx(float(full.mean()))
    books = learn_codebooks(model, 2, "before", input_ids=taught)
    options = {"method_options": {"codebooks": books}, "rotary": watch_rotary(model), "storage_dtype": torch.float16}
    own = perplexity(model, judged, lambda: QuantizedKVCache("cq", 2, **options)).nll.double().mean(1)
    row = mean(table, "nll_difference", setting=CQ.label, exam="prose")
    assert row["value"] == pytest.approx(float((own - full).mean()), rel=1e-6)
    assert row["codebook_bytes"] == books.nbytes()
    assert row["n"] == 2
    assert row["learn_s"] >= 0
    assert row["low"] <= row["value"] <= row["high"]
    assert set(table[table["setting"] == CACHES[3].label]["exam"]) == {"prose"}, "no Fisher weights of videos"
    assert set(table[table["setting"] == CACHES[1].label]["exam"]) == {"prose"}, "own policies are over all tokens"
    asked = score_settings(loaded, [Setting("rtn", 4)], split="hard", seed=vq_ways.SEED, limit=3, num_frames=8)
    mine = asked[asked["setting"] != "fp16"]
    for metric in ("accuracy", "kl"):
        found = mean(table, metric, setting=CACHES[0].label, exam="pocketbench hard")
        assert found["value"] == pytest.approx(mine[metric].mean(), abs=1e-9)
    assert found["total_bits"] == pytest.approx(mine["bits_per_element"].mean())


def test_weights_and_the_pair(small, monkeypatch):
    model, taught, judged = small
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    table = get("vq_weights").measure()
    assert set(table["part"]) == {"weights", "both"}
    stats = collect_stats(model, [{"input_ids": row.unsqueeze(0)} for row in taught])
    full = perplexity(model, judged, lambda: QuantizedKVCache(policy="full"), chunk=96).nll.double().mean(1)
    with quantize_linears(model, "quip", stats) as bits:
        own = perplexity(model, judged, lambda: QuantizedKVCache(policy="full"), chunk=96).nll.double().mean(1)
    row = mean(table, "nll_difference", setting="quip", exam="prose", part="weights")
    assert row["value"] == pytest.approx(float((own - full).mean()), abs=1e-6)
    one = next(iter(bits.values()))
    assert one["codebooks"] > 0
    assert row["total_bits"] > row["code_bits"] == 4
    assert row["codebook_bits"] == pytest.approx(
        sum(layer["codebooks"] * layer["weights"] for layer in bits.values()) / sum(layer["weights"] for layer in bits.values())
    )
    both = mean(table, "nll_difference", part="both", exam="prose")
    assert both["value"] != row["value"]
    assert both["codebook_bytes"] > 0
    for metric in ("accuracy", "accuracy_difference", "kl", "flip_rate"):
        assert np.isfinite(mean(table, metric, part="both", exam="pocketbench easy")["value"])
    assert mean(table, "kl", part="weights", setting="quip", exam="pocketbench hard")["value"] > 0
    errors = table[table["metric"] == "output_error"].set_index("setting")["value"]
    assert 0 < errors["quip"] < errors["rtn_weight 4 bits"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "the model has its own weights again"
    monkeypatch.setattr(vq_weights, "ON_CPU", vq_ways.Size(2, 96, 0))
    again = get("vq_weights").measure()
    assert again["learn_s"].isna().all(), "encoded layers were kept"
    kept = table[(table["part"] == "weights") & table["exam"].isin(["prose", "layers"])]
    np.testing.assert_allclose(again["value"], kept["value"], rtol=1e-5, atol=1e-7)


def test_without_a_gpu_prose_alone_is_read(small, monkeypatch):
    for bench in (vq_weights, vq_caches):
        monkeypatch.setattr(bench, "ON_CPU", vq_ways.Size(2, 96, 0))
    assert set(get("vq_caches").measure()["exam"]) == {"prose"}
    assert set(get("vq_weights").measure()["exam"]) == {"prose", "layers"}
