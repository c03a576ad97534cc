"""Inputs that broke other caches, each for its whole kind: odd heads, constants, pads, beams and crops, borders; and the peak."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wqlab.errors import ParameterError, UnknownNameError, UnsupportedError
from wqlab.evals.memory import held_bytes
from wqlab.hf.attention import NAME, _attention
from wqlab.hf.capture import capture_importance
from wqlab.hf.window_cache import WindowQuantCache, windowquant
from wqlab.models.pocket import prompt
from wqlab.types import WindowPlan

OURS = SimpleNamespace(_attn_implementation=NAME)


def planned(widths, visual, size=32, **options):
    """A cache with one plan for all rows; visual [batch, prompt] bool, widths [layers][windows]."""
    widths = np.array(widths)
    counts = tuple(int(row.sum()) // size for row in visual)
    cache = WindowQuantCache(**options)
    cache.follow(WindowPlan(widths, size, counts, (0,) * len(visual), 2.0, "none", "given"), visual)
    return cache


def span(prompt_len, start, stop, rows=1):
    visual = torch.zeros(rows, prompt_len, dtype=torch.bool)
    visual[:, start:stop] = True
    return visual


def attend(cache, key, value, query, mask=None, layer=0):
    """What a model does in one pass of one layer: append, and attend by our function."""
    module = SimpleNamespace(config=OURS, num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    key, value = cache.update(key, value, layer)
    return _attention(module, query, key, value, mask, scaling=query.shape[-1] ** -0.5)[0].transpose(1, 2)


def sdpa(query, key, value, mask=None):
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query.double(), key, value, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 33, 64, 80, 96, 128, 256])
def test_head_sizes(head_dim, dtype):
    """C1: all values positive, so that a lane which reads 0 would stretch a range."""
    torch.manual_seed(0)
    key, value = ((torch.rand(1, 2, 140, head_dim) + 2).to(dtype) for _ in range(2))
    cache = planned([[16, 4, 2, 4]], span(140, 3, 131))
    attend(cache, key, value, torch.randn(1, 6, 140, head_dim).to(dtype))
    step = {16: 0.0, 4: 1 / 15, 2: 1 / 3}
    slack = 4 * torch.finfo(dtype).eps * 3  # the scale is rounded up, values and minimum to the dtype
    for held, x in zip(cache.layers[0].segments.dequantize(), (key, value), strict=True):
        for window, bits in enumerate([16, 4, 2, 4]):
            at = slice(3 + 32 * window, 35 + 32 * window)
            spread = (x[:, :, at].amax(2) - x[:, :, at].amin(2)).float().amax()
            error = (held[:, :, at] - x[:, :, at]).float().abs().max()
            assert error <= step[bits] * spread / 2 + slack
            assert bool(error > 0) == (bits < 16)
    new = [(torch.rand(1, 2, 1, head_dim) + 2).to(dtype) for _ in range(2)]
    query = torch.randn(1, 6, 1, head_dim).to(dtype)
    got = attend(cache, *new, query)
    want = sdpa(query, *cache.layers[0].segments.dequantize())
    assert ((got.double() - want).norm() / want.norm()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("granularity", ["window_channel", "window_head", "window"])
@pytest.mark.parametrize("value", [0.0, -7.25, 2048.0])
def test_constant_groups_are_exact(value, granularity):
    """C2: constant keys, one constant channel among others, a window of zeros."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 128, 8).half()
    constant = torch.full_like(x, value)
    cache = planned([[4, 2, 4, 2]] * 2, span(128, 0, 128), granularity=granularity)
    cache.update(constant, constant, 0)
    for held in cache.layers[0].segments.dequantize():
        assert torch.equal(held, constant)
    x[..., 3], x[:, :, 32:64] = value, 0
    cache.update(x, x, 1)
    held = cache.layers[1].segments.dequantize()[0]
    assert torch.isfinite(held).all()
    assert bool((held[:, :, 32:64] == 0).all())
    if granularity == "window_channel":
        assert bool((held[:, :, 64:, 3] == value).all())


