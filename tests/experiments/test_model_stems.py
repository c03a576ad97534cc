"""layer_similarity and attention_sinks on any transformers model: a folder with a tiny random one, for paths and arithmetic."""

import numpy as np
import pytest
import torch

import wqlab
from wqlab.errors import ParameterError
from wqlab.experiments.attention_sinks import _edges
from wqlab.models.smollm2 import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny-qwen2")
    config = Qwen2Config(
        vocab_size=49152, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(build()).save_pretrained(path)
    return str(path)


def test_layer_similarity_takes_a_folder(folder):
    result = wqlab.run("layer_similarity", model=folder, num_tokens=128)
    assert result.data["layer"].tolist() == [0, 1, 2]
    assert result.data[["s_i_residual", "s_i_attention"]].abs().max().max() <= 1
    assert result.data["s_i"].equals(result.data["s_i_residual"])
    assert (
        wqlab.run("layer_similarity", model=folder, num_tokens=128, after="attention")
        .data["s_i"]
        .equals(result.data["s_i_attention"])
    )
    assert any("tiny-qwen2" in i.name for i in result.inputs)
    assert result.evidence["s_i"].kind == "measured"


def test_attention_sinks_takes_a_folder_and_its_masses_add_up(folder):
    result = wqlab.run("attention_sinks", model=folder, num_tokens=256)
    per_head = result.data.groupby(["layer", "head"])["mass"].sum()
    assert len(per_head) == 3 * 6
    assert ((per_head > 0) & (per_head < 1)).all()  # the rest goes to the second half of the prompt
    np.testing.assert_allclose(
        result.data["mass_per_key"] * (result.data["key_end"] - result.data["key_start"]), result.data["mass"], rtol=1e-12
    )
    # A random model has no sink: every key of the first half gets about the same weight.
    assert result.values["first_window_mass_ratio"].value == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("num_keys", [64, 100, 2048])
def test_groups_cover_the_keys_and_one_border_is_the_window(num_keys):
    edges = _edges(num_keys)
    assert edges[0] == 0
    assert edges[-1] == num_keys
    assert 32 in edges
    assert edges == sorted(set(edges))


def test_more_prose_than_there_is_says_how_much_there_is(folder):
    from wqlab.models import load, prose

    with pytest.raises(ParameterError, match=r"\d+ tokens"):
        prose(load(folder).tokenizer, 10_000_000)
