from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.types import WindowPlan
from wqlab.windows import scorers
from wqlab.windows.batch import WindowScores
from wqlab.windows.plan import assign_bit_widths, make_plan, on_host, oracle_plan
from wqlab.windows.similarity import normalize_scores
from wqlab.windows.thresholds import thresholds

#: Coarse, so that scores tie with each other and votes with votes.
scores_ = st.integers(-4, 8).map(lambda i: i / 8)
layers_ = st.lists(st.integers(0, 8).map(lambda i: i / 8), min_size=1, max_size=4)


@st.composite
def ragged(draw):
    """Rows of scores, NaN where a row has no window."""
    rows = draw(st.lists(st.lists(scores_, min_size=1, max_size=9), min_size=1, max_size=5))
    values = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, scores in zip(values, rows, strict=True):
        row[: len(scores)] = scores
    return WindowScores(values, tuple(map(len, rows)), (0,) * len(rows), 32, "given")


def by_loops(scores, importance, alpha, normalize, first_window_full):
    """The twin: each row by `assign_bit_widths`, the vote by counting, the wider of equals."""
    t_low, t_high = thresholds(importance, alpha)
    rows = []
    for values, count in zip(scores.values, scores.windows_per_row, strict=True):
        score = normalize_scores(torch.tensor(values[:count]), normalize).numpy()
        rows.append(assign_bit_widths(score, t_low, t_high, first_window_full))
    widths = np.empty((len(importance), max(scores.windows_per_row)), dtype=np.int64)
    for layer, window in np.ndindex(*widths.shape):
        votes = Counter(row[layer, window] for row in rows if window < row.shape[1])
        widths[layer, window] = max(votes, key=lambda bits: (votes[bits], bits))
    return widths


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.lists(st.floats(0, 1), min_size=1, max_size=5), st.floats(0.1, 20))
def test_widths_follow_the_rule(similarity, importance, alpha):
    t_low, t_high = thresholds(importance, alpha)
    widths = assign_bit_widths(similarity, t_low, t_high, first_window_full=False)
    for layer in range(len(importance)):
        for window, score in enumerate(similarity):
            want = 16 if score > t_high[layer] else 2 if score < t_low[layer] else 4
            assert widths[layer, window] == want
    full = assign_bit_widths(similarity, t_low, t_high)
    assert (full[:, 0] == 16).all()
    np.testing.assert_array_equal(full[:, 1:], widths[:, 1:])
    np.testing.assert_array_equal(make_plan(similarity, importance, alpha).bit_widths, full)
    np.testing.assert_array_equal(make_plan(torch.tensor(similarity, dtype=torch.float64), importance, alpha).bit_widths, full)


def test_no_windows():
    assert assign_bit_widths([], [0.1], [0.9]).shape == (1, 0)


@given(ragged(), layers_, st.floats(0.1, 9), st.sampled_from(["none", "minmax", "rank"]), st.booleans())
def test_numpy_torch_and_plain_loops_agree_exactly_on_ragged_batches(scores, importance, alpha, normalize, first):
    want = by_loops(scores, importance, alpha, normalize, first)
    options = {"alpha": alpha, "normalize": normalize, "first_window_full": first}
    numpy = make_plan(scores, importance, **options)
    assert isinstance(numpy.bit_widths, np.ndarray)
    np.testing.assert_array_equal(numpy.bit_widths, want)
    on_torch = WindowScores(torch.tensor(scores.values), scores.windows_per_row, scores.tail_tokens, 32, "given")
    for check in (True, False):
        # Eighths, which bfloat16 holds exactly.
        plan = make_plan(on_torch, torch.tensor(importance, dtype=torch.bfloat16), **options, check=check)
        assert plan.bit_widths.dtype == torch.int64
        np.testing.assert_array_equal(plan.bit_widths.numpy(), want)
        np.testing.assert_array_equal(on_host(plan).bit_widths, want)


