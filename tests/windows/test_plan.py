import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wqlab.windows.plan import assign_bit_widths
from wqlab.windows.thresholds import thresholds


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


def test_no_windows():
    assert assign_bit_widths([], [0.1], [0.9]).shape == (1, 0)
