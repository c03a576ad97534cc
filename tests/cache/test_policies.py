import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqlab import registry
from wqlab.cache import policies
from wqlab.errors import ParameterError, UnknownNameError


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 3), st.integers(0, 400))
def test_windowed_splits_are_monotone_whole_and_bounded(size, residual, sinks, num_tokens):
    policy = policies.create("windowed", window_size=size, residual_length=residual, sink_windows=sinks)
    now, later = policy.split(num_tokens), policy.split(num_tokens + 1)
    assert later.head >= now.head
    assert later.encoded >= now.encoded
    assert now.encoded % size == 0
    assert now.head == min(num_tokens, sinks * size)
    tail = num_tokens - now.head - now.encoded
    assert 0 <= tail <= policy.max_tail()
    assert now.encoded == 0 or tail >= residual


def test_every_registered_policy_splits_monotonely():
    for name in registry.names("policy"):
        policy = policies.create(name, window_size=8)
        assert policy.name == name
        splits = [policy.split(n) for n in range(60)]
        assert all(a.head <= b.head and a.encoded <= b.encoded for a, b in itertools.pairwise(splits))
        assert all(s.head + s.encoded <= n and s.encoded % 8 == 0 for n, s in enumerate(splits))


def test_refusals():
    with pytest.raises(UnknownNameError, match="windowed"):
        policies.create("window")
    with pytest.raises(ParameterError, match=r"residual_length = -1"):
        policies.create("windowed", residual_length=-1)
    with pytest.raises(ParameterError, match=r"'residual'.*residual_length"):
        policies.create("windowed", residual=3)
    with pytest.raises(ParameterError, match="window_size = 0"):
        policies.create("full", window_size=0)
