"""Mixed segments: the packed layer is its own dequantized copy, reordered, whatever is done to it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqlab import quantizers
from wqlab.cache.mixed import NONE, MixedSegments
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.evals.memory import held_bytes
from wqlab.ops.mixed_decode import mixed_decode

SIZE = 4


def pairs(granularity="window_channel", size=SIZE):
    return {bits: tuple(quantizers.create("rtn", bits, size, granularity, role) for role in ("key", "value")) for bits in (4, 2)}


def windows_of(starts, counts, most, size=SIZE):
    """Positions of each row's windows: row b has counts[b] of them from starts[b] on."""
    found = torch.full((len(starts), most, size), NONE)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        found[row, :count] = start + torch.arange(count * size).reshape(count, size)
    return found


def expected(x, windows, widths, name, granularity):
    """The dequantized copy, window by window and row by row."""
    out = x.clone()
    for row in range(x.shape[0]):
        for w, bits in enumerate(widths):
            places = windows[row, w]
            if bits == 16 or places[0] == NONE:
                continue
            quantizer = quantizers.create("rtn", bits, windows.shape[2], granularity, name)
            out[row : row + 1, :, places] = quantizer.dequantize(quantizer.quantize(x[row : row + 1, :, places]))
    return out


@st.composite
def layers(draw):
    batch, heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([3, 8, 16]))
    most = draw(st.integers(1, 5))
    counts = [draw(st.integers(0, most)) for _ in range(batch)]
    counts[0] = most
    starts = [draw(st.integers(0, 3)) for _ in range(batch)]
    prefill = max(s + c * SIZE for s, c in zip(starts, counts, strict=True)) + draw(st.integers(0, 5))
    widths = [draw(st.sampled_from([16, 4, 2])) for _ in range(most)]
    later = draw(st.lists(st.integers(1, 3), max_size=3))
    granularity = draw(st.sampled_from(["window_channel", "window_head", "window"]))
    torch.manual_seed(draw(st.integers(0, 99)))
    total = prefill + sum(later)
    key, value = (torch.randn(batch, heads, total, head_dim).half() for _ in range(2))
    windows = windows_of(starts, counts, most)
    layer = MixedSegments(pairs(granularity))
    layer.append(key[:, :, :prefill], value[:, :, :prefill])
    layer.encode(windows, widths)
    done = prefill
    for new in later:
        layer.append(key[:, :, done : done + new], value[:, :, done : done + new])
        done += new
    truth = [expected(x, windows, widths, name, granularity) for x, name in ((key, "key"), (value, "value"))]
    return layer, truth, (key, value), windows, widths


@given(layers())
def test_the_original_order_comes_back(made):
    layer, truth, original, windows, widths = made
    assert len(layer) == truth[0].shape[2]
    for got, want in zip(layer.dequantize(), truth, strict=True):
        assert torch.equal(got, want)
    encoded = torch.zeros(original[0].shape[0], len(layer), dtype=torch.bool)
    for w, bits in enumerate(widths):
        for row in range(len(encoded)):
            if bits != 16 and windows[row, w, 0] != NONE:
                encoded[row, windows[row, w]] = True
    untouched = ~encoded[:, None, :, None].expand_as(truth[0])
    assert torch.equal(layer.dequantize()[0][untouched], original[0][untouched])


@given(layers())
def test_each_width_is_contiguous_and_bytes_are_those_held(made):
    layer, _, _, windows, widths = made
    rows_have = (windows[:, :, 0] != NONE).sum(1)
    for bits in (4, 2):
        wanted = [w for w, width in enumerate(widths) if width == bits]
        tokens = sum(SIZE for w in wanted for have in rows_have if w < have)
        assert layer.tokens_per_width().get(bits, 0) == 2 * tokens
        assert (bits in layer.packed) == bool(wanted)
    assert sum(layer.tokens_per_width().values()) == 2 * len(windows) * len(layer)
    assert layer.nbytes() == sum(t.numel() * t.element_size() for t in layer.tensors()) == held_bytes(layer)


@given(layers(), st.integers(1, 3), st.sampled_from([1, 2, 3]))
def test_attention_over_the_parts_is_attention_over_the_dequantized_copy(made, q_len, ratio):
    layer, truth, *_ = made
    batch, heads, _, head_dim = truth[0].shape
    # As in a decode step: the query tokens' own keys and values are appended first.
    new = [torch.randn(batch, heads, q_len, head_dim).half() for _ in range(2)]
    layer.append(*new)
    key, value = (torch.cat(pair, 2) for pair in zip(truth, new, strict=True))
    total = len(layer)
    query = torch.randn(batch, heads * ratio, q_len, head_dim)
    visible = torch.arange(total)[None] >= (torch.arange(batch) % 2)[:, None]  # every second row is padded on the left
    got = mixed_decode(query, layer.parts(visible))
    causal = torch.arange(total)[None] <= (total - q_len + torch.arange(q_len))[:, None]
    mask = causal[None, None] & visible[:, None, None]
    repeated = [x.double().repeat_interleave(ratio, 1) for x in (key, value)]
    want = torch.nn.functional.scaled_dot_product_attention(query.double(), *repeated, attn_mask=mask)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@given(layers(), st.data())
