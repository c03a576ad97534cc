"""layer_similarity and attention_sinks on any transformers model and on video: tiny random ones, for paths and arithmetic."""

import numpy as np
import pytest
import torch

import wqlab
from wqlab import experiments, figures
from wqlab.errors import MissingPartError, ParameterError
from wqlab.evals import pocketbench
from wqlab.experiments import attention_sinks, layer_similarity, video_prompts
from wqlab.experiments.attention_sinks import _edges
from wqlab.hf.capture import capture_importance
from wqlab.models import shipped
from wqlab.models.pocket import prompt
from wqlab.models.smollm2 import build

VIDEO = {"video": "hard", "num_frames": 8, "num_videos": 2}
STEMS = ("layer_similarity", "attention_sinks")


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
    result = wqlab.run("layer_similarity", model=folder, num_tokens=128, video="none")
    assert result.data["layer"].tolist() == [0, 1, 2]
    assert result.data[["s_i_residual", "s_i_attention"]].abs().max().max() <= 1
    assert result.data["s_i"].equals(result.data["s_i_residual"])
    assert (
        wqlab.run("layer_similarity", model=folder, num_tokens=128, after="attention", video="none")
        .data["s_i"]
        .equals(result.data["s_i_attention"])
    )
    assert any("tiny-qwen2" in i.name for i in result.inputs)
    assert result.evidence["s_i"].kind == "measured"


def test_attention_sinks_takes_a_folder_and_its_masses_add_up(folder):
    result = wqlab.run("attention_sinks", model=folder, num_tokens=256, video="none")
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


def test_a_prompt_is_the_training_format(tiny_vlm):
    (item,) = pocketbench.items("hard", 1000, 8, stop=1)
    (found,) = video_prompts.prompts(tiny_vlm, "hard", 1000, 8, 1)
    question = item.questions[0]
    embed, text = tiny_vlm.model.get_input_embeddings(), prompt.question(question.text, question.options)
    assert (found.start, found.stop) == (len(prompt.PREFIX), len(prompt.PREFIX) + 8 * 64)
    assert torch.equal(found.embeddings[0, : found.start], embed(torch.tensor(list(prompt.PREFIX.encode()))))
    assert torch.equal(found.embeddings[0, found.stop :], embed(torch.tensor(list(text.encode()))))
    assert torch.equal(found.embeddings[:, found.start : found.stop], tiny_vlm.model.get_video_features(pocketbench.draw([item])))


@torch.inference_mode()
def test_layer_similarity_adds_the_pocket_vlm_and_changes_nothing_else(folder, tiny_vlm):
    alone = wqlab.run("layer_similarity", model=folder, num_tokens=128, video="none")
    both = wqlab.run("layer_similarity", model=folder, num_tokens=128, **VIDEO)
    assert both.data[both.data["input"] == "prose"].equals(alone.data)
    assert {name: both.values[name] for name in alone.values} == alone.values
    video = both.data[both.data["input"] == "video"]
    assert video["model"].tolist() == ["pocket-vlm"] * 2
    with capture_importance(tiny_vlm.model) as meters:
        for one in video_prompts.prompts(tiny_vlm, "hard", 1000, 8, 2):
            tiny_vlm.model.base_model(inputs_embeds=one.embeddings)
    np.testing.assert_allclose(video["s_i_residual"], [m.after_residual.value() for m in meters], atol=1e-6)
    assert both.values["pocket_vlm_min_s_i"].value == video["s_i_residual"].min()
    assert both.values.keys() == alone.values.keys() | {f"pocket_vlm_{name}" for name in alone.values}
    assert "2 videos of 8 frames (512 visual tokens each; PocketBench hard, seed 1000)" in both.evidence["s_i"].source
    assert "random eyes" in both.notes
    assert [i.name for i in both.inputs if "PocketBench" in i.name] == [f"PocketBench {pocketbench.VERSION} generator"]
    assert len(figures.draw(both).axes) == 2 * len(figures.draw(alone).axes)


