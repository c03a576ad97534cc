"""Segments against a plain list of what was appended: order, bytes, growth, crop and row operations."""

import pytest
import torch

from wqlab.cache import policies
from wqlab.cache.segments import LayerSegments, TensorSegments
from wqlab.errors import NonFiniteError, ParameterError, UnsupportedError
from wqlab.quantizers import create
from wqlab.quantizers.rtn import RTNQuantizer


def segments(num_bits=4, granularity="window_channel", storage=None, **options):
    policy = policies.create("windowed", **{"window_size": 8, **options})
    return TensorSegments(create("rtn", num_bits, policy.window_size, granularity), policy, storage)


def add(held, x):
    held.append(held.prepare(x))


def values(seq, batch=1, heads=2, dim=6, seed=0):
    return torch.randn(batch, heads, seq, dim, generator=torch.Generator().manual_seed(seed)).half()


def twin(x, held):
    """What `held` must decode to after seeing `x`: head and tail as they are, whole windows through the quantizer."""
    head, encoded = held.policy.split(x.shape[2])
    middle = held.quantizer.dequantize(held.quantizer.quantize(x[:, :, head : head + encoded]))
    return torch.cat([x[:, :, :head], middle, x[:, :, head + encoded :]], 2)


@pytest.mark.parametrize("granularity", ["window_channel", "window_head", "window"])
@pytest.mark.parametrize("options", [{}, {"residual_length": 5}, {"sink_windows": 2, "residual_length": 3}])
@pytest.mark.parametrize("steps", [[40], [5, 1, 1, 1, 8, 17, 3], [1] * 30])
def test_any_way_of_appending_gives_the_same(granularity, options, steps):
    held = segments(granularity=granularity, **options)
    x = values(sum(steps))
    done = 0
    for step in steps:
        add(held, x[:, :, done : done + step])
        done += step
        assert torch.equal(held.dequantize(), twin(x[:, :, :done], held))
        assert held.nbytes() == sum(t.numel() * t.element_size() for t in held.tensors())
        assert len(held) == done
        assert sum(held.tokens_per_width.values()) == done


@pytest.mark.parametrize(("head_dim", "row_bytes"), [(96, 24), (80, 20), (33, 9)])
def test_bytes_are_the_formula(head_dim, row_bytes):
    held = segments(num_bits=2)
    add(held, values(19, heads=3, dim=head_dim))
    metadata = 2 * 2 * 3 * 2 * head_dim  # two windows, three heads, scale and minimum of 2 bytes
    assert held.nbytes() == 3 * 16 * row_bytes + metadata + 3 * 3 * head_dim * 2


def test_old_windows_are_never_encoded_again(monkeypatch):
    held, encoded = segments(), []
    original = RTNQuantizer.quantize
    monkeypatch.setattr(RTNQuantizer, "quantize", lambda self, x: encoded.append(x.shape[2]) or original(self, x))
    for i in range(40):
        add(held, values(1, seed=i))
    assert encoded == [8] * 5


def test_the_input_is_not_kept_alive():
    big = values(400)
    held = segments(window_size=32)
    add(held, big[:, :, 3:10])
    assert held.nbytes() == 7 * 2 * 6 * 2
    big.zero_()
    assert bool((held.dequantize() != 0).any())


def test_storage_dtype_is_what_is_held():
    held = segments(storage=torch.float16)
    add(held, values(19).float())
    assert {t.dtype for t in held.tensors()} == {torch.uint8, torch.float16}
    assert held.dequantize(torch.float32).dtype == torch.float32
    with pytest.raises(NonFiniteError, match=r"stored as torch.float16: 1 of 12"):
        held.prepare(torch.tensor([1e6] + [0.0] * 11).reshape(1, 2, 1, 6))


@pytest.mark.parametrize("keep", [0, 3, 15, 16, 20, 24, 31, 36, 38, 40])
def test_crop_equals_the_cropped_decoded_cache_and_still_grows(keep):
    held = segments(sink_windows=2, residual_length=3)
    add(held, values(38))
    expected = held.dequantize()[:, :, :keep]
    held.crop(keep)
    assert torch.equal(held.dequantize(), expected)
    assert held.nbytes() == sum(t.numel() * t.element_size() for t in held.tensors())
    add(held, values(30, seed=1))
    assert len(held) == min(keep, 38) + 30
    assert held.tail.shape[2] <= held.policy.max_tail()


def test_row_operations_equal_those_on_the_decoded_cache():
    held = segments(sink_windows=1)
    add(held, values(29, batch=3))
    expected = held.dequantize()
    rows = torch.tensor([2, 0, 0])
    held.select_rows(lambda t: t.index_select(0, rows))
    expected = expected.index_select(0, rows)
    assert torch.equal(held.dequantize(), expected)
    held.select_rows(lambda t: t.repeat_interleave(2, 0))
    expected = expected.repeat_interleave(2, 0)
    assert torch.equal(held.dequantize(), expected)
    held.select_rows(lambda t: t[1:2])
    assert torch.equal(held.dequantize(), expected[1:2])
    assert held.nbytes() == sum(t.numel() * t.element_size() for t in held.tensors())


def test_an_error_leaves_keys_and_values_as_they_were():
    layer = LayerSegments(segments(), segments())
    layer.append(values(5), values(5))
    bad = values(3)
    bad[0, 0, 1, 2] = torch.nan
    with pytest.raises(NonFiniteError):
        layer.append(values(3), bad)
    assert (len(layer.key), len(layer.value)) == (5, 5)
    with pytest.raises(UnsupportedError, match=r"\[2, 2, 6\] cannot be appended to a cache of \[1, 2, 6\]"):
        layer.append(values(1, batch=2), values(1, batch=2))


def test_an_empty_cache_says_so():
    held = segments()
    assert (len(held), held.nbytes(), held.tokens_per_width) == (0, 0, {})
    with pytest.raises(ParameterError, match="nothing was appended"):
        held.dequantize()