@given(st.lists(scores_, min_size=1, max_size=9), layers_, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_the_scores_dtype_decides_nothing(similarity, importance, dtype):
    # The scores are eighths, which every dtype holds exactly.
    want = make_plan(similarity, importance, 2.0, "minmax").bit_widths
    np.testing.assert_array_equal(make_plan(torch.tensor(similarity, dtype=dtype), importance, 2.0, "minmax").bit_widths, want)


def test_a_tie_takes_the_wider_width():
    # s = 0.5 with alpha 2: t_low 0.269, t_high 0.731.
    def voted(*column):
        return make_plan([[0.9, score] for score in column], [0.5]).bit_widths[0, 1]

    assert [voted(0.1, 0.5), voted(0.5, 0.9), voted(0.1, 0.9), voted(0.1, 0.5, 0.9)] == [4, 16, 16, 16]
    assert [voted(0.1, 0.1, 0.9), voted(0.5, 0.1, 0.1, 0.5), voted(0.9, 0.1, 0.5, 0.1)] == [2, 4, 2]


def test_on_a_threshold_a_window_is_int4():
    t_low, t_high = thresholds([0.5], 2.0)
    plan = make_plan([0.0, t_low[0], t_high[0], np.nextafter(t_low[0], 0), np.nextafter(t_high[0], 1)], [0.5])
    assert plan.bit_widths.tolist() == [[16, 4, 4, 2, 16]]


def test_one_window_is_full_and_the_tail_is_counted():
    scores = scorers.create("cosine").score(torch.ones(1, 4), torch.ones(39, 4))
    plan = make_plan(scores, [0.9, 0.95])
    assert plan.bit_widths.tolist() == [[16], [16]]
    assert (plan.windows_per_row, plan.tail_tokens, plan.window_size) == ((1,), (7,), 32)
    assert (plan.scorer, plan.alpha, plan.normalize, plan.preset) == ("cosine", 2.0, "none", None)
    assert (plan.num_layers, plan.num_windows) == (2, 1)


def test_the_summary_counts_what_each_row_has():
    plan = WindowPlan(np.array([[16, 4, 2], [16, 2, 2]]), 32, (3, 2), (0, 5), 2.0, "none", "cosine")
    summary = plan.summary()
    assert summary.windows == {16: 4, 4: 2, 2: 4}
    assert summary.share == {16: 0.4, 4: 0.2, 2: 0.4}
    assert summary.mean_bits == pytest.approx((4 * 16 + 2 * 4 + 4 * 2) / 10)
    torch_plan = WindowPlan(torch.from_numpy(plan.bit_widths), 32, (3, 2), (0, 5), 2.0, "none", "cosine")
    assert torch_plan.summary() == summary


@given(ragged(), layers_, st.integers(0, 99), st.booleans())
def test_a_permuted_plan_has_the_memory_of_the_plan_row_by_row(scores, importance, seed, first):
    plan = make_plan(scores, importance, 2.0, "minmax", first_window_full=first)
    got = plan.permuted(seed)
    np.testing.assert_array_equal(got.bit_widths, plan.permuted(seed).bit_widths)
    for count in scores.windows_per_row:
        np.testing.assert_array_equal(np.sort(got.bit_widths[:, :count]), np.sort(plan.bit_widths[:, :count]))
    # Whole columns move: which windows share a width in all layers is kept.
    assert Counter(map(tuple, got.bit_widths.T.tolist())) == Counter(map(tuple, plan.bit_widths.T.tolist()))
    if first:
        assert (got.bit_widths[:, 0] == 16).all()
    assert got.scorer == f"given, permuted with seed {seed}"
    as_torch = WindowPlan(torch.tensor(plan.bit_widths), 32, plan.windows_per_row, plan.tail_tokens, 2.0, "minmax", "given", first)
    np.testing.assert_array_equal(as_torch.permuted(seed).bit_widths, got.bit_widths)


def test_permuting_moves_windows():
    plan = make_plan(np.linspace(0, 1, 40), [0.5])
    assert (plan.permuted(0).bit_widths != plan.bit_widths).any()
    assert (plan.permuted(0).bit_widths != plan.permuted(1).bit_widths).any()


def test_an_oracle_deals_the_same_widths_to_the_relevant_windows():
    plan = WindowPlan(np.array([[16, 2, 4, 2, 16], [16, 2, 2, 2, 4]]), 32, (5,), (0,), 2.0, "none", "cosine")
    got = oracle_plan(plan, [False, True, False, True, False])
    # Window 0 stays; 1 and 3 are relevant; of equals, the one that the plan had wider comes first.
    assert got.bit_widths.tolist() == [[16, 16, 2, 4, 2], [16, 4, 2, 2, 2]]
    assert got.summary() == plan.summary()
    assert plan.bit_widths.tolist()[0] == [16, 2, 4, 2, 16]
    with pytest.raises(ParameterError, match="5 windows"):
        oracle_plan(plan, [1, 2])
    with pytest.raises(UnsupportedError, match="one row at a time"):
        oracle_plan(WindowPlan(plan.bit_widths, 32, (5, 4), (0, 0), 2.0, "none", "cosine"), np.zeros(5))


def test_the_paper_preset_is_literal_or_refused():
    text, visual = torch.randn(4, 8), torch.randn(100, 8)
    scores = scorers.create("cosine").score(text, visual)
    plan = make_plan(scores, [0.95], preset="paper")
    assert plan.preset == "paper"
    assert plan.permuted(0).preset is oracle_plan(plan, np.arange(3)).preset is None
    np.testing.assert_array_equal(plan.bit_widths, make_plan(scores, [0.95], 2.0, "none").bit_widths)
    for options, says in (
        ({"alpha": 3.0}, "alpha = 2.0, not 3.0"),
        ({"normalize": "rank"}, "normalize = 'none'"),
        ({"first_window_full": False}, "first_window_full"),
    ):
        with pytest.raises(ParameterError, match=says):
            make_plan(scores, [0.95], preset="paper", **options)
    with pytest.raises(ParameterError, match="scorer = 'cosine', not 'pearson'"):
        make_plan(scorers.create("pearson").score(text, visual), [0.95], preset="paper")
    with pytest.raises(ParameterError, match="window_size = 32, not 16"):
        make_plan(scorers.create("cosine").score(text, visual, window_size=16), [0.95], preset="paper")
    with pytest.raises(ParameterError, match="preset = 'papers'"):
        make_plan(scores, [0.95], preset="papers")


@pytest.mark.parametrize(
    ("similarity", "importance", "options", "error", "says"),
    [
        ([0.5], [0.9], {"normalize": "softmax"}, ParameterError, "normalize = 'softmax'.*minmax"),
        ([0.5], [0.9], {"alpha": 0}, ParameterError, "alpha = 0.0"),
        ([0.5], [0.9], {"num_layers": 30}, ParameterError, r"importance \(1,\).*30 layers.*calibrate"),
        ([0.5], [], {}, ParameterError, r"importance \(0,\)"),
        ([0.5], 0.9, {}, ParameterError, r"importance \(\)"),
        ([], [0.9], {}, ParameterError, "at least one window"),
        ([[0.5], [0.5, 0.6]], [0.9], {}, ParameterError, "different length give WindowScores"),
        ([[[0.5]]], [0.9], {}, ParameterError, r"similarity \(1, 1, 1\)"),
        ([0.5, np.nan, np.inf], [0.9], {}, NonFiniteError, "2 of 3 window scores"),
        ([0.5], [np.nan], {}, NonFiniteError, "calibrate"),
    ],
)
def test_refuses_by_name_and_with_the_way_out(similarity, importance, options, error, says):
    with pytest.raises(error, match=says):
        make_plan(similarity, importance, **options)


@pytest.mark.parametrize("normalize", ["none", "minmax", "rank"])
def test_a_late_check_loses_nothing(normalize):
    plan = make_plan(torch.tensor([[0.1, 0.2, 0.3], [0.1, torch.nan, 0.3]]), [0.5], 2.0, normalize, check=False)
    assert (plan.bit_widths[:, 1] == 0).all()
    with pytest.raises(NonFiniteError, match="given score"):
        on_host(plan)
    with pytest.raises(ValueError, match="on_host"):
        plan.summary()


def test_a_plan_whose_shapes_do_not_fit_is_refused():
    for rows, tails in (((2,), (0,)), ((3, 3), (0,)), ((), ())):
        with pytest.raises(ValueError, match="must be"):
            WindowPlan(np.full((1, 3), 16), 32, rows, tails, 2.0, "none", "cosine")
