"""The scorer that asks the model, in `windowquant`: its plan is that of the attention maps of a whole pass."""

import numpy as np
import pytest
import torch
from test_adapters_families import FAMILIES
from test_window_cache import ask

from wqlab.errors import ParameterError
from wqlab.hf.adapters import for_model
from wqlab.hf.question_attention import question_attention
from wqlab.hf.window_cache import WindowQuantCache, windowquant
from wqlab.windows import scorers
from wqlab.windows.plan import make_plan


def maps(model, inputs):
    """Attention maps [layers, batch, heads, tokens, tokens] of one whole pass, by eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return torch.stack(model(**inputs, use_cache=False, output_attentions=True).attentions)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("questions", [["What is it?"], ["Is it red?", "Which of these objects can be seen in the video?"]])
@pytest.mark.parametrize("layers", [(0,), (1, 2)])
def test_the_plan_is_that_of_the_whole_passes_maps(pocket_model, pocket_processor, questions, layers):
    inputs = ask(pocket_processor, *questions)
    importance = [0.3, 0.5, 0.7]
    options = {"normalize": "rank", "importance": importance}
    with windowquant(pocket_model, scorer=scorers.create("attention", layers=layers), **options) as caches:
        pocket_model.generate(**inputs, max_new_tokens=2, do_sample=False)
    visual = inputs["input_ids"] == pocket_model.config.video_token_id
    asked = for_model(pocket_model).question_positions(pocket_model, inputs)
    rows = []
    for row, at in enumerate(visual):
        weights = maps(pocket_model, inputs)[list(layers), row][:, :, asked[row]].mean((0, 1, 2))[at]
        rows.append(weights.reshape(-1, 32).sum(-1))
    expected = make_plan(torch.stack(rows), importance, normalize="rank")
    np.testing.assert_array_equal(caches[0].plan.bit_widths, np.asarray(expected.bit_widths))
    assert caches[0].plan.scorer == "attention"


def test_layers_that_the_model_lacks_and_embeddings_are_refused(pocket_model, pocket_processor):
    inputs = ask(pocket_processor, "What is it?")
    with (
        pytest.raises(ParameterError, match=r"layers = \[17, 18, 23\] is refused: take one or more, ascending, from 0 to 2"),
        windowquant(pocket_model, scorer="attention"),
    ):
        pocket_model.generate(**inputs, max_new_tokens=2, do_sample=False)
    with pytest.raises(ParameterError, match="reads attention of 3 layers"):
        scorers.create("attention").score(torch.ones(4, 8), torch.ones(64, 8))


class Latest(scorers.Scorer):
    """A scorer of somebody else that reads attention: the last of its layers alone. Not registered, not an AttentionScorer."""

    name = "latest"
    reads = "attention"
    layers = (0, 1)

    def compare(self, batch):
        return batch.windows[..., -1].sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_with_other_numbers_of_visual_tokens_and_a_scorer_of_ones_own(family):
    torch.manual_seed(0)
    case = FAMILIES[family]()
    model, inputs, importance = case.model.eval(), case.inputs, [0.3, 0.7]
    options = {"window_size": 4, "importance": importance, "normalize": "rank", "alpha": 8.0}
    cache = WindowQuantCache.prepare(model, inputs, scorer=Latest(), **options)
    adapter = for_model(model)
    visual, asked = adapter.visual_positions(model, inputs), adapter.question_positions(model, inputs)
    assert visual.sum(1).tolist() == case.visual
    found = maps(model, inputs)[1]
    video = [found[row][:, asked[row]].mean((0, 1))[at][:, None].expand(-1, 2) for row, at in enumerate(visual)]
    scores = Latest().score([torch.ones(1, 2)] * 2, video, window_size=4)
    expected = make_plan(scores, importance, 8.0, "rank")
    np.testing.assert_array_equal(cache.plan.bit_widths, np.asarray(expected.bit_widths))
    assert cache.plan.windows_per_row == scores.windows_per_row == tuple(count // 4 for count in case.visual)
    weights = question_attention(model, lambda: model(**inputs, use_cache=False), asked)
    assert float(weights[:, inputs["attention_mask"] == 0].abs().sum()) == 0  # nobody looks at padding
