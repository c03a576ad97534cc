"""Against a slow twin in plain Python, known cases, and the limits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab.errors import ParameterError
from wqlab.simulate.bank_conflicts import INACTIVE, SCHEMES, Layout, frequencies, replay, zipf_indices
from wqlab.simulate.gpus import gpu


def twin(addresses, access_bytes):
    """The definition, lane by lane: (wavefronts, conflicts) of one warp."""

    def phase(lanes):
        words = [set() for _ in range(32)]
        for address in lanes:
            for byte in range(address, address + access_bytes, 4):
                words[byte // 4 % 32].add(byte // 4)
        return max(map(len, words))

    def agree(lanes, distance):
        pairs = [(lanes[i], lanes[i ^ distance]) for i in range(len(lanes))]
        return all(a == b or a < 0 or b < 0 for a, b in pairs)

    parts = access_bytes // 4
    size = 32 // parts
    groups = [addresses[i : i + size] for i in range(0, 32, size)]
    if parts > 1 and (agree(addresses, 1) or agree(addresses, 2)):  # the whole warp decides
        groups = [first + second for first, second in zip(groups[::2], groups[1::2], strict=True)]
    served = [phase([a for a in group if a >= 0]) for group in groups]
    return sum(served), sum(n - 1 for n in served if n)


@st.composite
def accesses(draw):
    size = draw(st.sampled_from([4, 8, 16]))
    most = draw(st.sampled_from([1, 2, 7, 40, 500]))
    unit = st.integers(0, most)
    lane = st.one_of(unit, st.just(-1)) if draw(st.booleans()) else unit
    rows = draw(st.lists(st.lists(lane, min_size=32, max_size=32), min_size=1, max_size=4))
    for row in rows:  # lanes that agree are rare by chance
        distance = draw(st.sampled_from([0, 0, 1, 2]))
        upto = draw(st.sampled_from([16, 32]))
        row[:upto] = [row[i & ~distance] for i in range(upto)]
    return size, [[x * size if x >= 0 else INACTIVE for x in row] for row in rows]


@settings(max_examples=400)
@given(accesses())
def test_equal_to_the_twin(drawn):
    size, rows = drawn
    found = replay(np.array(rows), size)
    assert list(zip(found.wavefronts.tolist(), found.conflicts.tolist(), strict=True)) == [twin(row, size) for row in rows]


@settings(max_examples=100)
@given(st.sampled_from(SCHEMES), st.sampled_from([4, 8, 16]), st.integers(1, 8), st.integers(1, 70), st.data())
def test_every_lookup_has_a_place_of_its_own(scheme, access, chunks, entries, data):
    padding = access * data.draw(st.integers(0, 3)) if scheme == "padded" else 0
    copies = data.draw(st.sampled_from([1, 2, 8, 32])) if scheme == "replicated" else 1
    layout = Layout(entries, access * chunks, access, scheme, padding, copies)
    places = {}
    for entry in range(entries):
        found = layout.addresses(np.full((1, 32), entry))[0]
        assert found.min() >= 0
        assert found.max() + access <= layout.shared_bytes
        for chunk in range(chunks):
            for lane in range(32):
                # Lanes of one copy share a place; nothing else does.
                assert places.setdefault(int(found[chunk, lane]), (entry, chunk, lane % copies)) == (entry, chunk, lane % copies)
    assert len(places) == entries * chunks * copies


@settings(max_examples=50)
@given(st.sampled_from([4, 8, 16]), st.integers(0, 2**32 - 1), st.floats(0, 3), st.integers(0, 20))
def test_more_entries_in_registers_never_cost_more(access, seed, skew, n_reg):
    layout = Layout(64, 16, access)
    indices = zipf_indices(20, 64, skew, seed)
    counts = [int(replay(layout.addresses(indices, n), access).wavefronts.sum()) for n in (n_reg, n_reg + 1, 64)]
    assert counts[0] >= counts[1] >= counts[2] == 0


def total(layout, indices, n_reg=0):
    found = replay(layout.addresses(indices, n_reg), layout.access_bytes)
    return int(found.wavefronts.sum()), int(found.conflicts.sum())


def test_known_patterns():
    lanes = np.arange(32)[None]
    assert total(Layout(32, 4), lanes) == (1, 0)  # a word per bank
    assert total(Layout(32, 128), lanes) == (32 * 32, 31 * 32)  # all in one bank, for each of 32 words
    assert total(Layout(32, 128, 4, "padded", 4), lanes) == (32, 0)
    assert total(Layout(32, 128, 4, "swizzled"), lanes) == (32, 0)
    assert total(Layout(32, 16, 16), lanes) == (4, 0)  # quarter warps
    assert total(Layout(32, 8, 8), lanes) == (2, 0)  # half warps
    assert total(Layout(32, 32, 16), lanes) == (16, 8)  # two loads; each quarter warp meets every second bank of 16 bytes twice
    same = np.zeros((1, 32), dtype=int)
    assert [total(Layout(1, n, n), same) for n in (4, 8, 16)] == [(1, 0), (1, 0), (2, 0)]
    assert total(Layout(4, 4), same, n_reg=1) == (0, 0)


def test_quarter_warps_are_served_together_only_where_the_whole_warp_agrees():
    lanes, layout = np.arange(32), Layout(64, 16, 16)
    assert total(layout, (lanes & ~1)[None]) == total(layout, (lanes & ~2)[None]) == (4, 2)
    # 16 different units in either half warp: two wavefronts, which would be one phase or two.
    assert total(layout, (lanes & ~4)[None]) == (4, 0)
    assert total(layout, np.where(lanes < 16, lanes & ~1, lanes)[None]) == (4, 0)
    assert total(layout, np.where(lanes < 16, lanes & ~1, lanes & ~2)[None]) == (4, 0)


@pytest.mark.parametrize("access", [4, 8, 16])
def test_a_copy_per_lane_of_a_phase_has_no_conflicts(access):
    layout = Layout(256, 16, access, "replicated", copies=128 // access)
    assert total(layout, zipf_indices(500, 256, 0.0, 1))[1] == 0


def test_random_lookups_cost_what_balls_in_bins_do():
    # 32 lanes throw words into 32 banks: the fullest bank gets 3.53 in the mean.
    wavefronts, _ = total(Layout(4096, 4), zipf_indices(20_000, 4096, 0.0, 0))
    assert wavefronts / 20_000 == pytest.approx(3.53, abs=0.03)


def test_frequencies_are_those_that_are_drawn():
    drawn = np.bincount(zipf_indices(20_000, 16, 1.0, 3).ravel(), minlength=16) / 640_000
    np.testing.assert_allclose(drawn, frequencies(16, 1.0), atol=0.003)
    assert (zipf_indices(4, 16, 1.0, 3) == zipf_indices(4, 16, 1.0, 3)).all()
    np.testing.assert_allclose(frequencies(5, 0.0), 0.2)


def test_many_accesses_are_replayed_in_parts():
    layout = Layout(512, 8, 4)
    indices = zipf_indices(20_000, 512, 0.5, 0)
    whole = replay(layout.addresses(indices), 4)
    some = [0, 8191, 8192, 16_383, 16_384, 39_999]
    rows = layout.addresses(indices).reshape(-1, 32)[some]
    assert whole.wavefronts[some].tolist() == [twin(row, 4)[0] for row in rows.tolist()]
    assert len(replay(np.zeros((0, 32), dtype=int), 8).wavefronts) == 0


def test_a_layout_that_does_not_fit_is_refused_with_both_sizes():
    Layout(4096, 48, 16).check(gpu("h200"))
    with pytest.raises(ParameterError, match=r"take 262144 bytes of shared memory; a block on H200 .* has at most 232448"):
        Layout(4096, 64, 16).check(gpu("h200"))
    with pytest.raises(ParameterError, match=r"take 196608 .* RTX 4090, .* 101376"):
        Layout(4096, 48, 16).check(gpu("rtx4090"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_entries": -4}, "num_entries = -4"),
        ({"num_entries": 0}, "1 or more"),
        ({"entry_bytes": -8}, "entry_bytes = -8"),
        ({"entry_bytes": 6}, "multiple of access_bytes = 4"),
        ({"access_bytes": 2}, "access_bytes = 2: a lane loads 4, 8 or 16"),
        ({"scheme": "padded", "padding_bytes": -4}, "padding_bytes = -4"),
        ({"padding_bytes": 4}, "only the scheme 'padded'"),
        ({"scheme": "replicated", "copies": 3}, "copies = 3"),
        ({"copies": 2}, "only the scheme 'replicated'"),
        ({"scheme": "diagonal"}, "'diagonal': known are contiguous"),
    ],
)
def test_layouts_that_cannot_be_are_refused(given, told):
    with pytest.raises(ParameterError, match=told):
        Layout(**{"num_entries": 16, "entry_bytes": 8, **given})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: Layout(16, 8).addresses(np.array([[16] * 32])), "16 to 16; the codebook has 0 to 15"),
        (lambda: Layout(16, 8).addresses(np.array([[-1] * 32])), "-1 to -1"),
        (lambda: Layout(16, 8).addresses(np.zeros((4, 16), dtype=int)), r"\[4, 16\]; they must be \[num_warps, 32\]"),
        (lambda: Layout(16, 8).addresses(np.zeros((1, 32), dtype=int), n_reg=-1), "n_reg = -1: must be 0 to 16"),
        (lambda: replay(np.full((1, 32), 4), 8), "multiples of access_bytes = 8"),
        (lambda: replay(np.full((1, 32), 1 << 30), 4), "far below 1 GiB"),
        (lambda: replay(np.zeros((1, 16), dtype=int), 4), r"\[1, 16\]; the last axis"),
        (lambda: replay(np.zeros((1, 32), dtype=int), 32), "access_bytes = 32"),
        (lambda: zipf_indices(-1, 16, 0.0, 0), "num_warps = -1"),
        (lambda: zipf_indices(1, 0, 0.0, 0), "num_entries = 0"),
        (lambda: zipf_indices(1, 16, -0.5, 0), "skew = -0.5"),
        (lambda: zipf_indices(1, 16, float("nan"), 0), "skew = nan"),
    ],
)
def test_accesses_that_cannot_be_are_refused(call, told):
    with pytest.raises(ParameterError, match=told):
        call()
