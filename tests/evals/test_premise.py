"""The audit of scorers on random weights, and the attention of a question against a pass that keeps every map."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import ParameterError
from wqlab.evals import pocketbench
from wqlab.evals.premise import ALL_LAYERS, LAYER, audit, best_layers
from wqlab.evals.relevance import precision_at_k
from wqlab.evals.scoring import Exam, PlanSetting, read_videos
from wqlab.hf.question_attention import question_attention
from wqlab.models.pocket import prompt
from wqlab.windows import scorers

FRAMES = pocketbench.MIN_FRAMES


@pytest.fixture
def batch(loaded):
    (found,) = read_videos(loaded, Exam(split="easy", seed=4, limit=3, num_frames=FRAMES), 3)
    return found


def maps(loaded, batch, row):
    """Attention maps [layers, heads, tokens, tokens] of one whole conversation, by eager attention."""
    embed = loaded.model.get_input_embeddings()
    prefix, asked = (embed(torch.tensor([ids])) for ids in (prompt.prefix_ids(loaded.tokenizer), batch.asked[row]))
    loaded.model.set_attn_implementation("eager")
    try:
        out = loaded.model(
            inputs_embeds=torch.cat([prefix, batch.video[row : row + 1], asked], 1), use_cache=False, output_attentions=True
        )
    finally:
        loaded.model.set_attn_implementation("sdpa")
    return torch.stack(out.attentions)[:, 0]


@torch.no_grad()
def test_a_questions_attention_is_that_of_the_whole_conversation(loaded, batch):
    found = batch.attention()
    for row, ids in enumerate(batch.asked):
        expected = maps(loaded, batch, row)[:, :, -len(ids) :, batch.start : batch.stop].mean((1, 2))
        torch.testing.assert_close(found[:, row], expected, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_a_pass_that_is_cut_short_gives_the_same(loaded, batch):
    embed = loaded.model.get_input_embeddings()
    ids = batch.asked[0]
    whole = torch.cat([batch.video[:1], embed(torch.tensor([ids]))], 1)
    asked = torch.zeros(1, whole.shape[1], dtype=torch.bool)
    asked[:, -len(ids) :] = True
    passes = []

    def forward():
        passes.append(loaded.model(inputs_embeds=whole, use_cache=False))

    full = question_attention(loaded.model, forward, asked)
    first = question_attention(loaded.model, forward, asked, [0])
    torch.testing.assert_close(full[:1], first)
    torch.testing.assert_close(full.sum(-1), torch.ones(2, 1))
    assert passes == [], "nobody waits for a result"
    for layers in ([], [1, 0], [0, 0], [-1], [2]):
        with pytest.raises(ParameterError, match="take one or more, ascending, from 0 to 1"):
            question_attention(loaded.model, forward, asked, layers)
    with pytest.raises(ParameterError, match="no token of row 0 asks"):
        question_attention(loaded.model, forward, ~asked & False)


def test_the_audit_has_every_scorer_and_layer_once_per_question(batch):
    rows = audit(batch, {"mine": (1,)})
    per_question = {(row["scorer"], row["layer"]) for row in rows}
    assert {("cosine", -1), ("random", -1), (ALL_LAYERS, -1), (LAYER, 0), (LAYER, 1), ("mine", -1)} <= per_question
    assert len(rows) == len(per_question) * len({row["index"] for row in rows})
    values = {(row["index"], row["scorer"], row["layer"]): row["auc"] for row in rows}
    assert all(values[i, "mine", -1] == values[i, LAYER, 1] for i, *_ in values)
    assert all(0 <= row["auc"] <= 1 and 0 <= row["precision"] <= 1 and 0 < row["base_rate"] < 1 for row in rows)
    assert best_layers(rows, 1) in ((0,), (1,))
    assert best_layers(rows, 2) == (0, 1)
    assert best_layers(rows, 2, below=1) == (0,)


def test_plans_follow_the_attention_scorer(batch):
    first, second = (PlanSetting(scorer="attention", layers=(n,), normalize="rank") for n in (0, 1))
    assert first.label == "windowquant attention(0) rank alpha 2"
    assert not np.array_equal(first.scores(batch), second.scores(batch))
    both = PlanSetting(scorer="attention", layers=(0, 1)).scores(batch)
    np.testing.assert_allclose(both, (first.scores(batch) + second.scores(batch)) / 2, rtol=1e-6)
    for layers in ((), (1, 0), (-1,), (0.5,)):
        with pytest.raises(ParameterError, match="take one or more, ascending, from 0"):
            scorers.create("attention", layers=layers)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30).filter(lambda x: len({h for _, h in x}) == 2))
def test_precision_is_the_mean_over_the_orders_of_equal_scores(pairs):
    scores, hit = np.array([s for s, _ in pairs], dtype=float), np.array([h for _, h in pairs])
    k, rng = hit.sum(), np.random.default_rng(0)
    orders = [np.lexsort((rng.random(len(scores)), -scores))[:k] for _ in range(400)]
    assert precision_at_k(scores, hit) == pytest.approx(np.mean([hit[order].mean() for order in orders]), abs=0.12)
    assert precision_at_k(hit.astype(float), hit) == 1
