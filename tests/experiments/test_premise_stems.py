"""premise_audit and similarity_functions: their numbers against the committed records computed directly, and records that lack."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from wqlab import experiments, figures, paths, records
from wqlab.errors import MissingPartError, UnknownNameError
from wqlab.evals import paired
from wqlab.experiments import answers, scorer_audit

RECORDS = {"premise_audit": ("premise_audit", "accuracy"), "similarity_functions": ("premise_audit", "accuracy", "window_search")}
LAYERS = {"attention_early": "attention, best early layers", "attention_best": "attention, best layers"}
OPTIONS = [f"log_prob_{i}" for i in range(4)]


def values_of(stem, **given):
    result = experiments.run(stem, **given)
    return result, {name: value.value for name, value in result.values.items()}


@pytest.fixture(scope="module")
def audit():
    return pd.read_parquet(paths.shipped("data") / "recorded/h200/premise_audit.parquet")


@pytest.fixture(scope="module")
def answered():
    return pd.read_parquet(paths.shipped("data") / "recorded/h200/accuracy.parquet")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of records, empty at first."""
    (tmp_path / "h200").mkdir()
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    return tmp_path


def log_softmax(rows):
    x = rows[OPTIONS].to_numpy()
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def kl_and_accuracy(answered, setting, split, frames):
    """KL to full precision and the share of right answers, straight from the record."""
    asked = answered[
        (answered["part"] == "fresh") & (answered["protocol"] == "cache_then_ask") & (answered["split"] == split)
        & (answered["num_frames"] == frames)
    ]  # fmt: skip
    full, mine = (asked[asked["setting"] == name].drop_duplicates("index").sort_values("index") for name in ("fp16", setting))
    p, q = log_softmax(full), log_softmax(mine)
    right = mine[OPTIONS].to_numpy().argmax(1) == mine["answer"].to_numpy()
    return (np.exp(p) * (p - q)).sum(1).mean(), right.mean()


@pytest.mark.parametrize("split", ["hard", "easy"])
def test_scorers_are_what_the_record_says(audit, split):
    result, values = values_of("premise_audit", split=split)
    fresh = audit[(audit["part"] == "fresh") & (audit["split"] == split)]
    for key in ("cosine", "pearson", "euclidean", "random", *LAYERS):
        rows = fresh[fresh["scorer"] == LAYERS.get(key, key)]
        for name in ("auc", "precision"):
            assert values[f"{name}_{key}_{split}"] == pytest.approx(rows[name].mean())
            assert values[f"{name}_{key}_{split}_low"] < values[f"{name}_{key}_{split}"] < values[f"{name}_{key}_{split}_high"]
        above = rows["precision"] - rows["base_rate"]
        assert values[f"gain_{key}_{split}"] == pytest.approx(above.mean())
        assert values[f"gain_{key}_{split}_low"] < values[f"gain_{key}_{split}"] < values[f"gain_{key}_{split}_high"]
    assert values[f"base_rate_{split}"] == pytest.approx(fresh.drop_duplicates("index")["base_rate"].mean())
    layer = fresh[(fresh["scorer"] == "attention of a layer") & (fresh["layers"] == "17")]
    assert values[f"auc_layer_17_{split}"] == pytest.approx(layer["auc"].mean())
    tasks = result.data[(result.data["part"] == "task") & (result.data["split"] == split)].set_index(["task", "scorer"])["auc"]
    one = fresh[(fresh["scorer"] == "cosine") & (fresh["task"] == "code_reading")]
    assert tasks["code_reading", "cosine"] == pytest.approx(one["auc"].mean())


@pytest.mark.parametrize(("split", "frames"), [("hard", 32), ("hard", 100), ("easy", 32)])
def test_plans_are_what_the_record_says(audit, answered, split, frames):
    _, values = values_of("premise_audit", split=split)
    more = "_easy" if split == "easy" else ""
    chosen = audit[audit["scorer"] == LAYERS["attention_best"]]["layers"].iloc[0].replace(" ", ",")
    settings = {
        "cosine": "cosine rank alpha 2", "random": "random rank alpha 2", "permuted_1": "cosine rank alpha 2 permuted 1",
        "truth": "cosine rank alpha 2 truth 0", "inverse": "cosine rank alpha 2 inverse 0",
        "attention_best": f"attention({chosen}) rank alpha 2",
    }  # fmt: skip
    direct = {key: kl_and_accuracy(answered, f"windowquant {name}", split, frames) for key, name in settings.items()}
    for key, (kl, accuracy) in direct.items():
        assert values[f"kl_{key}_{frames}{more}"] == pytest.approx(kl)
        assert values[f"accuracy_{key}_{frames}{more}"] == pytest.approx(accuracy)
        for place, other in ((0, "cosine"), (1, "random")):
            if key != other:
                name = f"{key}_to_{other}_{frames}{more}"
                assert values[f"kl_change_{name}"] == pytest.approx(kl - direct[other][0]), place
                assert values[f"accuracy_change_{name}"] == pytest.approx(accuracy - direct[other][1])
                assert values[f"kl_ratio_{name}"] == pytest.approx(kl / direct[other][0])
    bits = [value for name, value in values.items() if name.startswith("bits_") and name.endswith(f"_{frames}{more}")]
    assert max(bits) / min(bits) < 1.01, "plans are compared at equal memory"


