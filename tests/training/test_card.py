"""The model card is what the files say, and the record keeps what an honest benchmark must keep."""

import json

import pytest

from wqlab import records
from wqlab.evals import pocketbench
from wqlab.models import shipped
from wqlab.training import card


def test_the_committed_card_is_the_one_that_the_files_give():
    assert shipped.weights_path().with_name("README.md").read_text(encoding="utf-8") == card.render(), (
        "write it anew: python -m wqlab.training.card"
    )


def test_weights_without_a_record_of_their_own_have_no_card(monkeypatch, tmp_path):
    path = tmp_path / "pocket-vlm.safetensors"
    real = shipped.weights_path()
    meta = json.loads(real.with_suffix(".json").read_text()) | {"sha256": "0" * 64}
    path.with_suffix(".json").write_text(json.dumps(meta))
    (tmp_path / "training.csv").write_bytes(real.with_name("training.csv").read_bytes())
    monkeypatch.setattr(shipped, "weights_path", lambda: path)
    with pytest.raises(ValueError, match="of weights"):
        card.render()


@pytest.fixture(scope="module")
def answers():
    return records.read("pocketbench", "h200").data


def test_the_record_is_of_this_generator_and_of_seeds_that_nothing_was_tuned_on(answers):
    assert set(answers["generator"]) == {f"{pocketbench.VERSION} {pocketbench.generator_hash()[:12]}"}
    assert answers["seed"].min() >= pocketbench.FIRST_TEST_SEED


def test_the_right_options_of_the_record_are_the_generators(answers):
    for (split, num_frames), rows in answers.groupby(["split", "num_frames"]):
        asked = rows.drop_duplicates("index").sort_values("index").head(24)
        items = list(pocketbench.items(split, int(answers["seed"].iloc[0]), int(num_frames), stop=24))
        assert [item.questions[0].answer for item in items] == asked["answer"].tolist()
        assert [item.questions[0].task for item in items] == asked["task"].tolist()


@pytest.mark.parametrize("split", ["easy", "hard"])
def test_text_alone_stays_near_chance(answers, split):
    blind = answers[answers["blind"] & (answers["split"] == split)]
    assert len(blind) >= 240
    assert (blind["chosen"] == blind["answer"]).mean() <= 0.35
