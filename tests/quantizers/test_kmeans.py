"""k-means: a float64 Lloyd of the same start, scikit-learn's loss, monotone losses, weights, few points, seeds, bad inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from wqlab.errors import NonFiniteError, ParameterError
from wqlab.quantizers import kmeans


def points(books, n, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(books, n, size, generator=generator) @ torch.randn(books, size, size, generator=generator)


def lloyd(x, start, w, steps):
    """One book in float64, plainly; no entry may run empty. Returns the entries and the loss with the start and after each step."""
    x, entries, w = x.double(), start.double(), w.double()
    losses = []
    for step in range(steps + 1):
        nearest = (w[:, None] * (x[:, None] - entries).square()).sum(2).argmin(1)
        losses.append(float((w * (x - entries[nearest]).square()).sum()))
        if step < steps:
            entries = torch.stack([(w * x)[nearest == e].sum(0) / w[nearest == e].sum(0) for e in range(len(entries))])
    return entries, losses


def weights_of(kind, x):
    if kind == "none":
        return None
    shape = x.shape[:2] if kind == "point" else x.shape
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.1


@pytest.mark.parametrize("kind", ["none", "point", "coordinate"])
def test_steps_are_those_of_lloyd_in_float64(kind):
    x = points(3, 200, 3)
    w = weights_of(kind, x)
    start = x[:, :6] * 1.01
    found = kmeans.learn(x, 6, w, start=start, iterations=4)
    each = torch.ones_like(x) if w is None else w.reshape(3, 200, -1).expand_as(x)
    for book in range(3):
        entries, losses = lloyd(x[book], start[book], each[book], 4)
        torch.testing.assert_close(found.entries[book].double(), entries, rtol=1e-4, atol=1e-4)
        assert found.losses[book].tolist() == pytest.approx(losses, rel=1e-5)


@settings(max_examples=25)
@given(
    books=st.integers(1, 4),
    n=st.integers(1, 40),
    size=st.integers(1, 5),
    num_entries=st.integers(1, 50),
    kind=st.sampled_from(["none", "point", "coordinate"]),
    magnitude=st.sampled_from([1e-12, 1.0, 1e12]),
    seed=st.integers(0, 99),
)
def test_what_holds_for_all(books, n, size, num_entries, kind, magnitude, seed):
    x = points(books, n, size, seed) * magnitude
    w = weights_of(kind, x)
    found = kmeans.learn(x, num_entries, w, seed=seed)
    assert found.entries.shape == (books, num_entries, size)
    assert found.assignment.shape == (books, n)
    assert (found.losses.diff(dim=1) <= 0).all(), "a step raised the loss"
    assert torch.equal(found.counts.sum(1), torch.full((books,), n))
    for book in range(books):
        assert torch.equal(found.counts[book], torch.bincount(found.assignment[book], minlength=num_entries))
        assert not found.entries[book, found.counts[book] == 0].any()
    each = torch.ones_like(x) if w is None else w.reshape(books, n, -1).expand_as(x)
    used = found.entries.gather(1, found.assignment[..., None].expand_as(x))
    lost = (each.double() * (x.double() - used.double()).square()).sum((1, 2))
    torch.testing.assert_close(lost, found.losses[:, -1], rtol=1e-3, atol=1e-10 * magnitude**2)
    apart = (each[:, :, None].double() * (x[:, :, None].double() - found.entries[:, None].double()).square()).sum(3)
    apart = apart.masked_fill((found.counts == 0)[:, None], torch.inf)
    chosen = apart.gather(2, found.assignment[..., None]).squeeze(2)
    assert (chosen <= apart.amin(2) + 1e-4 * apart.amin(2) + 1e-6 * float(x.abs().max()) ** 2).all()
    again = kmeans.learn(x, num_entries, w, seed=seed)
    assert torch.equal(again.entries, found.entries)
    assert torch.equal(again.assignment, found.assignment)


@pytest.mark.parametrize(("size", "kind"), [(2, "none"), (4, "none"), (4, "point")])
def test_loss_is_about_that_of_scikit_learn(size, kind):
    x = points(4, 600, size)
    w = weights_of(kind, x)
    found = kmeans.learn(x, 24, w)
    other = [
        KMeans(24, n_init=1, random_state=0).fit(x[b].numpy(), sample_weight=None if w is None else w[b].numpy()).inertia_
        for b in range(4)
    ]
    assert float(found.losses[:, -1].sum()) < 1.06 * sum(other)


def test_far_apart_clusters_get_an_entry_each():
    """k-means++ finds all of ten clusters far from one another, where a random start misses some in nearly every book."""
    centres = torch.arange(10.0).mul(100).reshape(1, 10, 1, 1).expand(20, 10, 30, 2)
    x = (centres + torch.randn(20, 10, 30, 2, generator=torch.Generator().manual_seed(0))).reshape(20, 300, 2)
    found = kmeans.learn(x, 10)
    assert (found.counts == 30).all()


def test_more_entries_than_rounds_of_the_start(monkeypatch):
    x = points(2, 1200, 4)
    one_by_one = kmeans.learn(x, 200).losses[:, -1]
    monkeypatch.setattr(kmeans, "ROUNDS", 16)
    in_rounds = kmeans.learn(x, 200)
    assert (in_rounds.counts > 0).all()
    assert (in_rounds.losses[:, -1] < 1.1 * one_by_one).all()


def test_large_offsets_cost_nothing():
    x = points(2, 300, 4).double()
    plain, moved = kmeans.learn(x, 8), kmeans.learn(x + 1000, 8)
    assert torch.equal(plain.counts, moved.counts)
    torch.testing.assert_close(moved.losses[:, -1], plain.losses[:, -1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["none", "point", "coordinate"])
def test_fewer_different_points_than_entries(kind, recwarn):
    distinct = points(2, 5, 3)
    x = distinct.repeat(1, 7, 1)
    found = kmeans.learn(x, 9, weights_of(kind, x))
    if kind != "coordinate":  # there, copies of an entry that differ in the last digit may share its points
        assert ((found.counts > 0).sum(1) == 5).all()
    used = found.entries.gather(1, found.assignment[..., None].expand_as(x))
    torch.testing.assert_close(used, x, rtol=1e-5, atol=1e-5)
    assert not found.entries[found.counts == 0].any()
    assert not list(recwarn)
    same = kmeans.learn(torch.full((1, 6, 2), 3.0), 4)
    assert torch.equal(same.counts, torch.tensor([[6, 0, 0, 0]]))
    assert torch.equal(same.entries[0, 0], torch.tensor([3.0, 3]))


def test_an_entry_without_points_moves_to_the_point_that_loses_most():
    x = torch.tensor([[[0.0], [1], [2], [50]]])
    found = kmeans.learn(x, 3, start=torch.tensor([[[1.0], [-900], [-800]]]), iterations=1)
    # 50 loses most from 1, then 0 and 2 alike. The first entry goes to the mean, 13.25, where nothing is nearest to it any more.
    assert found.counts.tolist() == [[0, 1, 3]]
    assert found.entries[0, 1:, 0].tolist() in ([50, 0], [50, 2])
    done = kmeans.learn(x, 3, start=torch.tensor([[[1.0], [-900], [-800]]]))
    assert float(done.losses[0, -1]) == pytest.approx(0.5)


def test_points_without_weight_pull_nothing():
    x = torch.cat([points(1, 50, 2), torch.full((1, 10, 2), 1e4)], dim=1)
    w = torch.ones(1, 60)
    w[:, 50:] = 0
    found = kmeans.learn(x, 4, w)
    assert float(found.entries.abs().max()) < 1e3
    nothing = kmeans.learn(x, 4, torch.zeros(1, 60))
    assert torch.isfinite(nothing.entries).all()
    assert (nothing.losses == 0).all()
    # A coordinate that nobody weighs stays where the start left it; the other is learnt.
    half = torch.tensor([[[1.0, 0]]]).expand(1, 50, 2)
    found = kmeans.learn(x[:, :50], 50, half)
    assert float(found.losses[0, -1]) == pytest.approx(0, abs=1e-9)


def test_sums_do_not_depend_on_the_order():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 500, 3, generator=generator) * torch.exp(4 * torch.randn(2, 500, 3, generator=generator))
    places = torch.randint(0, 7, (2, 500), generator=generator)
    sums = kmeans.sum_by_entry(values, places, 7)
    shuffle = torch.randperm(500, generator=generator)
    assert torch.equal(sums, kmeans.sum_by_entry(values[:, shuffle], places[:, shuffle], 7))
    for entry in range(7):
        expected = (values.double() * (places == entry)[..., None]).sum(1)
        torch.testing.assert_close(sums[:, entry], expected, rtol=1e-12, atol=1e-8)
    assert not kmeans.sum_by_entry(torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64), 2).any()


@pytest.mark.parametrize("at_once", [1, 40, 300])
def test_assignment_in_pieces(at_once, monkeypatch):
    x, entries = points(3, 37, 2), points(3, 5, 2, seed=1)
    whole = kmeans.assign(x, entries)
    assert torch.equal(whole, torch.cdist(x.double(), entries.double()).argmin(2))
    monkeypatch.setitem(kmeans._AT_ONCE, "cpu", at_once)
    assert torch.equal(kmeans.assign(x, entries), whole)
    w = weights_of("coordinate", x)
    apart = (w[:, :, None].double() * (x[:, :, None] - entries[:, None]).double().square()).sum(3)
    assert torch.equal(kmeans.assign(x, entries, w), apart.argmin(2))


def test_bad_input_is_named():
    x = points(2, 10, 2)
    with pytest.raises(ParameterError, match=r"points \[10, 2\] are not \[books, n, vector_size\]"):
        kmeans.learn(x[0], 2)
    with pytest.raises(ParameterError, match=r"points \[2, 0, 2\]"):
        kmeans.learn(x[:, :0], 2)
    for options, match in (({"num_entries": 0}, "num_entries = 0"), ({"num_entries": 2, "iterations": -1}, "iterations = -1")):
        with pytest.raises(ParameterError, match=match):
            kmeans.learn(x, **options)
    with pytest.raises(ParameterError, match=r"weights \[2, 9\] are neither per point nor per coordinate"):
        kmeans.learn(x, 2, torch.ones(2, 9))
    with pytest.raises(ParameterError, match=r"the weight -1.0 is negative"):
        kmeans.learn(x, 2, -torch.ones(2, 10))
    with pytest.raises(ParameterError, match=r"start \[2, 3, 2\] is not \[2, 2, 2\]"):
        kmeans.learn(x, 2, start=x[:, :3])
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[0, 0, 0] = bad
        with pytest.raises(NonFiniteError, match="k-means: points: 1 of 40"):
            kmeans.learn(broken, 2)
        with pytest.raises(NonFiniteError, match="k-means: weights"):
            kmeans.learn(x, 2, torch.full((2, 10), bad))
        with pytest.raises(NonFiniteError, match="k-means: start"):
            kmeans.learn(x, 2, start=broken[:, :2])
