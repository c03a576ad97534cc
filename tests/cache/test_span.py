import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.cache import policies
from wqlab.errors import ParameterError
from wqlab.hf import QuantizedKVCache

SIZES = st.integers(1, 9)


@given(st.integers(0, 20), st.integers(0, 60), SIZES, st.integers(0, 3), st.integers(0, 120))
def test_splits_are_monotone_whole_and_inside_the_span(start, length, size, sinks, num_tokens):
    policy = policies.create("span", start=start, stop=start + length, window_size=size, sink_windows=sinks)
    now, later = policy.split(num_tokens), policy.split(num_tokens + 1)
    assert later.head >= now.head
    assert later.encoded >= now.encoded
    assert now.encoded % size == 0
    assert now.head + now.encoded <= num_tokens
    if now.encoded:
        assert now.head == start + sinks * size, "windows do not count from the first token of the span"
        assert now.head + now.encoded <= start + length


@given(st.integers(0, 20), st.integers(0, 60), SIZES, st.integers(0, 3))
def test_a_full_span_leaves_less_than_a_window_behind_the_sinks(start, length, size, sinks):
    policy = policies.create("span", start=start, stop=start + length, window_size=size, sink_windows=sinks)
    whole = length // size
    assert policy.split(start + length + 50).encoded == max(whole - sinks, 0) * size


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 9), st.integers(0, 40))
def test_a_cache_holds_the_span_encoded_and_the_rest_exactly(steps, start, length):
    cache = QuantizedKVCache(num_bits=2, policy="span", window_size=4, start=start, stop=start + length)
    x = torch.randn(1, 2, sum(steps), 6, generator=torch.Generator().manual_seed(0))
    for low, high in itertools.pairwise([0, *itertools.accumulate(steps)]):
        cache.update(x[:, :, low:high], x[:, :, low:high], 0)
    held = cache.layers[0].segments.key.dequantize()
    last = start + max(min(length, x.shape[2] - start), 0) // 4 * 4
    assert torch.equal(held[:, :, :start], x[:, :, :start])
    assert torch.equal(held[:, :, last:], x[:, :, last:])
    changed = (held != x).flatten(0, 1).any(0).any(-1)
    assert changed[start:last].float().mean() > 0.5 or last <= start


def test_an_empty_span_encodes_nothing():
    assert policies.create("span").split(1000).encoded == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"start": -1}, "start = -1"), ({"stop": 2.5}, "stop = 2.5"), ({"start": 9, "stop": 3}, "stop = 3 lies before start = 9")],
)
def test_refusals(options, message):
    with pytest.raises(ParameterError, match=message):
        policies.create("span", **options)
