"""Counting of entries against plain loops, and a quick record."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab import bench, records
from wqlab.bench.codebook_access import (
    HOTTEST,
    PARTS,
    CodebookAccessBench,
    _rows,
    by_book,
    hot_in_parts,
    part_counts,
    rank_correlation,
    steps,
    summary,
)
from wqlab.profile import environment

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any)


def spearman(a, b):
    """Rank correlation by its definition: Pearson's of the ranks, equal numbers at the mean of their places."""

    def ranks(numbers):
        return [sum(y < x for y in numbers) + (sum(y == x for y in numbers) - 1) / 2 for x in numbers]

    x, y = ranks(a), ranks(b)
    mx, my = math.fsum(x) / len(x), math.fsum(y) / len(y)
    above = math.fsum((i - mx) * (j - my) for i, j in zip(x, y, strict=True))
    return above / math.sqrt(math.fsum((i - mx) ** 2 for i in x) * math.fsum((j - my) ** 2 for j in y))


@given(COUNTS)
@settings(max_examples=50)
def test_a_summary_is_what_its_words_say(counts):
    n, total = len(counts), sum(counts)
    mean = total / n
    sigma = math.sqrt(math.fsum((c - mean) ** 2 for c in counts) / n)
    hot = [c for c in counts if c > mean + 3 * sigma]
    found = summary(np.array(counts))
    assert (found["entries"], found["accesses"], found["unused"]) == (n, total, counts.count(0))
    assert found["mean"] == pytest.approx(mean)
    assert found["sigma"] == pytest.approx(sigma, abs=1e-9)
    assert found["below_mean"] == pytest.approx(sum(c < mean for c in counts) / n)
    if sigma > 1e-9:  # else the last digit of the mean would decide
        assert found["hot"] == len(hot)
        assert found["hot_share"] == pytest.approx(sum(hot) / total)


@given(COUNTS)
@settings(max_examples=50)
def test_the_steps_hold_all_sorted_counts(counts):
    found = steps(np.array(counts))
    ends = [rank for rank, _ in found[1:]] + [len(counts)]
    again = [count for (rank, count), end in zip(found, ends, strict=True) for _ in range(end - rank)]
    assert again == sorted(counts, reverse=True)
    assert len(found) == len(set(counts))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 14))
@settings(max_examples=50)
def test_parts_are_runs_of_positions(read, parts):
    found = part_counts(np.array(read), 7, parts)
    assert found.shape == (parts, 7)
    sizes = found.sum(1)
    assert sizes.max() - sizes.min() <= 1
    ends = list(itertools.accumulate(sizes.tolist()))
    for row, begin, end in zip(found, [0, *ends], ends, strict=False):
        assert row.tolist() == [read[begin:end].count(entry) for entry in range(7)]


@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=2, max_size=5))
@settings(max_examples=50)
def test_rank_correlation_is_spearmans_over_pairs(by_part):
    ordered = [row for row in by_part if len(set(row)) > 1]
    found = rank_correlation(np.array(by_part))
    if len(ordered) < 2:
        assert math.isnan(found)
    else:
        pairs = [spearman(a, b) for a, b in itertools.combinations(ordered, 2)]
        assert found == pytest.approx(math.fsum(pairs) / len(pairs), abs=1e-9)


def test_hot_entries_are_looked_for_in_every_part():
    by_part = np.ones((2, 30), dtype=int)
    by_part[0, 4] = 100  # hot in the sum and in the first part, cold in the second
    assert hot_in_parts(by_part.sum(0), by_part) == 0.5
    by_part[1, 4] = 90
    assert hot_in_parts(by_part.sum(0), by_part) == 1
    assert math.isnan(hot_in_parts(np.ones(30), np.ones((2, 30))))


def test_codes_of_a_cache_are_grouped_by_codebook():
    codes = torch.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4) % 251
    found = by_book(codes.to(torch.uint8))
    assert found.shape == (12, 10)
    for head, group in itertools.product(range(3), range(4)):
        assert found[head * 4 + group].tolist() == codes[:, head, :, group].flatten().tolist()


def test_rows_leave_out_what_a_smaller_book_lacks():
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 32, (3, 240))
    indices[2, 96:] = -1
    rows = list(_rows("gptvq", "some", indices, 32, 8.0))
    summaries = [row for row in rows if row["kind"] == "summary"]
    assert [row["accesses"] for row in summaries] == [240, 240, 96]
    parts = [row for row in rows if row["kind"] == "parts"]
    assert len(parts) == HOTTEST * PARTS
    assert sum(row["count"] for row in parts) == np.sort(np.bincount(indices[0], minlength=32))[-HOTTEST:].sum()
    for row in parts:
        entry = np.argsort(-np.bincount(indices[0], minlength=32), kind="stable")[row["rank"]]
        assert row["count"] == (indices[0, 20 * row["part"] : 20 * row["part"] + 20] == entry).sum()


def test_a_quick_record_holds_weights_and_cache(tmp_path):
    bench.run("codebook_access", tmp_path, quick=True)
    data = records.read("codebook_access", environment.gpu_key(), tmp_path).data
    assert list(data.columns) == list(CodebookAccessBench.columns)
    summaries = data[data["kind"] == "summary"].set_index(["method", "tensor"])
    weights = summaries.loc[("quip", "self_attn.k_proj")]
    assert weights["accesses"].tolist() == [192 * 576 // 8] * 2
    assert weights["entry_bytes"].tolist() == [8.0] * 2
    cache = summaries.loc[("cq_2", "key")]
    assert len(cache) == 3 * 16
    assert cache["accesses"].eq(96).all()
    assert (cache["entry_bytes"].eq(8.0)).all()
    assert data.loc[(data["kind"] == "sorted") & (data["tensor"] == "key"), "book"].nunique() == 8
    assert summaries["hot_share"].between(0, 1).all()
    headlines = CodebookAccessBench().headlines(data)
    assert [h.claim for h in headlines] == ["table5-hot-quip", "table5-hot-cq-2"]
    assert headlines[1].ours == pytest.approx(summaries.loc["cq_2", "hot"].mean())