def test_pads_change_nothing(pocket_model, pocket_processor):
    """C3: similarity, plan, importance, windows and tokens of a prompt are the same under any left padding."""
    rng = np.random.default_rng(0)
    video = rng.integers(0, 255, (2, 16, 16, 3), dtype=np.uint8)
    text = prompt.PREFIX + prompt.VIDEO + prompt.question("Which one is red?")
    alone = pocket_processor(text=[text], videos=[video])
    ids, mask = alone["input_ids"], alone["attention_mask"]
    pads = torch.full((1, 64), pocket_model.config.text_config.pad_token_id)
    padded = {
        "input_ids": torch.cat([pads, ids], 1),
        "attention_mask": torch.cat([torch.zeros_like(pads), mask], 1),
        "pixel_values_videos": alone["pixel_values_videos"],
    }
    meters = []
    for inputs in (alone, padded):
        with torch.no_grad(), capture_importance(pocket_model, inputs["attention_mask"]) as found:
            pocket_model(**inputs, use_cache=False)
        meters.append([meter.after_residual.value() for meter in found])
    np.testing.assert_allclose(meters[0], meters[1], rtol=1e-5)
    options = {"importance": meters[0], "alpha": 8.0, "normalize": "rank"}
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with windowquant(pocket_model, **options) as caches:
        tokens = [pocket_model.generate(**inputs, **how)[0, -5:].tolist() for inputs in (alone, padded)]
    assert tokens[0] == tokens[1]
    np.testing.assert_array_equal(caches[0].plan.bit_widths, caches[1].plan.bit_widths)
    assert len(np.unique(caches[0].plan.bit_widths)) > 1
    for one, two in zip(*(cache.layers for cache in caches), strict=True):
        assert one.segments.packed.keys() == two.segments.packed.keys()
        for bits, part in one.segments.packed.items():
            assert torch.equal(part.positions + 64, two.segments.packed[bits].positions)
            # A code may lie one step off where a sum over more (masked) keys has rounded otherwise.
            assert (part.segment.key.codes != two.segments.packed[bits].segment.key.codes).float().mean() < 0.01


