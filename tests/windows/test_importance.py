import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.windows.importance import ImportanceMeter


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(1, 9),
)
def test_blocks_give_the_mean_over_all_tokens(lengths, dtype, block):
    generator = torch.Generator().manual_seed(sum(lengths))
    pairs = [
        (torch.randn(2, n, 16, generator=generator).to(dtype), torch.randn(2, n, 16, generator=generator).to(dtype))
        for n in lengths
    ]
    meter = ImportanceMeter()
    for before, after in pairs:
        meter.update(before, after, block=block)
    before, after = (torch.cat([p[i] for p in pairs], dim=1).double() for i in (0, 1))
    want = torch.nn.functional.cosine_similarity(before, after, dim=-1).mean().item()
    assert meter.value() == pytest.approx(want, abs=1e-12)


def test_unchanged_states_have_cosine_one():
    meter = ImportanceMeter()
    state = torch.randn(1, 50, 8)
    meter.update(state, 3 * state)
    assert meter.value() == pytest.approx(1, abs=1e-12)


def test_refusals():
    meter = ImportanceMeter()
    with pytest.raises(ParameterError, match="no token"):
        meter.value()
    with pytest.raises(ParameterError, match="differ in shape"):
        meter.update(torch.ones(1, 2, 4), torch.ones(1, 3, 4))
    with pytest.raises(NonFiniteError):
        meter.update(torch.full((1, 2, 4), torch.nan), torch.ones(1, 2, 4))