def test_crop_equals_crop_of_the_dequantized_copy(made, data):
    layer, truth, *_ = made
    keep = data.draw(st.integers(1, len(layer)))
    layer.crop(keep)
    assert len(layer) == keep
    for got, want in zip(layer.dequantize(), truth, strict=True):
        assert torch.equal(got, want[:, :, :keep])
    assert layer.nbytes() == held_bytes(layer)
    more = torch.ones_like(truth[0][:, :, :2])
    layer.append(more, more)
    assert torch.equal(layer.dequantize()[0], torch.cat([truth[0][:, :, :keep], more], 2))


@given(layers(), st.data())
def test_rows_are_picked_and_repeated(made, data):
    layer, truth, *_ = made
    batch = truth[0].shape[0]
    rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4)))
    layer.select_rows(lambda t: t[rows])
    assert torch.equal(layer.dequantize()[1], truth[1][rows])
    layer.select_rows(lambda t: t.repeat_interleave(2, dim=0))
    assert torch.equal(layer.dequantize()[0], truth[0][rows].repeat_interleave(2, 0))


def test_a_beam_search_as_case_c4_has_it():
    torch.manual_seed(0)
    key, value = (torch.randn(3, 2, 200, 16).half() for _ in range(2))
    windows = windows_of([8, 8, 8], [5, 5, 5], 5, size=32)
    widths = [16, 4, 2, 4, 2]
    layer = MixedSegments(pairs(size=32))
    layer.append(key, value)
    layer.encode(windows, widths)
    want = [expected(x, windows, widths, n, "window_channel") for x, n in ((key, "key"), (value, "value"))]
    rows = torch.tensor([2, 0, 0])
    layer.select_rows(lambda t: t[rows])
    layer.crop(130)
    layer.select_rows(lambda t: t.repeat_interleave(2, 0))
    assert len(layer) == 130
    assert set(layer.packed) == {4, 2}
    for got, x in zip(layer.dequantize(), want, strict=True):
        assert torch.equal(got, x[rows][:, :, :130].repeat_interleave(2, 0))


def test_padding_is_in_no_window_and_changes_no_range():
    torch.manual_seed(0)
    key, value = (torch.rand(2, 1, 12, 8).half() + 2 for _ in range(2))
    key[1, :, :4], value[1, :, :4] = 1000, 1000  # what padding left behind
    windows = windows_of([0, 4], [3, 2], 3)
    layer = MixedSegments(pairs())
    layer.append(key, value)
    layer.encode(windows, [4, 4, 4])
    alone = MixedSegments(pairs())
    alone.append(key[1:, :, 4:], value[1:, :, 4:])
    alone.encode(windows_of([0], [2], 2), [4, 4])
    assert torch.equal(layer.dequantize()[0][1:, :, 4:], alone.dequantize()[0])


def test_bad_input_is_refused_and_changes_nothing():
    key = torch.randn(1, 1, 8, 4)
    layer = MixedSegments(pairs())
    with pytest.raises(ParameterError, match="nothing was appended"):
        layer.dequantize()
    with pytest.raises(ParameterError, match="nothing was appended"):
        layer.encode(windows_of([0], [1], 1), [4])
    layer.append(key, key)
    with pytest.raises(UnsupportedError, match="cannot be appended"):
        layer.append(key[..., :2], key[..., :2])
    with pytest.raises(ParameterError, match="bit width 3"):
        layer.encode(windows_of([0], [1], 1), [3])
    with pytest.raises(ParameterError, match="2 bit widths"):
        layer.encode(windows_of([0], [1], 1), [4, 4])
    bad = key.clone()
    bad[0, 0, 1, 0] = torch.nan
    poisoned = MixedSegments(pairs())
    poisoned.append(bad, key)
    with pytest.raises(NonFiniteError):
        poisoned.encode(windows_of([0], [2], 2), [4, 2])
    assert not poisoned.packed
    layer.encode(windows_of([0], [2], 2), [4, 2])
    with pytest.raises(ParameterError, match="encoded already"):
        layer.encode(windows_of([0], [2], 2), [4, 2])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_in_fragment_order_it_is_the_same_cache(head_dim):
    """Encode, crop, pick rows, attend: as in rows, to the bit."""
    torch.manual_seed(0)
    key, value = (torch.randn(2, 2, 230, head_dim).half() for _ in range(2))
    windows = windows_of([3, 10], [6, 4], 6, size=32)
    new = [torch.randn(3, 2, 2, head_dim).half() for _ in range(2)]
    query = torch.randn(3, 4, 2, head_dim).half()
    visible = torch.ones(3, 150, dtype=torch.bool)
    visible[1, :9] = False
    found = []
    for layout in ("bitpack-v1", "fragments-v1"):
        layer = MixedSegments(pairs(size=32), layout)
        layer.append(key, value)
        layer.encode(windows, [4, 2, 16, 2, 4, 2])
        at_first = layer.dequantize()
        assert {type(part.segment).__name__ for part in layer.packed.values()} == {
            "FragmentSegment" if layout == "fragments-v1" else "Segment"
        }
        assert layer.nbytes() == held_bytes(layer)
        layer.crop(148)
        layer.select_rows(lambda t: t[torch.tensor([1, 0, 1])])
        layer.append(*new)
        assert layer.nbytes() == held_bytes(layer)
        parts = layer.parts(visible)
        found.append((*at_first, *layer.dequantize(), mixed_decode(query, parts), mixed_decode(query, layer.parts())))
    for rows, fragments in zip(*found, strict=True):
        assert torch.equal(rows, fragments)
