"""accuracy_by_method, accuracy_by_model, ablation and quantization_granularity against plain arithmetic on the record."""

import numpy as np
import pytest

from wqlab import experiments, figures, records
from wqlab.errors import MissingPartError, ParameterError, UnknownNameError
from wqlab.evals import pocketbench
from wqlab.experiments import accuracy_by_method, answers
from wqlab.models import pocket

STEMS = ("accuracy_by_method", "accuracy_by_model", "ablation", "quantization_granularity")
LOG_PROBS = [f"log_prob_{i}" for i in range(4)]


@pytest.fixture(scope="module")
def record():
    return records.read("accuracy", "h200")


def right(record, setting, **which):
    """Share of right answers, and of changed ones, by hand."""
    wanted = {"part": "fresh", "protocol": "cache_then_ask", "split": "hard", "num_frames": 32} | which
    data = record.data
    for column, value in wanted.items():
        data = data[data[column] == value]
    mine, full = (data[data["setting"] == s].drop_duplicates("index").sort_values("index") for s in (setting, "fp16"))
    chosen, before = (rows[LOG_PROBS].to_numpy().argmax(1) for rows in (mine, full))
    return (chosen == mine["answer"]).mean(), (chosen != before).mean(), (before == full["answer"]).mean()


@pytest.mark.parametrize("metric", list(answers.AXES))
def test_accuracy_by_method_is_the_share_of_right_answers(record, metric):
    result = experiments.run("accuracy_by_method", metric=metric)
    rows = result.data[result.data["part"] == "methods"].set_index("setting")
    for setting in ("rtn int2 window_channel 32", "kivi int2 window_channel 32 published", "windowquant cosine none alpha 2"):
        accuracy, flips, full = right(record, setting)
        assert rows.loc[setting, "accuracy"] == pytest.approx(accuracy)
        assert rows.loc[setting, "flip_rate"] == pytest.approx(flips)
        assert rows.loc[setting, "accuracy_difference"] == pytest.approx(accuracy - full)
        assert rows.loc[setting, "accuracy_low"] <= accuracy <= rows.loc[setting, "accuracy_high"]
    tasks = result.data[(result.data["part"] == "tasks") & (result.data["setting"] == "rtn int2 window_channel 32")]
    assert len(tasks) == len(pocketbench.task_names())
    assert np.average(tasks["task_accuracy"], weights=tasks["n"]) == pytest.approx(right(record, "rtn int2 window_channel 32")[0])
    figures.draw(result)


def test_every_protocol_stands_beside_what_table_3_prints(record):
    result = experiments.run("accuracy_by_method", split="easy")
    rows = result.data[result.data["part"] == "protocols"].set_index(["protocol", "split", "setting"])
    accuracy, _, full = right(record, "kivi int2 window_channel 32", protocol="multi_turn")
    assert rows.loc[("multi_turn", "hard", "kivi int2 window_channel 32"), "accuracy_difference"] == pytest.approx(accuracy - full)
    printed = result.data[result.data["part"] == "paper"].set_index(["model", "method", "num_bits"])["paper_difference"]
    assert printed["LLaVA-v1.5-7B", "rtn", 2] == pytest.approx(10.9 - 50.3)
    assert printed["LLaVA-v1.5-13B", "windowquant", 0] == pytest.approx(51.6 - 51.4)
    assert result.evidence["paper_difference"].kind == "paper"
    figure = figures.draw(result)
    words = " ".join(text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts())
    assert "hard, multi_turn (recorded)" in words
    assert "Table 3, LLaVA-v1.5-13B (paper)" in words


def test_values_name_protocol_and_split(record):
    values = experiments.run("accuracy_by_method", protocol="paper_literal").values
    for suffix, which in (("hard", {}), ("easy", {"split": "easy"}), ("paper_literal", {"protocol": "paper_literal"})):
        accuracy, _, full = right(record, "rtn int2 window_channel 32", **which)
        assert values[f"accuracy_rtn_int2_{suffix}"].value == pytest.approx(accuracy)
        assert values[f"gain_rtn_int2_{suffix}"].value == pytest.approx(accuracy - full)
    assert values["accuracy_kivi_int2_published_hard"].value != values["accuracy_kivi_int2_hard"].value


def test_accuracy_by_method_answers_here_too(loaded_here):
    result = experiments.run("accuracy_by_method", live=True, quick=True)
    assert result.evidence["accuracy"].kind == "measured"
    assert result.data[result.data["part"] == "methods"]["n"].unique().tolist() == [2]
    assert result.values == {}
    figures.draw(result)


@pytest.fixture
def loaded_here(tiny_vlm, monkeypatch):
    monkeypatch.setattr(pocket, "load", lambda: experiments_model())
    accuracy_by_method._answer_here.cache_clear()
    yield
    accuracy_by_method._answer_here.cache_clear()


def experiments_model():
    from wqlab import models

    return models.load("pocket-vlm")


