"""AUC, variance and relevant windows against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.evals.relevance import auc, interaction, relevant_windows, variance_shares

SCORES = arrays.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(2, 9)), elements=st.integers(-3, 3).map(float))


@pytest.mark.parametrize(
    ("window_tokens", "expected"),
    [(32, [0, 0, 1, 1, 1, 1, 0, 0]), (64, [0, 1, 1, 0]), (128, [1, 1]), (48, [0, 1, 1, 1, 0]), (256, [1])],
)
def test_a_window_is_relevant_when_one_of_its_tokens_is(window_tokens, expected):
    found = relevant_windows((1, 2), window_tokens, 64, 4 * 64 // window_tokens)
    assert found.astype(int).tolist() == expected


def test_frames_in_the_tail_are_in_no_window():
    assert not relevant_windows((3,), 96, 64, 2).any()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([3, 2, 1, 0], 1.0), ([0, 1, 2, 3], 0.0), ([1, 1, 1, 1], 0.5), ([2, 0, 1, 1], 0.5), ([2, 1, 1, 0], 0.875)],
)
def test_auc_of_known_scores(scores, expected):
    assert auc(scores, [True, True, False, False]) == expected


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_rank_sum(pairs):
    scores, hit = np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs])
    if hit.all() or not hit.any():
        with pytest.raises(ParameterError, match="relevant"):
            auc(scores, hit)
        return
    ranks = np.array([(scores < x).sum() + ((scores == x).sum() + 1) / 2 for x in scores])
    positives, negatives = hit.sum(), (~hit).sum()
    expected = (ranks[hit].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    assert auc(scores, hit) == pytest.approx(expected)
    assert auc(-scores, hit) == pytest.approx(1 - expected)


def test_auc_refuses_what_has_none():
    with pytest.raises(ParameterError, match="3 scores"):
        auc([1, 2, 3], [True, False])
    with pytest.raises(NonFiniteError, match="1 of 2"):
        auc([1, np.nan], [True, False])


@given(SCORES)
def test_the_parts_add_up_and_the_interaction_has_no_means(scores):
    rest, shares = interaction(scores), variance_shares(scores)
    np.testing.assert_allclose(rest.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(rest.mean(1), 0, atol=1e-12)
    assert list(shares) == ["window", "prompt", "interaction"]
    assert sum(shares.values()) == pytest.approx(1 if np.ptp(scores) else 0)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[1, 2, 3], [1, 2, 3]], (1, 0, 0)),
        ([[1, 1], [2, 2]], (0, 1, 0)),
        ([[1, 0], [0, 1]], (0, 0, 1)),
        ([[0.1, 0.1], [0.1, 0.1]], (0, 0, 0)),
    ],
)
def test_variance_of_known_scores(scores, expected):
    assert tuple(variance_shares(np.array(scores, float)).values()) == pytest.approx(expected)
