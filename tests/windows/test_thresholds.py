import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.windows.thresholds import thresholds, thresholds_on_device, width_limits, width_limits_on_device

unit = st.floats(0, 1)
alphas = st.floats(1e-6, 700)


def exact(s: float, alpha: float) -> tuple[float, float]:
    """Eq. 10 and 11 with 60 digits: the twin that cannot cancel."""
    getcontext().prec = 60
    s_, a = Decimal(s), Decimal(alpha)
    low = ((a * s_).exp() - 1) / (a.exp() - 1)
    high = ((-a * s_).exp() - 1) / ((-a).exp() - 1)
    return float(low), float(high)


@given(unit, alphas)
def test_formulas_agree_with_sixty_digits(s, alpha):
    low, high = thresholds(s, alpha)
    want_low, want_high = exact(s, alpha)
    assert low == pytest.approx(want_low, rel=1e-12, abs=1e-45)
    assert high == pytest.approx(want_high, rel=1e-12, abs=1e-45)


@given(st.lists(unit, min_size=1, max_size=20), alphas)
def test_thresholds_are_ordered_and_in_the_unit_interval(s, alpha):
    low, high = thresholds(s, alpha)
    assert (low >= 0).all()
    assert (low <= high).all()
    assert (high <= 1).all()


@given(unit)
def test_small_alpha_closes_the_band_at_s(s):
    low, high = thresholds(s, 1e-9)
    assert low == pytest.approx(s, abs=1e-8)
    assert high == pytest.approx(s, abs=1e-8)


@given(unit, st.floats(0.01, 50))
def test_a_larger_alpha_never_narrows_the_int4_band(s, alpha):
    low, high = thresholds(s, alpha)
    wider_low, wider_high = thresholds(s, alpha * 1.5)
    assert wider_high - wider_low >= high - low - 1e-12


def test_ends_meet():
    low, high = thresholds([0.0, 1.0], 2.0)
    np.testing.assert_array_equal(low, [0, 1])
    np.testing.assert_array_equal(high, [0, 1])


def test_importance_outside_the_unit_interval_is_clamped():
    np.testing.assert_array_equal(thresholds([-0.3, 1.2], 2.0), thresholds([0.0, 1.0], 2.0))


@pytest.mark.parametrize("alpha", [0, -1, math.nan, math.inf, -math.inf])
def test_refuses_alpha(alpha):
    with pytest.raises(ParameterError, match="greater than 0"):
        thresholds(0.5, alpha)


def test_refuses_nan_importance():
    with pytest.raises(NonFiniteError, match="1 values"):
        thresholds([0.5, math.nan], 2.0)


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=20), alphas)
def test_on_a_device_the_formulas_are_the_same(s, alpha):
    got = thresholds_on_device(torch.tensor(s, dtype=torch.float64), alpha)
    for mine, want in zip(got, thresholds(s, alpha), strict=True):
        np.testing.assert_allclose(mine.numpy(), want, rtol=1e-14, atol=1e-300)


def test_on_a_device_nan_is_for_the_caller_to_find():
    for threshold in thresholds_on_device(torch.tensor([0.5, torch.nan, torch.inf]), 2.0):
        assert threshold.isnan().tolist() == [False, True, True]
    with pytest.raises(ParameterError, match="greater than 0"):
        thresholds_on_device(torch.ones(1), 0)


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=20), alphas, st.sampled_from([width_limits, width_limits_on_device]))
def test_a_width_is_a_count_of_limits(s, alpha, limits_of):
    importance = torch.tensor(s, dtype=torch.float64)
    limits = torch.as_tensor(limits_of(importance, alpha))
    low, high = thresholds(s, alpha) if limits_of is width_limits else thresholds_on_device(importance, alpha)
    low, high = torch.as_tensor(low), torch.as_tensor(high)
    for score in (low, high, *(t.nextafter(torch.full_like(t, end)) for t in (low, high) for end in (-1.0, 2.0))):
        assert (score >= limits).sum(0).tolist() == (1 + (score >= low).int() + (score > high).int()).tolist()


def test_nan_reaches_no_limit():
    assert not (torch.tensor(torch.nan) >= torch.as_tensor(width_limits([0.0, 1.0], 2.0))).any()
    limits = width_limits_on_device(torch.tensor([0.5, torch.nan, torch.inf]), 2.0)
    assert (torch.tensor(1.0) >= limits).sum(0).tolist() == [3, 0, 0]
