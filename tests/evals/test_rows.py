import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab.evals.scoring.rows import PAD, lay_out, option_log_probs, visible

TEXT = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def test_a_worked_example():
    rows = lay_out([[5, 6], [7]], [[[1], [2, 3]], [[4], []]], [10, 20])
    assert rows.trunk == 2
    assert rows.ids.tolist() == [[5, 6, 1, 2, 3], [0, 7, 4, 0, 0]]
    assert rows.branch.tolist() == [[0, 0, 1, 2, 2], [PAD, 0, 1, PAD, PAD]]
    assert rows.positions.tolist() == [[10, 11, 12, 12, 13], [0, 20, 21, 0, 0]]


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=4), st.lists(TEXT, min_size=2, max_size=3)), min_size=1, max_size=3))
def test_a_token_sees_the_trunk_and_its_own_branch_before_it(texts):
    held = torch.tensor([[0, 0, PAD]] * len(texts))
    rows = lay_out([t for t, _ in texts], [b for _, b in texts], [2] * len(texts))
    seen = visible(held, rows.branch)
    assert seen.shape == (len(texts), 1, rows.ids.shape[1], 3 + rows.ids.shape[1])
    assert bool(seen.any(-1).all()), "a token that sees nothing has no softmax"
    for row, (trunk, branches) in enumerate(texts):
        kinds = [0, 0, PAD, *rows.branch[row].tolist()]
        for column, kind in enumerate(rows.branch[row].tolist()):
            if kind == PAD:
                continue
            keys = [j for j in range(len(kinds)) if seen[row, 0, column, j]]
            assert keys == [j for j in range(3 + column + 1) if kinds[j] in (0, kind)]
            assert len(keys) - 1 == rows.positions[row, column], "a position is what is seen before it"
        ids = [rows.ids[row][rows.branch[row] == number].tolist() for number in range(len(branches) + 1)]
        assert ids == [trunk, *branches]


@given(st.lists(st.lists(TEXT, min_size=2, max_size=2), min_size=1, max_size=3))
def test_log_probs_are_sums_over_an_options_tokens(options):
    columns = max(sum(len(text) - 1 for text in row) for row in options)
    logits = torch.randn(len(options), 1 + columns, 10, generator=torch.Generator().manual_seed(0))
    found = option_log_probs(logits, options)
    scores = logits.double().log_softmax(-1)
    for row, texts in enumerate(options):
        column = 1
        for number, text in enumerate(texts):
            expected = scores[row, 0, text[0]]
            for token in text[1:]:
                expected = expected + scores[row, column, token]
                column += 1
            torch.testing.assert_close(found[row, number], expected, atol=1e-5, rtol=0)
