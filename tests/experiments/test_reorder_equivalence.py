"""reorder_equivalence with a random model: the paths, and that each prefill is the one it is called."""

import math

import pytest
import torch

import wqlab
from wqlab import experiments, figures
from wqlab.errors import ParameterError
from wqlab.evals.reordering import VisualSpan, token_order
from wqlab.experiments import reorder_equivalence as room
from wqlab.experiments import video_prompts

GIVEN = {"num_frames": 8, "num_videos": 2, "num_permutations": 2, "normalize": "rank"}


def test_only_what_sees_all_of_a_reordered_cache_may_not_mind(tiny_vlm):
    result = wqlab.run("reorder_equivalence", **GIVEN)
    parts = dict(list(result.data.groupby("part")))
    decode = parts["decode"]
    assert set(decode["order"]) == {"plan", "unsorted", "reversed", "random 1", "random 2"}
    assert len(decode) == 2 * 3 * 5
    for storage, eps in (("float32", 2**-20), ("float16", 2**-10), ("bfloat16", 2**-7)):
        assert decode.loc[decode["storage"] == storage, "relative_error"].max() < eps
    prefill = parts["prefill"].set_index(["order", "mask", "queries"])["relative_error"]
    assert prefill["random", "storage", "video"].min() > 0.01
    assert prefill.drop(("random", "storage", "video")).drop(("plan", "storage", "video")).max() < 1e-5
    states = parts["states"].groupby("prefill")["relative_error"].max()
    assert states["tokens_storage"] > 1e-3
    assert states["tokens_position"] < 1e-5
    tokens = parts["tokens"].set_index(["prefill", "queries"])
    assert tokens.loc["tokens_position", "changed"].max() == 0
    assert tokens["kl"].min() >= 0
    spread = parts["prefill_position"]
    assert (spread["error_low"] <= spread["relative_error"]).all()
    assert (spread["relative_error"] <= spread["error_high"]).all()
    assert all(math.isfinite(value.value) for value in result.values.values())
    assert {e.kind for e in result.evidence.values()} == {"measured"}
    text = " ".join(axes.get_ylabel() for axes in figures.draw(result).axes)
    assert "(measured)" in text


@torch.inference_mode()
def test_tokens_that_are_reordered_first_are_a_prompt_in_another_order(tiny_vlm):
    """The twin: the reordered prompt, read as any other prompt, with the rotary positions of the original order."""
    (prompt,) = video_prompts.prompts(tiny_vlm, "hard", 1000, 8, 1)
    span = VisualSpan(prompt.start, prompt.stop, prompt.embeddings.shape[1], 32)
    plan = [[16, *[2, 4] * 7, 2]] * 2
    rows = list(room._whole_prefills(tiny_vlm.model, prompt, span, plan, room._prefill(tiny_vlm.model, prompt)))
    order = token_order(span, sorted(range(16), key=lambda window: -plan[0][window]))
    mask = torch.ones(1, span.seq_len, dtype=torch.int64)
    moved = tiny_vlm.model.base_model(
        inputs_embeds=prompt.embeddings[:, order], position_ids=order[None], attention_mask=mask, use_cache=False
    ).last_hidden_state[0]
    back = torch.empty_like(moved)
    back[order] = moved
    plain = tiny_vlm.model.base_model(inputs_embeds=prompt.embeddings, use_cache=False).last_hidden_state[0]
    for queries, at in (("video", slice(span.start, span.stop)), ("question", slice(span.stop, None))):
        (row,) = [
            r for r in rows
            if (r["part"], r.get("layer"), r["prefill"], r["queries"]) == ("states", 1, "tokens_storage", queries)
        ]  # fmt: skip
        want = (back[at] - plain[at]).double().norm() / plain[at].double().norm()
        assert math.sqrt(row["squared_error"] / row["squared_reference"]) == pytest.approx(float(want), rel=1e-3)


def test_what_was_watched_is_not_watched_again(tiny_vlm):
    first = wqlab.run("reorder_equivalence", **GIVEN)
    assert wqlab.run("reorder_equivalence", **GIVEN).values == first.values
    assert tiny_vlm.loads == 1


def test_parts_and_limits():
    experiment = experiments.get("reorder_equivalence")
    assert experiment.parts(experiments.validate("reorder_equivalence", {})) == ["smollm2", "efficientnet_lite0", "clips"]
    for name, value in (("num_permutations", 0), ("num_frames", 7), ("alpha", 0), ("normalize", "softmax"), ("video", "none")):
        with pytest.raises(ParameterError, match=name):
            experiments.validate("reorder_equivalence", {name: value})
