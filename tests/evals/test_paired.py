import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.evals.paired import METRICS, mean_interval, per_question, summarise

NUMBERS = st.floats(-1e6, 1e6)
SAMPLES = st.integers(1, 40).flatmap(lambda n: arrays(float, n, elements=NUMBERS))
LOGPS = st.integers(1, 12).flatmap(lambda n: arrays(float, (n, 4), elements=st.floats(-400, 0)))


@given(SAMPLES, st.randoms(use_true_random=False))
def test_an_interval_contains_the_mean_and_ignores_order(values, random):
    mean, low, high = mean_interval(values, 200)
    assert values.min() - 1e-6 <= low <= mean <= high <= values.max() + 1e-6
    shuffled = list(values)
    random.shuffle(shuffled)
    assert mean_interval(shuffled, 200) == (mean, low, high)


@given(NUMBERS, st.integers(1, 30))
def test_equal_values_have_an_interval_without_width(value, n):
    mean, low, high = mean_interval(np.full(n, value), 50)
    assert (mean, low, high) == pytest.approx((value,) * 3, rel=1e-12)


def test_the_interval_is_the_textbooks():
    """For many Bernoulli draws the bootstrap's percentiles are those of the normal approximation."""
    values = np.repeat([0.0, 1.0], [400, 600])
    mean, low, high = mean_interval(values, 4000)
    half = 1.96 * np.sqrt(0.6 * 0.4 / 1000)
    assert mean == 0.6
    assert (low, high) == pytest.approx((0.6 - half, 0.6 + half), abs=0.003)
    assert mean_interval(values, 4000) == (mean, low, high)
    assert mean_interval(values, 4000, seed=1)[1:] != (low, high)


@given(LOGPS, st.floats(-50, 50))
def test_the_same_distribution_is_no_loss(logp, shift):
    answer = np.arange(len(logp)) % 4
    rows = per_question(logp, logp + shift, answer)  # a constant on all options changes no distribution
    assert list(rows) == list(METRICS)
    assert float(rows["kl"].max()) < 1e-12
    assert float(np.abs(rows["margin_difference"]).max()) < 1e-9
    same = summarise(logp, logp, answer, resamples=20)
    for name in ("kl", "flip_rate", "accuracy_difference", "margin_difference"):
        assert (same[name], same[f"{name}_interval"]) == (0, [0, 0])


@given(LOGPS, st.integers(0, 2**32 - 1))
def test_kl_is_not_negative_and_questions_may_come_in_any_order(logp, seed):
    rng = np.random.default_rng(seed)
    other, answer, order = rng.normal(size=logp.shape), rng.integers(4, size=len(logp)), rng.permutation(len(logp))
    rows = per_question(logp, other, answer)
    assert (rows["kl"] >= 0).all()
    assert np.isfinite(rows["kl"]).all()
    assert summarise(logp, other, answer, 50) == summarise(logp[order], other[order], answer[order], 50)


def test_a_worked_example():
    full = np.log([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]])
    method = np.log([[0.7, 0.1, 0.1, 0.1], [0.2, 0.6, 0.1, 0.1]]) - 3  # options of long texts: the sums need not be 1
    summary = summarise(full, method, [0, 0])
    assert summary["n"] == 2
    assert (summary["accuracy"], summary["accuracy_fp16"], summary["accuracy_difference"], summary["flip_rate"]) == (
        0.5,
        1,
        -0.5,
        0.5,
    )
    kl = 0.4 * np.log(2) + 0.3 * np.log(0.5) + 0.2 * np.log(2)
    assert summary["kl"] == pytest.approx(kl / 2)
    assert summary["margin"] == pytest.approx((np.log(7) + np.log(2 / 6)) / 2)
    assert summary["margin_difference"] == pytest.approx((np.log(2 / 6) - np.log(4 / 3)) / 2)
    assert summary["accuracy_difference_interval"] == [-1, 0]


def test_pairing_narrows_the_interval_of_a_difference():
    """Hard questions are hard for both: paired, their spread cancels."""
    rng = np.random.default_rng(0)
    n = 300
    full = rng.normal(size=(n, 4)) * 5
    method = full + rng.normal(size=(n, 4)) * 0.3
    answer = rng.integers(4, size=n)
    summary = summarise(full, method, answer)

    def width(name):
        low, high = summary[f"{name}_interval"]
        return high - low

    assert width("margin_difference") < 0.2 * np.hypot(width("margin"), width("margin_fp16"))
    assert width("accuracy_difference") < np.hypot(width("accuracy"), width("accuracy_fp16"))


def test_refusals():
    with pytest.raises(ParameterError, match=r"shape \[0\]"):
        mean_interval([])
    with pytest.raises(NonFiniteError, match="1 of 2 values"):
        mean_interval([1, np.nan])
    good = np.zeros((2, 4))
    with pytest.raises(ParameterError, match=r"\(2, 4\), \(3, 4\)"):
        per_question(good, np.zeros((3, 4)), [0, 1])
    with pytest.raises(ParameterError, match="from 0 to 3"):
        per_question(good, good, [0, 4])
    with pytest.raises(NonFiniteError, match="log-probability"):
        per_question(good, good - np.inf, [0, 1])