@torch.inference_mode()
def test_attention_to_video_is_the_questions(folder, tiny_vlm):
    alone = wqlab.run("attention_sinks", model=folder, num_tokens=256, video="none")
    both = wqlab.run("attention_sinks", model=folder, num_tokens=256, **VIDEO)
    assert both.data[both.data["input"] == "prose"].equals(alone.data)
    assert {name: both.values[name] for name in alone.values} == alone.values
    video = both.data[both.data["input"] == "video"]
    start = len(prompt.PREFIX)
    assert (video["key_start"].min(), video["key_end"].max()) == (-start, 8 * 64)
    assert video.groupby(["layer", "head"]).size().nunique() == 1
    # The twin: whole attention maps, rows of the question, columns of the first window.
    tiny_vlm.model.set_attn_implementation("eager")
    first, all_visual = [], []
    for one in video_prompts.prompts(tiny_vlm, "hard", 1000, 8, 2):
        maps = tiny_vlm.model.base_model(inputs_embeds=one.embeddings, output_attentions=True).attentions
        rows = torch.stack(maps)[:, 0, :, one.stop :, start : one.stop].double()  # [layers, heads, queries, keys]
        first.append(rows[..., :32].sum(-1).mean().item())
        all_visual.append(rows.sum(-1).mean().item())
    window, whole = np.mean(first), np.mean(all_visual)
    values = {name: value.value for name, value in both.values.items()}
    assert values["first_visual_window_mass"] == pytest.approx(window, rel=1e-4)
    assert values["visual_mass"] == pytest.approx(whole, rel=1e-4)
    assert values["first_visual_window_mass_ratio"] == pytest.approx((window / 32) / ((whole - window) / (512 - 32)), rel=1e-3)
    assert 0 <= values["first_visual_window_layers_above_rest"] <= 1
    assert len(figures.draw(both).axes) > len(figures.draw(alone).axes)


@pytest.mark.parametrize("stem", STEMS)
def test_what_was_watched_is_not_watched_again(stem, folder, tiny_vlm):
    other = {"layer_similarity": {"after": "attention"}, "attention_sinks": {"stage": "before_softmax"}}[stem]
    for given in ({}, other, {"num_tokens": 192}):
        wqlab.run(stem, **{"model": folder, "num_tokens": 128, **VIDEO, **given})
    assert tiny_vlm.loads == 1
    wqlab.run(stem, model=folder, num_tokens=128, **VIDEO | {"video_seed": 1001})
    assert tiny_vlm.loads == 2


@pytest.mark.parametrize("stem", STEMS)
def test_weights_that_are_not_there_are_an_error_with_a_way_out(stem, folder, monkeypatch, tmp_path):
    for room in (attention_sinks, layer_similarity):
        room._watch.cache_clear()
    monkeypatch.setattr(shipped, "folder", lambda name=shipped.POCKET_VLM: tmp_path)
    with pytest.raises(MissingPartError, match="wqlab models train-pocket"):
        wqlab.run(stem, model=folder, num_tokens=128, **VIDEO)


@pytest.mark.parametrize("stem", STEMS)
def test_parts_and_limits_of_the_videos(stem):
    def parts(**given):
        return experiments.get(stem).parts(experiments.validate(stem, given))

    assert parts() == ["smollm2", "efficientnet_lite0", "clips"]
    assert parts(video="none") == ["smollm2"]
    assert parts(video="none", model="pocket-vlm") == ["smollm2", "efficientnet_lite0"]
    assert experiments.validate(stem, {"quick": True}).watched() == ("hard", 1000, 8, 1)
    for name, value in (("num_frames", 7), ("num_frames", 101), ("num_videos", 0), ("video", "medium"), ("video_seed", -1)):
        with pytest.raises(ParameterError, match=name):
            experiments.validate(stem, {name: value})