def test_notes_say_no_more_than_the_intervals(audit):
    result, values = values_of("premise_audit")
    text = " ".join(result.notes)
    words = "worse than chance", "better than chance", "no better than chance"
    for key in ("cosine", "attention_early", "attention_best"):
        (said,) = (part for part in text.split("; ") if f"{scorer_audit.NAMES[key]}: " in part)
        low, high = (values[f"auc_{key}_hard_{end}"] - 0.5 for end in ("low", "high"))
        assert f"{scorer_audit.NAMES[key]}: {scorer_audit.verdict(low, high, *words)} by AUC" in said
        (picked,) = (part for part in text.split("; ") if f"{values[f'gain_{key}_hard_low']:+.3f} to" in part)
        ends = (values[f"gain_{key}_hard_{end}"] for end in ("low", "high"))
        assert picked.startswith(f"{scorer_audit.verdict(*ends, *words)} by precision")
    taken = (result.data["part"] == "difference").sum()
    assert f"has {taken} such differences" in text
    assert ("not measurably better than a random one" in text) == (
        min(values["kl_change_truth_to_random_32_high"], values["kl_change_truth_to_random_100_high"]) >= 0
    )
    assert [scorer_audit.verdict(*ends, "less", "more", "neither") for ends in ((-2, -1), (1, 2), (-1, 1), (0, 0))] == [
        "less", "more", "neither", "neither",
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["development", "fresh"])
@pytest.mark.parametrize("frames", [32, 100])
def test_the_page_on_defaults_says_what_chose_them(part, frames):
    """No sidecar holds the development stream's differences, so the page is held to the record."""
    page = " ".join((Path(__file__).parents[2] / "docs" / "windowquant.md").read_text().split())
    rows = answers.rows_of(answers.needed("h200"), part=part, num_frames=frames)
    cosine = answers.against_full(rows, "windowquant cosine rank alpha 2")["kl"]
    for layers in ("17,18,23", "0,2,8"):
        mine = answers.against_full(rows, f"windowquant attention({layers}) rank alpha 2")["kl"]
        mean, low, high = paired.mean_interval(mine - cosine)
        assert f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" in page
    easy = answers.rows_of(answers.needed("h200"), split="easy")
    mine, cosine = (answers.against_full(easy, f"windowquant {s} rank alpha 2")["kl"] for s in ("attention(17,18,23)", "cosine"))
    mean, low, high = paired.mean_interval(mine - cosine)
    assert f"{mean:+.4f} ({low:+.4f} to {high:+.4f})" in page


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_similarity_functions_are_what_the_records_say(audit, answered, dtype):
    result, values = values_of("similarity_functions", dtype=dtype)
    fresh = audit[(audit["part"] == "fresh") & (audit["split"] == "hard")]
    search = pd.read_csv(paths.shipped("data") / "recorded/h200/window_search.csv")
    for key in ("cosine", "pearson", "euclidean"):
        assert values[f"auc_{key}"] == pytest.approx(fresh[fresh["scorer"] == key]["auc"].mean())
        for frames in (32, 100):
            found = values[f"kl_{key}_{frames}"], values[f"accuracy_{key}_{frames}"]
            assert found == pytest.approx(kl_and_accuracy(answered, f"windowquant {key} rank alpha 2", "hard", frames))
        for device in ("cpu", "cuda"):
            rows = search[(search["device"] == device) & (search["dtype"] == dtype) & search["case"].str.startswith(key)]
            assert values[f"latency_us_{key}_{device}"] == pytest.approx(rows["median_us"].min())
    assert values["paper_latency_pearson_to_cosine"] == pytest.approx(55 / 48)
    paper = result.data[result.data["part"] == "paper"].set_index("function")
    assert paper.loc["euclidean", ["paper_ms", "paper_accuracy"]].tolist() == [49, 61.4]
    assert {evidence.kind for evidence in result.evidence.values()} == {"recorded", "paper"}


@pytest.mark.parametrize("stem", RECORDS)
def test_what_is_missing_is_said(folder, stem):
    """Every record is asked for in turn, by the bench that makes it."""
    for name in RECORDS[stem]:
        with pytest.raises(MissingPartError, match=f"wqlab bench {name}"):
            experiments.run(stem)
        for path in (paths.shipped("data") / "recorded/h200").glob(f"{name}.*"):
            shutil.copy(path, folder / "h200")
    experiments.run(stem)
    with pytest.raises(UnknownNameError):
        experiments.run(stem, gpu="h2000")


@pytest.mark.parametrize("split", ["hard", "easy"])
@pytest.mark.parametrize("stem", RECORDS)
def test_figures_draw_with_their_evidence(tmp_path, stem, split):
    result = experiments.run(stem, split=split, quick=True)
    figure = figures.draw(result)
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    shown = " ".join(text.get_text() for legend in legends for text in legend.get_texts())
    assert "(recorded)" in shown
    assert ("100 frames: no record" in shown) == (split == "easy")
    assert ("(paper)" in shown) == (stem == "similarity_functions")
    assert "NVIDIA H200" in figures.caption(result)
    figures.write(figure, tmp_path / "figure.png")
