"""Orders of windows, and what they do to one layer's attention; random layers, so that nothing but arithmetic is tested."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.evals.reordering import (
    STORAGE,
    LayerStates,
    VisualSpan,
    by_width,
    decode_errors,
    displacement,
    prefill_errors,
    token_order,
)

SPAN = VisualSpan(
    start=3, stop=3 + 6 * 8 + 5, seq_len=3 + 6 * 8 + 5 + 7, window_size=8
)  # 5 visual tokens lie behind the last window
WIDTHS = [16, 2, 4, 2, 16, 4]


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 2, 2)
    return LayerStates(*(torch.randn(1, heads, SPAN.seq_len, 16, generator=generator) for heads in shapes))


def error(row):
    return math.sqrt(row["squared_error"] / row["squared_reference"])


def test_windows_of_one_width_lie_together_widest_first():
    assert by_width(WIDTHS) == [0, 4, 2, 5, 1, 3]
    assert by_width([2, 2, 2]) == [0, 1, 2]


def test_displacement_is_a_share_of_the_length():
    assert displacement(range(10)) == 0
    assert displacement(range(9, -1, -1)) == 0.5
    assert displacement([1, 0]) == 0.5


@given(st.permutations(range(6)))
def test_only_whole_windows_move(order):
    tokens = token_order(SPAN, order)
    assert sorted(tokens.tolist()) == list(range(SPAN.seq_len))
    behind = SPAN.start + 6 * SPAN.window_size
    assert tokens[: SPAN.start].tolist() == list(range(SPAN.start))
    assert tokens[behind:].tolist() == list(range(behind, SPAN.seq_len))
    assert torch.equal(tokens[SPAN.start : behind].reshape(6, -1), SPAN.windows()[list(order)])


@given(st.permutations(range(6)), st.lists(st.sampled_from([16, 4, 2]), min_size=6, max_size=6))
def test_decode_errors_are_rounding_in_every_order(order, widths):
    generator = torch.Generator().manual_seed(1)
    states = LayerStates(*(torch.randn(1, heads, SPAN.seq_len, 16, generator=generator) for heads in (4, 2, 2)))
    rows = list(decode_errors(states, SPAN, widths, {"plan": by_width(widths), "unsorted": range(6), "other": order}))
    assert [(row["storage"], row["order"]) for row in rows] == [(s, o) for s in STORAGE for o in ("plan", "unsorted", "other")]
    for row in rows:
        limit = 16 if row["storage"] == "float32" else 1
        assert error(row) < limit * torch.finfo(getattr(torch, row["storage"])).eps
    assert len({row["squared_reference"] for row in rows if row["storage"] == "float32"}) == 1
    assert rows[1]["displacement"] == 0
    assert rows[2]["displacement"] == displacement(order)


def test_a_window_that_is_lost_would_be_seen(states):
    """The measure is worth something: another window in a place, and the error is no rounding any more."""
    (row, *_) = decode_errors(states, SPAN, WIDTHS, {"other": [0, 1, 2, 3, 4, 4]})
    assert error(row) > 1e-2


def test_prefill_errors_are_rounding_where_all_reordered_keys_are_seen_or_the_mask_goes_along(states):
    orders = {"same": list(range(6)), "reversed": [5, 4, 3, 2, 1, 0]}
    rows = list(prefill_errors(states, SPAN, orders, stride=8))
    positions = {row["position"] for row in rows if row["queries"] == "video"}
    assert positions == set(range(7, SPAN.stop - SPAN.start, 8))
    asked = {row["position"] for row in rows if row["queries"] == "question"}
    assert asked == set(range(SPAN.stop - SPAN.start, SPAN.seq_len - SPAN.start))
    for row in rows:
        wrong = row["order"] == "reversed" and row["mask"] == "storage" and row["position"] < 5 * 8
        assert (error(row) > 0.1) if wrong else (error(row) < 1e-5), row


def test_prefill_by_storage_is_attention_over_what_lies_in_front(states):
    """The twin: one query, its keys picked by hand."""
    orders = {"reversed": [5, 4, 3, 2, 1, 0]}
    row = next(r for r in prefill_errors(states, SPAN, orders, 8) if r["mask"] == "storage" and r["position"] == 23)
    tokens, at = token_order(SPAN, orders["reversed"]), SPAN.start + 23
    out, want = (_one(states, at, visible) for visible in (tokens[: at + 1].tolist(), range(at + 1)))
    assert error(row) == pytest.approx(np.linalg.norm(out - want) / np.linalg.norm(want), rel=1e-4)


def _one(states, at, visible):
    query, key, value = (x[0].double().numpy() for x in states)
    result = []
    for head in range(4):
        scores = key[head // 2, list(visible)] @ query[head, at] / math.sqrt(16)
        weights = np.exp(scores - scores.max())
        result.append(weights / weights.sum() @ value[head // 2, list(visible)])
    return np.stack(result)
