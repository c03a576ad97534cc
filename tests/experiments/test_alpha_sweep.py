import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wqlab
from wqlab import experiments, figures, records
from wqlab.errors import RecordError
from wqlab.evals import pocketbench
from wqlab.experiments import alpha_sweep, video_prompts
from wqlab.hf.capture import capture_importance
from wqlab.models.pocket.prompt import with_options
from wqlab.windows.plan import assign_bit_widths
from wqlab.windows.search import search
from wqlab.windows.thresholds import thresholds

VIDEO = {"num_frames": 8, "num_videos": 2}


def embeddings(loaded):
    """Yield the embeddings of each question and its video, made by hand."""
    for item in pocketbench.items("hard", 1000, 8, stop=2):
        text = with_options(item.questions[0].text, item.questions[0].options)
        words = loaded.model.get_input_embeddings()(torch.tensor([loaded.tokenizer(text)["input_ids"]]))
        yield words.detach(), loaded.model.get_video_features(pocketbench.draw([item]))


@given(st.floats(0.1, 12), st.sampled_from(["none", "minmax", "rank"]), st.sampled_from(["prose", "uniform"]))
def test_tokens_add_up_in_every_layer(alpha, normalize, similarity):
    data = wqlab.run("alpha_sweep", alpha=alpha, normalize=normalize, similarity=similarity).data
    layers = data[data["part"] == "layers"]
    np.testing.assert_allclose(layers.groupby("layer")["tokens"].sum(), 4096)
    shares = data[data["part"] == "sweep"].groupby(["normalize", "alpha"])["share"].sum()
    np.testing.assert_allclose(shares, 1)


def test_tokens_follow_from_the_records_by_the_formulas():
    """The twin: plain loops over the recorded tables."""
    importance = records.read("layer_importance", "cpu").data
    similarity = records.read("window_similarity", "cpu").data
    low, high = thresholds(importance["s_i_residual"], 3.0)
    want = np.zeros(len(importance))
    for _, question in similarity.groupby("question"):
        scores = question.sort_values("window")["similarity"].to_numpy()
        scores = (scores - scores.min()) / (scores.max() - scores.min())
        want += (assign_bit_widths(scores, low, high) == 4).sum(axis=1) * 32 / similarity["question"].nunique()
    layers = wqlab.run("alpha_sweep", similarity="prose", alpha=3.0, normalize="minmax").data.query(
        "part == 'layers' and bits == 4"
    )
    np.testing.assert_allclose(layers["tokens"], want)


def test_evidence_is_per_column_and_honest():
    prose, uniform = (wqlab.run("alpha_sweep", similarity=name) for name in ("prose", "uniform"))
    assert prose.evidence["tokens"].kind == "recorded"
    assert uniform.evidence["tokens"].kind == "simulated"
    assert prose.evidence["s_i"].file == "data/recorded/cpu/layer_importance.csv"
    assert {i.name for i in prose.inputs} == {
        "data/recorded/cpu/layer_importance.csv",
        "data/recorded/cpu/window_similarity.csv",
        "data/recorded/h200/alpha_latency.csv",
    }
    assert prose.evidence["latency_us"].file == "data/recorded/h200/alpha_latency.csv"


def test_what_the_ledger_judges_does_not_depend_on_what_is_shown():
    shown = wqlab.run("alpha_sweep", similarity="prose")
    assert shown.values == wqlab.run("alpha_sweep", alpha=7.0, normalize="rank", similarity="uniform").values
    assert {shown.evidence[v.column].kind for v in shown.values.values()} == {"recorded", "simulated"}


def test_bits_per_element_are_those_of_a_cache_that_holds_the_mix():
    """Over many tokens, so that what a quantizer holds is what it says."""
    sweep = wqlab.run("alpha_sweep", similarity="prose").data.query("part == 'sweep'")
    for _, mix in sweep.groupby(["normalize", "alpha"]):
        share = mix.set_index("bits")["share"]
        assert mix["bits_per_element"].nunique() == 1
        # Codes, and 16 bits each of scale and minimum for the 32 tokens of a channel.
        assert mix["bits_per_element"].iloc[0] == pytest.approx(16 * share[16] + 5 * share[4] + 3 * share[2])


