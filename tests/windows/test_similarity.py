import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.windows.similarity import normalize_scores, window_similarity


def pairwise(text, tokens, window_size):
    """Eq. 8 as it is printed: the mean over all pairs of cosines."""
    cosine = torch.nn.functional.cosine_similarity(text.double()[:, None], tokens.double()[None], dim=-1)
    count = tokens.shape[0] // window_size
    return torch.stack([cosine[:, i * window_size : (i + 1) * window_size].mean() for i in range(count)])


@given(
    st.integers(1, 7), st.integers(1, 40), st.integers(1, 9), st.integers(1, 24),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), st.integers(0, 2**31),
)  # fmt: skip
def test_closed_form_equals_the_pairwise_definition(n, m, window_size, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(n, width, generator=generator).to(dtype)
    tokens = torch.randn(max(m, window_size), width, generator=generator).to(dtype)
    got = window_similarity(text, tokens, window_size)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, pairwise(text, tokens, window_size), rtol=1e-10, atol=1e-12)


def test_the_remainder_belongs_to_no_window():
    text, tokens = torch.randn(3, 8), torch.randn(70, 8)
    torch.testing.assert_close(window_similarity(text, tokens, 32), window_similarity(text, tokens[:64], 32))


@pytest.mark.parametrize(
    ("text", "tokens", "size", "says"),
    [
        ((0, 4), (8, 4), 2, "prompt of row 0 is empty"),
        ((3, 4), (8, 5), 2, "width 4, visual ones 5"),
        ((3, 4), (8, 4), 0, "window_size = 0"),
        ((3, 4), (8, 4), 9, "at most 8 tokens"),
        ((3, 4), (0, 4), 2, "no visual tokens"),
        ((3, 4), (2, 8, 4), 2, "one D"),
    ],
)
def test_refuses_shapes(text, tokens, size, says):
    with pytest.raises(ParameterError, match=says):
        window_similarity(torch.ones(text), torch.ones(tokens), size)


def test_refuses_nan():
    tokens = torch.ones(8, 4)
    tokens[5, 1] = torch.nan
    with pytest.raises(NonFiniteError):
        window_similarity(torch.ones(2, 4), tokens, 4)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.sampled_from(["minmax", "rank"]))
def test_normalized_scores_keep_the_order_and_fill_the_unit_interval(scores, how):
    raw = torch.tensor(scores, dtype=torch.float64)
    got = normalize_scores(raw, how)
    assert ((got >= 0) & (got <= 1)).all()
    order = raw.argsort(stable=True)
    assert (got[order].diff() >= 0).all()
    if raw.unique().numel() > 1:
        assert got.min() == 0
        assert got.max() == 1


def test_equal_scores_have_no_extremes():
    assert normalize_scores(torch.full((4,), 0.3), "minmax").tolist() == [0.5] * 4
    assert normalize_scores(torch.tensor([0.3]), "rank").tolist() == [0.5]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(["none", "minmax", "rank"]), st.integers(0, 2**31))
def test_ragged_rows_are_normalized_as_if_each_were_alone(counts, how, seed):
    scores = torch.rand(len(counts), max(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    valid = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    got = normalize_scores(scores.masked_fill(~valid, torch.nan), how, valid)
    for row, count in enumerate(counts):
        assert torch.equal(got[row, :count], normalize_scores(scores[row, :count], how))


def test_a_subnormal_range_is_still_a_range():
    assert normalize_scores(torch.tensor([0.0, 5e-324], dtype=torch.float64), "minmax").tolist() == [0, 1]


def test_unknown_normalization():
    with pytest.raises(ParameterError, match="minmax"):
        normalize_scores(torch.ones(3), "softmax")
