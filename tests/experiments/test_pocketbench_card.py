"""pocketbench_card from a small record whose numbers are known, and from none at all."""

import json

import numpy as np
import pandas as pd
import pytest

from wqlab import experiments, figures, records
from wqlab.bench.pocketbench import SEED, PocketBenchBench
from wqlab.errors import DamagedFileError, MissingPartError, ParameterError, RecordError, UnknownNameError
from wqlab.evals import paired, pocketbench
from wqlab.experiments import pocketbench_card
from wqlab.models import shipped

TASKS = pocketbench.task_names()
ROUNDS = 2
WEIGHTS = "ab" * 32
PROVENANCE = {
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_gb": 8.0, "gpus": ["Some GPU"]},
    "versions": {}, "git_commit": "0" * 40, "date": "2026-01-02T03:04:05+00:00", "command": "wqlab models train-pocket",
}  # fmt: skip
CACHES = ("_recorded", "_training", "_asked", "_accuracy", "_against_full", "_samples", "_values", "_generator")


def answers(protocol, split, num_frames, blind=False):
    """FP16 is wrong about the first task; one scale per window also about every second question, and it doubts all."""
    items = list(pocketbench.items(split, SEED, num_frames, stop=ROUNDS * len(TASKS)))
    right = np.array([item.questions[0].answer for item in items])
    index = np.arange(len(items))
    wrong = (right + 1) % 4
    tables = []
    for label, bits, grain, sure in (
        ("fp16", 16, "window_channel", 4.0),
        ("rtn int4 window_channel 32", 4, "window_channel", 3.9),
        ("rtn int2 window_channel 32", 2, "window_channel", 3.0),
        ("rtn int4 window 32", 4, "window", 2.0),
        ("rtn int2 window 32", 2, "window", 1.0),
    )[: 1 if blind else None]:
        missed = (index % len(TASKS) == 0) | ((index % 2 == 1) & (label == "rtn int2 window 32")) | blind
        chosen = np.where(missed, wrong, right)
        scores = np.full((len(items), 4), -5.0)
        scores[index, chosen] += sure
        tables.append(
            pd.DataFrame(
                {
                    "setting": label, "method": "rtn", "num_bits": bits, "granularity": grain, "protocol": protocol, "split": split,
                    "seed": SEED, "num_frames": num_frames, "blind": blind, "index": index,
                    "task": [item.questions[0].task for item in items], "answer": right, "chosen": chosen,
                    **{f"log_prob_{i}": scores[:, i] for i in range(4)},
                    "bits_per_element": bits + 0.5, "bytes_held": 1, "bytes_fp16": 2, "weights": WEIGHTS[:12],
                    "generator": f"{pocketbench.VERSION} {pocketbench.generator_hash()[:12]}",
                }
            )
        )  # fmt: skip
    return pd.concat(tables)


def forget():
    for name in CACHES:
        getattr(pocketbench_card, name).cache_clear()


