import dataclasses
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab import registry
from wqlab.errors import NonFiniteError, ParameterError, UnknownNameError
from wqlab.windows import scorers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def pearson(a, b):
    return np.corrcoef(a, b)[0, 1]


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def distance(a, b):
    return np.linalg.norm(a - b)


def pairwise(name, text, tokens, span):
    """The definitions in float64, pair by pair, one window after the other."""
    pair = {"cosine": cosine, "pearson": pearson, "euclidean": distance}[name]
    text, tokens = text.double().numpy(), tokens.double().numpy()
    means = []
    for start in range(0, len(tokens) - span + 1, span):
        means.append(np.mean([pair(t, w) for t in text for w in tokens[start : start + span]]))
    return 1 / (1 + np.array(means)) if name == "euclidean" else np.array(means)


def rows(lengths, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(3 * torch.randn(n, width, generator=generator) + 0.5).to(dtype) for n in lengths]


def made(name, width):
    """Return a scorer for rows of this width: one that reads attention has a number for each of its layers."""
    return scorers.create(name, **({"layers": tuple(range(width))} if name == "attention" else {}))


batches = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 15)), min_size=1, max_size=3)


@given(
    st.sampled_from(["cosine", "pearson", "euclidean"]), batches, st.integers(1, 5), st.integers(3, 12), st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)  # fmt: skip