def test_rows_of_96_and_160_tokens_read_as_alone():
    """C3: two rows of different length, padded to 160; each reads what it reads without the other."""
    torch.manual_seed(0)
    key, value = (torch.randn(2, 2, 160, 16) for _ in range(2))
    key[0, :, :64], value[0, :, :64] = 1e4, -1e4  # what pads left behind
    visual = torch.zeros(2, 160, dtype=torch.bool)
    visual[0, 64 + 10 : 64 + 74], visual[1, 10:138] = True, True
    widths = [[4, 2, 2, 4]]
    together = planned(widths, visual)
    together.update(key, value, 0)
    together.layers[0].read_by(OURS)
    new = [torch.randn(2, 2, 1, 16) for _ in range(2)]
    query = torch.randn(2, 4, 1, 16)
    mask = torch.ones(2, 1, 1, 161, dtype=torch.bool)
    mask[0, :, :, :64] = False
    got = attend(together, *new, query, mask)
    for row, first in ((0, 64), (1, 0)):
        single = planned([widths[0][: int(visual[row].sum()) // 32]], visual[row : row + 1, first:])
        single.update(key[row : row + 1, :, first:], value[row : row + 1, :, first:], 0)
        single.layers[0].read_by(OURS)
        want = attend(single, *(x[row : row + 1] for x in new), query[row : row + 1])
        torch.testing.assert_close(got[row : row + 1], want, rtol=1e-5, atol=1e-6)


def test_beams_and_crops():
    """C4: the same operations on the decoded copy, the length right after each, and attention over what is left."""
    torch.manual_seed(0)
    cache = planned([[16, 4, 2, 4, 2], [2, 2, 2, 2, 4]], span(200, 8, 168, rows=3))
    for layer in range(2):
        cache.update(*(torch.randn(3, 2, 200, 16) for _ in range(2)), layer)
        cache.layers[layer].read_by(OURS)
    twins = [list(layer.segments.dequantize()) for layer in cache.layers]

    def both(ours, theirs):
        ours()
        for index, layer in enumerate(cache.layers):
            twins[index] = [theirs(t) for t in twins[index]]
            assert all(torch.equal(a, b) for a, b in zip(layer.segments.dequantize(), twins[index], strict=True))
            assert cache.get_seq_length(index) == twins[index][0].shape[2]
            assert set(layer.segments.packed) == {4, 2} - ({4} if index and twins[index][0].shape[2] < 168 else set())
        assert cache.nbytes() == held_bytes([layer.segments for layer in cache.layers])

    rows = torch.tensor([2, 0, 0])
    both(lambda: cache.reorder_cache(rows), lambda t: t.index_select(0, rows))
    both(lambda: cache.crop(-70), lambda t: t[:, :, :130])
    both(lambda: cache.batch_repeat_interleave(2), lambda t: t.repeat_interleave(2, 0))
    both(lambda: cache.batch_select_indices(torch.tensor([5, 1])), lambda t: t[[5, 1]])
    # What is appended where windows were cut off stays in full precision.
    new = [torch.randn(2, 2, 64, 16) for _ in range(2)]
    query = torch.randn(2, 4, 64, 16)
    got = attend(cache, *new, query)
    causal = torch.ones(64, 194, dtype=torch.bool).tril(130)
    key, value = (torch.cat([held, x], 2) for held, x in zip(twins[0], new, strict=True))
    torch.testing.assert_close(got.double(), sdpa(query, key, value, causal), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("visual", [32, 33, 63, 64, 65])
@pytest.mark.parametrize("before", [0, 5])
def test_short_videos_and_two_hundred_steps(visual, before):
    """C5: whole windows are encoded, the rest of the video is not; each step reads all tokens; bytes are those held."""
    torch.manual_seed(0)
    prompt_len = before + visual + 3
    key, value = (torch.randn(1, 2, prompt_len + 200, 16) for _ in range(2))
    query = torch.randn(1, 4, prompt_len + 200, 16)
    cache = planned([[2, 4][: visual // 32]], span(prompt_len, before, before + visual))
    for start, stop in [(0, prompt_len), *((i, i + 1) for i in range(prompt_len, prompt_len + 200))]:
        got = attend(cache, key[:, :, start:stop], value[:, :, start:stop], query[:, :, start:stop])
        assert cache.get_seq_length() == stop
        if start and stop % 20 == 0:
            held = cache.layers[0].segments.dequantize()
            torch.testing.assert_close(got.double(), sdpa(query[:, :, start:stop], *held), rtol=1e-5, atol=1e-6)
    segments = cache.layers[0].segments
    error = (segments.dequantize()[0] - key).abs().amax((0, 1, 3))
    whole = visual // 32 * 32
    assert bool((error[before : before + whole] > 0).all())
    assert bool((error[:before] == 0).all())
    assert bool((error[before + whole :] == 0).all())
    assert cache.nbytes() == cache.report()["bytes_held"] == held_bytes([segments])


@pytest.mark.parametrize("frames", [0, 1])
def test_videos_that_are_shorter_than_a_window(pocket_model, pocket_processor, frames):
    """C5 and bad input: 0 and 64 visual tokens against windows of 128, twice, with nothing left behind by the refusal."""
    text = prompt.PREFIX + (prompt.VIDEO if frames else "") + prompt.question("Is it red?")
    videos = [np.zeros((frames, 8, 8, 3), np.uint8)] if frames else None
    inputs = pocket_processor(text=[text], videos=videos)
    with windowquant(pocket_model, window_size=128, importance=[0.5] * 3) as caches:
        for _ in range(2):
            with pytest.raises((ParameterError, UnsupportedError), match="128" if frames else "no visual tokens"):
                pocket_model.generate(**inputs, max_new_tokens=1)
    assert caches == []


@pytest.mark.parametrize(
    "options", [{"window_size": 0}, {"alpha": float("nan")}, {"window_unit": "seconds"}, {"scorer": "nearest"}]
)
def test_options_are_refused_by_name(pocket_model, pocket_processor, options):
    inputs = pocket_processor(
        text=[prompt.PREFIX + prompt.VIDEO + prompt.question("Is it red?")], videos=[np.zeros((2, 8, 8, 3), np.uint8)]
    )
    (value,) = options.values()
    with pytest.raises((ParameterError, UnknownNameError), match=str(value)):
        WindowQuantCache.prepare(pocket_model, inputs, importance=[0.5] * 3, **options)


def test_windows_of_whole_frames(pocket_model, pocket_processor):
    inputs = pocket_processor(
        text=[prompt.PREFIX + prompt.VIDEO + prompt.question("Is it red?")], videos=[np.zeros((4, 8, 8, 3), np.uint8)]
    )
    cache = WindowQuantCache.prepare(pocket_model, inputs, window_size=2, window_unit="frames", importance=[0.5] * 3)
    assert cache.plan.window_size == 128
    assert cache.plan.num_windows == 2


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, identity, size):
        self._known.discard(identity)
        self.now -= size


@pytest.mark.parametrize("widths", [[16] * 8, [16, *[4] * 7], [16, *[2] * 7], [16, 4, 2, 2, 16, 4, 2, 2]])
def test_the_peak_is_at_most_a_layer_above_full_precision(widths):
    """A prefill of 8 layers in FP16: keys and values of a layer come, are held, and are encoded before the next one's."""
    layers, tokens = 8, 8 * 32

    def prefill(cache):
        with Peak() as meter:
            for layer in range(layers):
                key, value = (torch.zeros(1, 4, tokens, 64, dtype=torch.float16) for _ in range(2))
                cache.update(key, value, layer)
                del key, value
        return meter.most

    one = 2 * 2 * 4 * tokens * 64
    full = prefill(WindowQuantCache())
    positions = 16 * layers * tokens  # four bytes a token and layer, and what makes them
    assert layers * one <= full <= (layers + 1) * one + positions
    assert prefill(planned([widths] * layers, span(tokens, 0, tokens))) <= full + one + positions
