"""Every kind of setting on random weights: plans row by row against the real cache, published policies, calibrations."""

import numpy as np
import pytest
import torch

from wqlab import registry
from wqlab.errors import MissingPartError, ParameterError
from wqlab.evals import pocketbench
from wqlab.evals.relevance import relevant_windows
from wqlab.evals.scoring import PlanSetting, Setting, TransformersSetting, score_settings
from wqlab.evals.scoring.batch import VideoBatch
from wqlab.evals.scoring.facts import ModelFacts
from wqlab.evals.scoring.stream import Stream
from wqlab.hf import WindowQuantCache
from wqlab.hf.row_plans import RowPlansCache
from wqlab.hf.transformers_cache import is_installed
from wqlab.models.pocket import prompt

FRAMES = pocketbench.MIN_FRAMES
SMALL = {"limit": 4, "num_frames": FRAMES, "batch_size": 2}
PLANS = [
    PlanSetting(normalize=normalize, order=order, first_window_full=first)
    for normalize in ("none", "minmax", "rank")
    for order in ("plan", "permuted", "truth", "inverse")
    for first in (True, False)
]


@pytest.fixture
def batch(loaded):
    items = list(pocketbench.items("easy", 3, FRAMES, stop=3))
    embed = loaded.model.get_input_embeddings()
    with torch.no_grad():
        video = loaded.model.get_video_features(pocketbench.draw(items))
        prefix = embed(torch.tensor([prompt.prefix_ids(loaded.tokenizer)])).expand(len(items), -1, -1)
        stream = Stream.prefill(loaded.model, torch.cat([prefix, video], 1))
        asked = [prompt.question_ids(loaded.tokenizer, i.questions[0].text, i.questions[0].options) for i in items]
        words = [embed(torch.tensor(ids)) for ids in asked]
    return VideoBatch(
        items=items, stream=stream, video=video, start=prefix.shape[1], storage=torch.float16,
        words=words, asked=asked, known=[item.questions[0] for item in items], tokens_per_frame=64,
        facts=ModelFacts(loaded, "easy", FRAMES),
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("setting", PLANS, ids=lambda s: s.label)
def test_every_row_holds_what_a_windowquant_cache_of_its_own_would(batch, setting):
    filled = batch.stream.moved_to(setting.cache(batch)).cache
    visual = torch.zeros(1, filled.get_seq_length(), dtype=torch.bool)
    visual[:, batch.start : batch.stop] = True
    held = 0
    for row, plan in enumerate(setting.plans(batch)):
        real = WindowQuantCache(storage_dtype=torch.float16)
        real.follow(plan, visual)
        for index, layer in enumerate(batch.stream.cache.layers):
            (key,), (value,) = layer.segments.key.parts(), layer.segments.value.parts()
            real.update(key[row : row + 1], value[row : row + 1], index)
            for mine, theirs in zip(
                (filled.layers[index].keys, filled.layers[index].values),
                real.layers[index].segments.dequantize(torch.float32),
                strict=True,
            ):
                torch.testing.assert_close(mine[row : row + 1], theirs, rtol=0, atol=0)
        held += real.report()["bytes_held"]
    report = filled.report()
    assert report["bytes_held"] == held
    assert report["bytes_fp16"] == 2 * 2 * sum(layer.keys.numel() for layer in filled.layers)
    assert report["bits_per_element"] == pytest.approx(16 * held / report["bytes_fp16"])


def test_truth_keeps_the_windows_that_answer_and_inverse_those_that_do_not(batch):
    truth, inverse = (PlanSetting(normalize="rank", order=order).scores(batch) for order in ("truth", "inverse"))
    for row, question in enumerate(batch.known):
        hit = relevant_windows(question.frames, 32, 64, truth.shape[1])
        assert truth[row][hit].min() > truth[row][~hit].max()
        assert inverse[row][hit].max() < inverse[row][~hit].min()


def test_ranks_make_all_orders_equally_large_and_seeds_do_not_depend_on_the_batch(loaded):
    settings = [
        PlanSetting(normalize="rank", first_window_full=False, order=order) for order in ("plan", "permuted", "truth", "inverse")
    ]
    settings += [PlanSetting(normalize="rank", first_window_full=False, scorer=scorer) for scorer in ("euclidean", "pearson")]
    table = score_settings(loaded, settings, **SMALL)
    assert table[table["setting"] != "fp16"]["bytes_held"].nunique() == 1, (
        "no window is kept for its place, so ranks fix the memory"
    )
    alone = score_settings(loaded, settings, **SMALL | {"batch_size": 1})
    np.testing.assert_allclose(table["log_prob_0"], alone["log_prob_0"], atol=2e-4)
    again = score_settings(loaded, [PlanSetting(normalize="rank", order="permuted", seed=1)], **SMALL)
    assert not np.allclose(
        again[again["order"] == "permuted"]["log_prob_0"], table[table["order"] == "permuted"]["log_prob_0"], atol=1e-6
    )


def test_a_plan_of_the_first_question_serves_the_second(loaded):
    setting = PlanSetting(normalize="rank")
    ask = {name: score_settings(loaded, [setting], protocol=name, **SMALL) for name in ("cache_then_ask", "multi_turn")}
    rows = [table[table["setting"] == setting.label]["kl"].to_numpy() for table in ask.values()]
    assert not np.allclose(*rows)


@pytest.mark.parametrize("policy", ["span", "published"])
@pytest.mark.parametrize("method", registry.names("method"))
def test_every_method_answers_under_both_policies(loaded, method, policy):
    cls = registry.lookup("method", method)
    if cls.target != "kv":
        pytest.skip("quantizes weights")
    setting = Setting(method, max(cls.supported_bits), policy=policy)
    if cls.takes_codebooks and policy == "published":
        assert "keys before RoPE" in setting.label
    table = score_settings(loaded, [setting], **SMALL | {"limit": 2}).set_index("setting").loc[setting.label]
    assert (table["kl"] < 0.2).all()
    assert (table["bits_per_element"] < 16).all()
    # Text around the video is counted where it may be encoded.
    assert setting.encodes_text == bool((table["bytes_fp16"] > 2 * 2 * 2 * 2 * 16 * 64 * FRAMES).all())


def test_calibrated_methods_get_a_calibration(batch, loaded):
    cache = Setting("smoothquant", 4).cache(batch)
    layer = batch.stream.moved_to(cache).cache.layers[1]
    assert layer.segments.key.quantizer.calibration is batch.facts.calibration
    assert Setting("kivi", 2, policy="published").cache(batch).layers == []
    importance = batch.facts.importance
    assert len(importance) == 2
    assert all(0 < s <= 1 for s in importance)


def test_transformers_own_cache_is_a_setting(batch):
    setting = TransformersSetting("quanto", 4)
    assert (setting.label, setting.encodes_text) == ("transformers quanto int4", True)
    if is_installed("quanto"):
        assert setting.cache(batch).report()["tokens"] == 0
    else:
        with pytest.raises(MissingPartError, match="pip install optimum-quanto"):
            setting.cache(batch)
    with pytest.raises(ParameterError, match="fp8 holds 8 bits"):
        TransformersSetting("fp8")


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ParameterError, match=r"must be \[batch, layers, windows\]"):
        RowPlansCache(torch.full((1, 2), 4), 0)
    x = torch.zeros(1, 1, 40, 16)
    with pytest.raises(ParameterError, match="which end at token 67"):
        RowPlansCache(torch.full((1, 1, 2), 4), 3).update(x, x, 0)