@pytest.mark.parametrize("normalize", ["none", "minmax", "rank"])
def test_accuracy_by_model_has_ours_with_intervals_and_theirs_as_printed(record, normalize):
    result = experiments.run("accuracy_by_model", normalize=normalize)
    ours = result.data[result.data["part"] == "recorded"].set_index("benchmark")
    accuracy, _, full = right(record, f"windowquant cosine {normalize} alpha 2", num_frames=100)
    assert ours.loc["hard, 100 frames", "accuracy"] == pytest.approx(accuracy)
    assert result.values["gain_hard_100_frames"].value == pytest.approx(accuracy - full)
    printed = result.data[result.data["part"] == "paper"].set_index(["model", "benchmark"])
    assert printed.loc[("LLaVA-OneVision-Qwen2", "NExT-QA"), "paper_gain"] == pytest.approx(78.9 - 67.8)
    # Qwen2-VL's row of Table 2 repeats Table 1: it is shown as garbled, and no value rests on it.
    assert {model for (model, name), row in printed.iterrows() if row["garbled"]} == {"Qwen2-VL"}
    assert printed["garbled"].sum() == 3
    assert result.values["largest_printed_gain_table1"].value == pytest.approx(78.9 - 67.8)
    assert result.values["largest_printed_gain"].value == pytest.approx(69.5 - 40)
    figures.draw(result)


@pytest.mark.parametrize(("normalize", "frames"), [("rank", 32), ("rank", 100), ("minmax", 32), ("minmax", 100)])
def test_ablation_compares_question_by_question(record, normalize, frames):
    result = experiments.run("ablation", normalize=normalize, num_frames=frames)
    label = f"windowquant cosine {normalize} alpha 2"
    rows = result.data[(result.data["part"] == "answers") & (result.data["num_frames"] == frames)].set_index("variant")
    assert rows.loc["plan", "setting"] == label
    if "permuted_0" in rows.index:
        by_hand = right(record, f"{label} permuted 0", num_frames=frames)[0] - right(record, label, num_frames=frames)[0]
        assert result.values[f"gain_permuted_0_{frames}"].value == pytest.approx(by_hand)
        assert rows.loc["permuted_0", "bits_per_element"] == pytest.approx(rows.loc["plan", "bits_per_element"], abs=1e-4)
        assert rows.loc["no_first_window", "bits_per_element"] < rows.loc["plan", "bits_per_element"]
    assert set(rows.index) >= {"plan", "int2", "int4"}
    figures.draw(result)


def test_metadata_are_counted_and_answers_are_recorded(record):
    result = experiments.run("quantization_granularity")
    per_channel = 2 * 28 * 4 * 128 * (100 * 196 // 32) * 4 / 1e6  # a scale and a minimum for each window and channel
    assert result.values["window_channel_mb_196"].value == pytest.approx(per_channel)
    assert result.values["window_mb_196"].value == pytest.approx(per_channel / 512)
    assert result.values["channel_to_head_256"].value == pytest.approx(128)
    assert result.values["accuracy_window_head_int2"].value == pytest.approx(right(record, "rtn int2 window_head 32")[0])
    figures.draw(result)
    chosen = experiments.run("quantization_granularity", frames=1, tokens_per_frame=64, num_bits=4, window_size=64)
    rows = chosen.data[chosen.data["part"] == "metadata"].set_index("granularity")
    assert rows.loc["window_channel", "metadata_mb"] == pytest.approx(2 * 28 * 512 * 4 / 1e6)
    assert rows.loc["window", "bits_per_element"] == pytest.approx(4 + 32 / (512 * 64))


@pytest.mark.parametrize("stem", STEMS)
def test_without_a_record_they_say_how_to_get_one(stem, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    if stem == "quantization_granularity":  # the formula needs none
        result = experiments.run(stem)
        assert any("wqlab bench accuracy" in note for note in result.notes)
        figures.draw(result)
        return
    with pytest.raises(MissingPartError, match="wqlab bench accuracy"):
        experiments.run(stem)
    with pytest.raises(UnknownNameError, match="H200"):
        experiments.run(stem, gpu="H200")
    with pytest.raises(ParameterError):
        experiments.run(stem, metric="speed")


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("fp16", {"method": "fp16", "num_bits": 16}),
        ("rtn int2 window_head 32", {"method": "rtn", "num_bits": 2, "granularity": "window_head", "policy": "span"}),
        ("kivi int4 window_channel 32 published", {"method": "kivi", "num_bits": 4, "policy": "published"}),
        ("transformers hqq int2", {"method": "transformers hqq", "num_bits": 2, "policy": "published"}),
        (
            "windowquant cosine rank alpha 2 no first window",
            {"first_window": False, "granularity": "window_channel"},
        ),
        (
            "windowquant attention(1,2) minmax alpha 8 permuted 3",
            {"scorer": "attention(1,2)", "order": "permuted", "seed": 3},
        ),
        ("windowquant cosine rank alpha 2 window", {"granularity": "window", "first_window": True}),
    ],
)
def test_labels_are_read_as_they_are_written(label, said):
    assert said.items() <= answers.described(label).items()