def test_ragged_batches_equal_the_pairwise_definition_row_by_row(name, lengths, span, width, dtype, seed):
    text = rows([n for n, _ in lengths], width, dtype, seed)
    visual = rows([span + m for _, m in lengths], width, dtype, seed + 1)
    got = scorers.create(name).score(text, visual, window_size=span)
    assert got.windows_per_row == tuple(len(v) // span for v in visual)
    assert got.tail_tokens == tuple(len(v) % span for v in visual)
    assert got.values.dtype == torch.float64
    for row, count in enumerate(got.windows_per_row):
        want = pairwise(name, text[row], visual[row], span)
        np.testing.assert_allclose(got.values[row, :count].numpy(), want, rtol=1e-9, atol=1e-11)
        assert got.values[row, count:].isnan().all()


@pytest.mark.parametrize("name", registry.names("scorer"))
def test_padding_may_hold_anything(name):
    text, visual = rows([2, 5], 6, torch.float32, 0), rows([9, 4], 6, torch.float32, 1)
    want = made(name, 6).score(text, visual, window_size=4)
    padded = [torch.nn.utils.rnn.pad_sequence(r, batch_first=True, padding_value=torch.nan) for r in (text, visual)]
    got = made(name, 6).score(*padded, window_size=4, text_lengths=[2, 5], visual_lengths=[9, 4])
    torch.testing.assert_close(got.values, want.values, rtol=0, atol=1e-15, equal_nan=True)
    assert (got.windows_per_row, got.tail_tokens, got.window_size, got.scorer) == ((2, 1), (1, 0), 4, name)


@pytest.mark.parametrize("name", registry.names("scorer"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scorer_gives_one_finite_score_per_window(name, dtype):
    scorer = made(name, 8)
    assert scorer.name == name
    assert dataclasses.is_dataclass(scorer)
    text, visual = rows([3], 8, dtype, 0)[0], rows([11], 8, dtype, 1)[0]
    double, single = (scorer.score(text, visual, window_size=4, dtype=d).values for d in (torch.float64, torch.float32))
    assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
    assert double.shape == single.shape == (1, 2)
    assert double.isfinite().all()
    if name != "random":  # which draws other numbers per dtype
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


def test_one_row_serves_all_rows_of_the_other():
    prompts, visual = rows([2, 3, 1], 6, torch.float32, 0), rows([8], 6, torch.float32, 1)[0]
    together = scorers.create("cosine").score(prompts, visual, window_size=4).values
    alone = [scorers.create("cosine").score(p, visual, window_size=4).values for p in prompts]
    torch.testing.assert_close(together, torch.cat(alone))


def test_windows_of_frames():
    text, visual = rows([2], 6, torch.float32, 0)[0], rows([25], 6, torch.float32, 1)[0]
    frames = scorers.create("cosine").score(text, visual, window_size=2, window_unit="frames", tokens_per_frame=6)
    tokens = scorers.create("cosine").score(text, visual, window_size=12)
    assert torch.equal(frames.values, tokens.values)
    assert (frames.window_size, frames.windows_per_row, frames.tail_tokens) == (12, (2,), (1,))


def test_vectors_without_a_direction_count_as_zero():
    text = torch.randn(2, 5)
    assert scorers.create("cosine").score(text, torch.zeros(4, 5), window_size=4).values.tolist() == [[0]]
    # 0.1 is no binary fraction: its mean is off by rounding, its correlation must not be.
    assert scorers.create("pearson").score(text, torch.full((4, 5), 0.1), window_size=4).values.tolist() == [[0]]
    tiny = torch.full((4, 5), 1e-30)
    assert scorers.create("cosine").score(torch.ones(1, 5), tiny, window_size=4, dtype=torch.float32).values.abs().max() <= 1


def test_autocast_and_gradients_stay_outside():
    text, visual = rows([3], 64, torch.float32, 0)[0].requires_grad_(), rows([8], 64, torch.float32, 1)[0]
    want = scorers.create("cosine").score(text, visual, window_size=4, dtype=torch.float32).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = scorers.create("cosine").score(text, visual, window_size=4, dtype=torch.float32).values
    assert torch.equal(got, want)
    assert not got.requires_grad


def test_random_scores_follow_their_seed():
    visual = torch.ones(40, 4)
    first, same, other = (scorers.create("random", seed=s).score(visual, visual, window_size=4).values for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert scorers.create("uniform", value=0.25).score(visual, visual, window_size=4).values.tolist() == [[0.25] * 10]


@pytest.mark.parametrize("name", ["cosine", "pearson", "euclidean"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["text", "visual"])
def test_what_is_not_finite_is_refused_with_its_row_or_carried_as_nan(name, bad, where):
    text, visual = rows([2, 3], 6, torch.float32, 0), rows([8, 8], 6, torch.float32, 1)
    {"text": text, "visual": visual}[where][1][1, 2] = bad
    with pytest.raises(NonFiniteError, match=f"{name}: embeddings of row 1 "):
        scorers.create(name).score(text, visual, window_size=4)
    late = scorers.create(name).score(text, visual, window_size=4, check=False).values
    assert late[0].isfinite().all()
    assert late.isnan().tolist() == [[False, False], [True, where == "text"]]


@pytest.mark.parametrize("name", ["cosine", "pearson"])
def test_a_norm_that_overflows_is_not_finite(name):
    text, visual = rows([2], 6, torch.float32, 0)[0], rows([8], 6, torch.float32, 1)[0]
    huge = 1e25 * visual
    late = scorers.create(name).score(text, torch.cat([visual, huge]), window_size=4, dtype=torch.float32, check=False).values
    assert late.isnan().tolist() == [[False, False, True, True]]
    with pytest.raises(NonFiniteError, match="overflow"):
        scorers.create(name).score(huge, visual, window_size=4, dtype=torch.float32)
    assert scorers.create(name).score(text, huge, window_size=4).values.isfinite().all()  # in float64


def test_nan_in_the_tail_does_no_harm():
    visual = torch.ones(9, 4)
    visual[8] = torch.nan
    assert scorers.create("cosine").score(torch.ones(1, 4), visual, window_size=4).values.isfinite().all()


ROWS = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("text", "visual", "options", "says"),
    [
        (ROWS[:0], ROWS, {}, "prompt of row 0 is empty.*at least one"),
        ([ROWS, ROWS[:0]], [ROWS, ROWS], {}, "prompt of row 1 is empty"),
        (ROWS, [ROWS, ROWS[:1]], {}, r"row 1 is shorter than one window: it has 1 .*the window 2.*at most 1 tokens"),
        (ROWS, ROWS[:0], {}, "no visual tokens"),
        (ROWS, ROWS, {"window_size": 0}, "window_size = 0 .*at least 1"),
        (ROWS, ROWS, {"window_size": 2.0}, "window_size = 2.0"),
        (ROWS, ROWS, {"window_size": 4}, "at most 3 tokens"),
        (ROWS, ROWS, {"window_unit": "seconds"}, "'seconds'.*tokens, frames"),
        (ROWS, ROWS, {"window_unit": "frames"}, "tokens_per_frame = None"),
        (ROWS, ROWS, {"window_unit": "frames", "tokens_per_frame": 0}, "tokens_per_frame = 0"),
        (ROWS, torch.ones(3, 5), {}, "width 4, visual ones 5"),
        ([ROWS, ROWS], [ROWS, ROWS, ROWS], {}, "2 rows of text do not fit 3"),
        (torch.ones(3, dtype=torch.long), ROWS, {}, r"text \(3,\)"),
        (torch.ones(3, 4, dtype=torch.long), ROWS, {}, "not token ids"),
        ([], ROWS, {}, "at least one"),
        ([ROWS, torch.ones(2, 5)], ROWS, {}, "one D"),
        (ROWS, ROWS, {"visual_lengths": [4]}, "0 to 3"),
        (ROWS, ROWS, {"visual_lengths": [2, 2]}, "one per row"),
        ([ROWS], ROWS, {"text_lengths": [2]}, "leave them out"),
    ],
)
def test_refuses_by_name_and_with_the_way_out(text, visual, options, says):
    with pytest.raises(ParameterError, match=says):
        scorers.create("cosine").score(text, visual, **{"window_size": 2, **options})


def test_refuses_options():
    with pytest.raises(UnknownNameError, match="did you mean cosine"):
        scorers.create("cosin")
    with pytest.raises(ParameterError, match=r"no option 'sede'.*seed"):
        scorers.create("random", sede=1)
    with pytest.raises(ParameterError, match="seed = -1"):
        scorers.create("random", seed=-1)
    with pytest.raises(ParameterError, match="value = nan"):
        scorers.create("uniform", value=torch.nan)


def test_a_new_scorer_is_one_file(tmp_path, monkeypatch):
    package = tmp_path / "plugin_scorers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "brightness.py").write_text(
        textwrap.dedent("""
            from dataclasses import dataclass

            from wqlab.registry import register
            from wqlab.windows.scorers import Scorer

            @register("scorer", "brightness")
            @dataclass(frozen=True)
            class BrightnessScorer(Scorer):
                name = "brightness"
                gain: float = 1.0

                def compare(self, batch):
                    return self.gain * batch.windows.mean((2, 3))
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._PACKAGES, "scorer", [*registry._PACKAGES["scorer"], "plugin_scorers"])
    monkeypatch.setitem(registry._ENTRIES, "scorer", dict(registry._ENTRIES["scorer"]))
    try:
        assert "brightness" in registry.names("scorer")
        visual = torch.arange(8.0)[:, None].expand(8, 3)
        assert scorers.create("brightness", gain=2.0).score(visual, visual, window_size=4).values.tolist() == [[3, 11]]
    finally:
        for name in [n for n in sys.modules if n.startswith("plugin_scorers")]:
            del sys.modules[name]