@pytest.fixture(autouse=True)
def no_memory():
    """Each test reads its own files."""
    forget()
    yield
    forget()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A record of answers and a training log where the package looks for them."""
    monkeypatch.setattr(records, "root", lambda: tmp_path / "recorded")
    monkeypatch.setattr(shipped, "folder", lambda name=shipped.POCKET_VLM: tmp_path)
    runs = [("cache_then_ask", s, n) for s in ("easy", "hard") for n in (32, 100)] + [("multi_turn", "hard", 32)]
    blind = [("cache_then_ask", s, 32, True) for s in ("easy", "hard")]
    table = pd.concat([answers(*run) for run in (*runs, *blind)], ignore_index=True)[list(PocketBenchBench.columns)]
    columns, ran = PocketBenchBench.columns, {**PROVENANCE, "command": "wqlab bench pocketbench"}
    records.write("pocketbench", "h200", table, columns, ran, tmp_path / "recorded")
    (tmp_path / "pocket-vlm.json").write_text(json.dumps({"sha256": WEIGHTS, "step": 300, "provenance": PROVENANCE}))
    kinds = [("frames", 1), ("questions", 8), ("questions", 16)]
    log = [(s, 2.0 * s, kind, n, 10, 50 / s, 1 - 1 / s) for s in range(25, 301, 25) for kind, n in kinds]
    names = ["step", "seconds", "kind", "num_frames", "steps", "loss", "token_accuracy"]
    pd.DataFrame(log, columns=names).to_csv(tmp_path / "training.csv", index=False)
    return tmp_path


def values(result):
    return {name: value.value for name, value in result.values.items()}


def test_values_are_those_of_the_record(files):
    result = experiments.run("pocketbench_card", quick=True)
    found, tasks = values(result), len(TASKS)
    assert found["accuracy_easy_32"] == found["accuracy_hard_100"] == pytest.approx(1 - 1 / tasks)
    assert found["min_task_accuracy_easy_32"] == 0
    assert found["blind_accuracy_hard_32"] == 0
    assert found["accuracy_loss_int4_window_channel"] == 0
    assert found["accuracy_loss_int2_window"] == pytest.approx(0.5)
    assert found["accuracy_loss_int2_window_low"] < 0.5 < found["accuracy_loss_int2_window_high"]
    assert found["accuracy_int2_window"] == pytest.approx(0.5 - 1 / tasks)
    assert found["flip_rate_int2_window"] == pytest.approx(0.5)
    assert found["bits_per_element_int2_window"] == 2.5
    # One option stands out by 4 nats in full precision and by 3 with INT2 per channel.
    p, q = (np.exp([x, 0, 0, 0]) / np.exp([x, 0, 0, 0]).sum() for x in (4.0, 3.0))
    assert found["kl_int2_window_channel"] == pytest.approx((p * np.log(p / q)).sum())
    assert found["margin_difference_int2_window_channel"] == pytest.approx((-1 * (tasks - 1) + 1) / tasks)
    assert found["training_minutes"] == 10
    assert found["training_questions_token_accuracy"] == pytest.approx(1 - 1 / 300)


def test_values_stay_whatever_the_figure_shows(files):
    first = experiments.run("pocketbench_card", quick=True)
    other = experiments.run("pocketbench_card", quick=True, split="easy", num_frames=100, example=1, curve="loss")
    assert other.values == first.values
    assert not other.data.equals(first.data)


def test_the_table_is_tidy_and_no_column_mixes_evidence(files):
    result = experiments.run("pocketbench_card", quick=True)
    data = result.data
    assert list(data["panel"].unique()) == ["samples", "accuracy", "training", "quantized"]
    kinds = {name: evidence.kind for name, evidence in result.evidence.items()}
    assert kinds["question"] == kinds["frames"] == "simulated"
    assert kinds["chosen"] == kinds["value"] == kinds["loss"] == "recorded"
    assert result.evidence["value"].file == "data/recorded/h200/pocketbench.csv"
    assert result.evidence["loss"].file == "data/models/pocket-vlm/training.csv"
    assert result.evidence["loss"].hardware == "Some GPU"
    # Each kind of evidence stays in its panels.
    assert set(data.loc[data["question"].notna(), "panel"]) == {"samples"}
    assert set(data.loc[data["loss"].notna(), "panel"]) == {"training"}
    assert set(data.loc[data["value"].notna(), "panel"]) == {"accuracy", "quantized"}
    rows = data[data["value"].notna()]
    assert ((rows["low"] <= rows["value"]) & (rows["value"] <= rows["high"])).all()
    accuracy = data[data["panel"] == "accuracy"]
    assert len(accuracy) == 6 * (1 + len(TASKS))  # two splits, two lengths; and both splits blind
    assert [i.name for i in result.inputs][:2] == ["data/recorded/h200/pocketbench.csv", "data/models/pocket-vlm/training.csv"]


def test_intervals_are_the_paired_ones(files):
    rows = answers("multi_turn", "hard", 32)
    scores = {label: found[[f"log_prob_{i}" for i in range(4)]].to_numpy() for label, found in rows.groupby("setting")}
    right = rows.loc[rows["setting"] == "fp16", "answer"].to_numpy()
    want = paired.summarise(scores["fp16"], scores["rtn int2 window 32"], right, resamples=200)
    data = experiments.run("pocketbench_card", quick=True, protocol="multi_turn").data
    shown = data[(data["panel"] == "quantized") & (data["setting"] == "rtn int2 window 32")].set_index("metric")
    for metric in ("accuracy", "accuracy_difference", "kl", "flip_rate", "margin_difference"):
        assert shown.loc[metric, "value"] == want[metric]
        assert [shown.loc[metric, "low"], shown.loc[metric, "high"]] == want[f"{metric}_interval"]


def test_samples_are_the_questions_that_were_answered(files):
    result = experiments.run("pocketbench_card", quick=True, example=1)
    samples = result.data[result.data["panel"] == "samples"]
    assert result.pictures["frames"].shape == (len(TASKS), 3, 128, 128, 3)
    assert result.pictures["frames"].dtype == np.uint8
    assert result.pictures["frames"].std() > 20
    for item in pocketbench.items("hard", SEED, 32, start=len(TASKS), stop=2 * len(TASKS)):
        question = item.questions[0]
        rows = samples[samples["index"] == item.index].set_index("setting")
        assert set(rows["question"]) == {question.text}
        right = question.options[question.answer]
        assert set(rows["right_answer"]) == {right}
        assert (rows.loc["fp16", "chosen"] == right) == (item.index % len(TASKS) != 0)
        assert right not in rows.loc["fp16", "wrong_answers"].split(", ")


@pytest.mark.parametrize(
    ("frames", "shown"),
    [((4, 5, 6), [4, 5, 6]), (tuple(range(10)), [0, 4, 9]), ((7, 8), [6, 7, 8]), ((0,), [0, 1, 2]), ((5,), [3, 4, 5])],
)
def test_three_frames_are_shown_around_those_that_answer(frames, shown):
    assert pocketbench_card._around(frames).tolist() == shown


def test_the_figure_names_its_evidence_and_what_it_shows(files):
    result = experiments.run("pocketbench_card", quick=True, curve="loss")
    figure = figures.draw(result)
    words = [t.get_text() for axis in figure.axes for t in (*axis.texts, axis._left_title, axis.yaxis.label)]
    words += [t.get_text() for axis in figure.axes if axis.get_legend() for t in axis.get_legend().get_texts()]
    text = " ".join(words)
    assert "three of their 32 frames (simulated), and who answers right (recorded)" in text
    assert "loss (recorded)" in text
    assert "100 frames (recorded)" in text
    assert "chance" in text
    assert f"cache_then_ask (recorded); FP16 answers {1 - 1 / len(TASKS):.1%} of {ROUNDS * len(TASKS)}" in text
    assert all(task.replace("_", " ") in words for task in TASKS)
    assert words.count("FP16 ✗") == 1
    assert words.count("INT2 / channel ✗") == 1
    assert words.count("INT2 / window ✗") == 1 + len(TASKS) // 2
    figures.draw(experiments.run("pocketbench_card", quick=True, split="easy", num_frames=100))


def test_without_a_record_or_a_log_it_says_how_to_get_them(files):
    with pytest.raises(MissingPartError, match=r"on a100: .*data/recorded/a100/pocketbench.* wqlab bench pocketbench"):
        experiments.run("pocketbench_card", gpu="a100")
    with pytest.raises(UnknownNameError, match="GPU"):
        experiments.run("pocketbench_card", gpu="h2000")
    (files / "training.csv").unlink()
    with pytest.raises(MissingPartError, match=r"training.csv .*repository, or train .*wqlab models train-pocket"):
        experiments.run("pocketbench_card")


def test_a_damaged_log_is_named(files):
    (files / "training.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(DamagedFileError, match=r"training\.csv"):
        experiments.run("pocketbench_card")
    pocketbench_card._training.cache_clear()
    (files / "pocket-vlm.json").write_text('{"sha256": "1"}')
    with pytest.raises(DamagedFileError, match="provenance"):
        experiments.run("pocketbench_card")


def test_what_was_not_recorded_is_refused_with_what_was(files):
    with pytest.raises(ParameterError, match=r"paper_literal was not recorded.*multi_turn hard 32"):
        experiments.run("pocketbench_card", protocol="paper_literal")
    with pytest.raises(ParameterError, match="multi_turn was not recorded on the easy split"):
        experiments.run("pocketbench_card", protocol="multi_turn", split="easy")
    with pytest.raises(ParameterError, match="example = 2 is refused: 2 videos of each task"):
        experiments.run("pocketbench_card", example=ROUNDS)


def test_other_weights_and_another_generator_are_said(files, monkeypatch):
    (files / "pocket-vlm.json").write_text(json.dumps({"sha256": "cd" * 32, "step": 300, "provenance": PROVENANCE}))
    monkeypatch.setattr(pocketbench, "generator_hash", lambda: "e" * 64)
    notes = " ".join(experiments.run("pocketbench_card", quick=True).notes)
    assert "answers are those of other weights (abababababab)" in notes
    assert f"the samples by {pocketbench.VERSION} eeeeeeeeeeee" in notes


def test_a_training_in_two_runs(files):
    log = pd.read_csv(files / "training.csv")
    said = {"sha256": WEIGHTS, "step": 50, "provenance": PROVENANCE, "started_from": {"step": 300, "seconds": 600.0}}
    (files / "pocket-vlm.json").write_text(json.dumps(said))
    result = experiments.run("pocketbench_card", quick=True)
    assert any("covers 300 of 350 training steps" in note for note in result.notes)
    more = log[log["step"] <= 50].assign(step=lambda x: x["step"] + 300, seconds=lambda x: x["seconds"] + 600)
    pd.concat([log.assign(run=1), more.assign(run=2)]).to_csv(files / "training.csv", index=False)
    forget()
    result = experiments.run("pocketbench_card", quick=True)
    assert values(result)["training_minutes"] == pytest.approx((600 + 100) / 60)
    assert not any("training steps" in note for note in result.notes)
    panel = next(axis for axis in figures.draw(result).axes if axis.get_xlabel() == "step")
    assert [line.get_xdata()[0] for line in panel.lines].count(325) == 1  # where the second run begins


def test_answers_to_other_questions_are_refused(files, monkeypatch):
    real = pocketbench.items
    monkeypatch.setattr(pocketbench, "items", lambda split, seed, *rest, **more: real(split, seed + 1, *rest, **more))
    with pytest.raises(RecordError, match="wqlab bench pocketbench"):
        experiments.run("pocketbench_card", quick=True)