@pytest.mark.parametrize("normalize", ["none", "minmax", "rank"])
def test_the_mixes_of_videos_are_those_of_the_search(tiny_vlm, normalize):
    """The twin: the whole search of `wqlab.windowquant`, video by video."""
    result = wqlab.run("alpha_sweep", normalize=normalize, alpha=2.0, **VIDEO)
    layers = result.data[result.data["part"] == "layers"]
    s_i = layers.drop_duplicates("layer")["s_i"].tolist()
    plans = [search(words, video, s_i, normalize=normalize, alpha=2.0) for words, video in embeddings(tiny_vlm)]
    sweep = result.data.query("part == 'sweep' and normalize == @normalize and alpha == 2.0").set_index("bits")["share"]
    for bits in (16, 4, 2):
        assert sweep[bits] == pytest.approx(np.mean([plan.summary().share[bits] for plan in plans]))
        per_layer = np.mean([(plan.bit_widths == bits).sum(1).numpy() * 32 for plan in plans], axis=0)
        np.testing.assert_allclose(layers.loc[layers["bits"] == bits, "tokens"], per_layer)
    assert result.values[f"pocket_vlm_int2_share_{normalize}_alpha_2"].value == pytest.approx(sweep[2])
    if normalize == "none":
        paper = [search(words, video, s_i, preset="paper") for words, video in embeddings(tiny_vlm)]
        assert sweep[2] == pytest.approx(np.mean([plan.summary().share[2] for plan in paper]))


def test_videos_are_measured_and_the_recorded_values_stay(tiny_vlm):
    result, prose = wqlab.run("alpha_sweep", **VIDEO), wqlab.run("alpha_sweep", similarity="prose")
    assert {result.evidence[c].kind for c in ("s_i", "tokens", "share", "bits_per_element")} == {"measured"}
    assert result.evidence["recorded_share"].kind == "recorded"
    assert prose.values == {name: v for name, v in result.values.items() if not name.startswith("pocket_vlm_")}
    assert {result.evidence[v.column].kind for n, v in result.values.items() if n.startswith("pocket_vlm_")} == {"measured"}
    assert "2 videos of 8 frames" in result.evidence["share"].source
    assert "random eyes." in result.notes
    legends = [axes.get_legend() for axes in figures.draw(result).axes]
    text = " ".join(t.get_text() for legend in legends if legend for t in legend.get_texts())
    assert "(measured)" in text
    assert "(recorded)" in text


def test_a_slider_does_not_ask_the_model_again(tiny_vlm):
    for move in ({}, {"alpha": 7.0}, {"normalize": "rank"}, {"alpha": 0.3, "normalize": "none"}):
        wqlab.run("alpha_sweep", **VIDEO, **move)
    assert tiny_vlm.loads == 1
    wqlab.run("alpha_sweep", **VIDEO | {"video_seed": 1001})
    assert tiny_vlm.loads == 2


def test_importance_is_that_of_the_first_prompt(tiny_vlm):
    found = alpha_sweep._watch("hard", 1000, 8, 2)
    (first,) = video_prompts.prompts(tiny_vlm, "hard", 1000, 8, 1)
    with torch.inference_mode(), capture_importance(tiny_vlm.model) as meters:
        tiny_vlm.model.base_model(inputs_embeds=first.embeddings, use_cache=False)
    np.testing.assert_allclose(found.importance, [meter.after_residual.value() for meter in meters], atol=1e-6)
    assert found.scores.shape == (2, 8 * 64 // 32)


def test_models_are_fetched_for_videos_only():
    def parts(**given):
        return experiments.get("alpha_sweep").parts(experiments.validate("alpha_sweep", given))

    assert parts() == ["smollm2", "efficientnet_lite0", "clips"]
    assert parts(similarity="prose") == parts(similarity="uniform") == []


def test_a_damaged_record_is_named(monkeypatch, tmp_path):
    alpha_sweep._recorded.cache_clear()
    alpha_sweep._sweep.cache_clear()
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "layer_importance.json").write_text("{")
    try:
        with pytest.raises(RecordError, match="wqlab bench layer_importance"):
            wqlab.run("alpha_sweep", similarity="prose")
    finally:
        alpha_sweep._recorded.cache_clear()
