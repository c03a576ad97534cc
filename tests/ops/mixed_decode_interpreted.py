"""The Triton kernel of `mixed_decode` on CPU tensors, in Triton's interpreter. test_mixed_decode_kernel.py runs this file in a
process of its own, with TRITON_INTERPRET set before anything imports triton. On a GPU, where each combination of compile-time
constants is compiled for seconds, a selection runs: the checks are the same, and more of them share a kernel."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from mixed_decode_cases import LIMITS, build, error, packed, truth

from wqlab.errors import UnsupportedError
from wqlab.ops.mixed_decode import MixedKV, Segment, explain, mixed_decode, reference, triton_kernel

DEVICE = "cpu" if triton_kernel.INTERPRETED else "cuda"
NAN = float("nan")
#: The shape of most kernels that are shared on a GPU. With windows of 32 and head_dim 64, up to 8 query tokens run the same one.
SHARED = {"kv_heads": 2, "group": 2}
#: Tokens that end inside a step. Triton compiles anew for counts that are not multiples of 16.
CUT = 9 if triton_kernel.INTERPRETED else 48


def every(values, on_gpu):
    """Return the values of a parameter: all in the interpreter, some where each costs a compilation."""
    return values if triton_kernel.INTERPRETED else on_gpu


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill the workspace and the output with NaN: whatever the kernel forgets to write shows."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(*size, NAN, **options))


def moved(value, device):
    """Return a query or a cache on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(v, device) for v in value)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return type(value)(**{name: moved(getattr(value, name), device) for name in value.__dataclass_fields__})


def check(query, cache, num_splits=None, scaling=None):
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = triton_kernel.attend(moved(query, DEVICE), moved(cache, DEVICE), factor, num_splits)
    assert result.dtype == query.dtype
    assert result.is_contiguous()
    assert error(result, truth(query, cache, scaling)) < LIMITS[query.dtype]
    assert error(result, reference.attend(query, cache, factor, torch.float64)) < LIMITS[query.dtype]
    return result


@pytest.mark.parametrize("head_dim", every([16, 64, 80, 96, 128, 256], on_gpu=[16, 64, 96, 256]))
def test_every_head_size_at_every_width(head_dim):
    check(*build(head_dim=head_dim, kv_heads=2, group=2, dense=32, int4=64, int2=32, tail=5), num_splits=2)


@pytest.mark.parametrize("head_dim", every([80, 96], on_gpu=[96]))
def test_masked_lanes_and_padded_channels_stay_outside_the_range(head_dim):
    # All values far from zero: a lane that reads 0 where it should read nothing would show.
    check(*build(head_dim=head_dim, **SHARED, int4=64, int2=64, tail=1, draw=lambda *shape: 2 + torch.rand(*shape)))


@pytest.mark.parametrize("group", every([1, 2, 3, 5, 7, 9, 16], on_gpu=[2, 7]))
def test_every_ratio_of_query_to_kv_heads(group):
    check(*build(group=group, kv_heads=2, int4=32, int2=32, tail=3), num_splits=2)


@pytest.mark.parametrize("q_len", [1, 2, 17, 64])
def test_query_tokens_are_causal_among_themselves(q_len):
    shape = {"group": 1 + (q_len < 64)} if triton_kernel.INTERPRETED else SHARED
    check(*build(q_len=q_len, **shape, dense=CUT, int4=32, tail=q_len))
    check(*build(q_len=q_len, **every({}, on_gpu=SHARED), int2=32, tail=q_len + 9), num_splits=2)


@pytest.mark.parametrize(
    ("dtype", "granularity"),
    every(
        [(torch.float32, "window_head"), (torch.float16, "window"), (torch.bfloat16, "window_channel")],
        on_gpu=[(torch.float32, "window_head"), (torch.bfloat16, "window_channel")],
    ),
)
def test_dtypes_and_granularities(dtype, granularity):
    check(*build(dtype=dtype, granularity=granularity, kv_heads=2, dense=32, int4=32, int2=32, tail=4, q_len=2), num_splits=2)


@pytest.mark.parametrize(
    "parts",
    every([{"int4": 32}, {"int2": 32}, {"dense": 32}, {"tail": 1}, {"dense": 1, "tail": 1}], on_gpu=[{"int4": 32}, {"tail": 1}]),
)
def test_empty_segments_and_tails(parts):
    query, cache = build(**parts, **every({}, on_gpu=SHARED))
    check(query, cache)
    check(query, MixedKV(tuple(s for s in cache.all() if s.tokens)))


@pytest.mark.parametrize("window_size", every([16, 48, 128, 5, 1], on_gpu=[48, 5]))
def test_windows_that_are_smaller_larger_or_no_multiple_of_a_step(window_size):
    check(*build(window_size=window_size, int4=2 * window_size, int2=3 * window_size, tail=2), num_splits=2)


def test_a_row_that_is_shorter_or_padded_gives_what_it_gives_alone():
    query, cache = build(batch=3, group=2, q_len=2, dense=32, int4=96, int2=64, tail=40)
    dense, int4, int2 = cache.segments
    padded = torch.arange(40) >= torch.tensor([0, 11, 38])[:, None]
    ragged = MixedKV(
        (
            Segment(dense.key, dense.value, torch.tensor([32, 32, 0])),
            Segment(int4.key, int4.value, torch.tensor([96, 32, 0], dtype=torch.int32)),
            Segment(int2.key, int2.value, torch.tensor([0, 64, 0])),
        ),
        Segment(cache.tail.key, cache.tail.value, mask=padded),
    )
    check(query, ragged, num_splits=1)
    whole = check(query, ragged, num_splits=3)
    # What lies in tokens that a row lacks is never used: NaN in values, and in the metadata of windows.
    for row in (1, 2):
        ragged.tail.key[row, :, ~padded[row]] = NAN
        ragged.tail.value[row, :, ~padded[row]] = NAN
    for side in (int4.key, int4.value):
        side.scale[1, :, 1:], side.minimum[2] = NAN, NAN
    dense.value[2] = NAN
    again = triton_kernel.attend(moved(query, DEVICE), moved(ragged, DEVICE), 64**-0.5, 3)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("window_size", every([32, 24], on_gpu=[32]))
def test_windows_that_only_the_mask_leaves_out_may_have_nan_for_metadata(window_size):
    query, cache = build(batch=2, int4=3 * window_size, tail=1, window_size=window_size)
    side = cache.segments[1]
    mask = torch.ones(2, 3 * window_size, dtype=torch.bool)
    mask[0, window_size : 2 * window_size], mask[1, 2 * window_size :] = False, False
    masked = MixedKV((Segment(side.key, side.value, mask=mask),), cache.tail)
    expected = check(query, masked)
    for tensor in (side.key.scale, side.key.minimum, side.value.scale, side.value.minimum):
        tensor[0, :, 1], tensor[1, :, 2] = NAN, NAN
    assert torch.equal(triton_kernel.attend(moved(query, DEVICE), moved(masked, DEVICE), 0.125), expected)


def test_lengths_of_the_tail_move_the_causal_edge():
    query, cache = build(batch=2, q_len=3, int4=32, tail=24)
    check(query, MixedKV(cache.segments, Segment(cache.tail.key, cache.tail.value, torch.tensor([24, 7]))))


def test_a_query_that_sees_nothing_gives_zero():
    query, cache = build(batch=2, tail=4, q_len=4)
    tail = Segment(cache.tail.key, cache.tail.value, mask=torch.tensor([[True] * 4, [False, False, True, True]]))
    result = triton_kernel.attend(moved(query, DEVICE), moved(MixedKV(tail=tail), DEVICE), 0.125)
    assert result[1, :, :2].eq(0).all()
    assert result.isfinite().all()
    assert torch.equal(result.cpu() == 0, reference.attend(query, MixedKV(tail=tail), 0.125) == 0)


@pytest.mark.parametrize("constant", [0.0, 3.1])
def test_constant_groups_are_exact(constant):
    query, cache = build(**SHARED, int4=32, int2=32, tail=1, draw=lambda *shape: torch.full(shape, constant))
    result = triton_kernel.attend(moved(query, DEVICE), moved(cache, DEVICE), 0.125, 2)
    assert torch.equal(result.cpu(), torch.full_like(query, constant))


def test_a_channel_far_from_zero():
    shape = every({"head_dim": 128, "group": 4}, on_gpu=SHARED)
    check(*build(**shape, int4=64, int2=64, tail=1, offset=300.0, draw=lambda *shape: 0.2 * torch.randn(*shape)))


def test_the_dtypes_last_finite_number_stays_finite():
    query, cache = build(**SHARED, int4=32, tail=1)
    side = cache.segments[1].value
    side.scale.fill_(8736.0)  # 15 steps from -65504 end at 65536, past float16's 65504
    side.minimum.fill_(-65504.0)
    side.codes.fill_(0xFF)
    result = triton_kernel.attend(moved(query, DEVICE), moved(cache, DEVICE), 0.125)
    assert torch.allclose(result.float().cpu(), reference.attend(query, cache, 0.125).float(), rtol=2e-3)
    assert result.isfinite().all()


def test_strided_operands_and_another_scaling():
    query, cache = build(batch=2, kv_heads=2, group=2, q_len=2, int4=32, tail=6)
    tail = cache.tail
    swapped = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, tail.key, tail.value))
    query, key, value = swapped
    room = torch.full((2, 2, 20, 64), NAN, dtype=value.dtype)
    room[:, :, :6] = value
    check(query, MixedKV(cache.segments, Segment(key, room[:, :, :6])), scaling=0.3)
    check(query, MixedKV(cache.segments, Segment(key.transpose(2, 3).contiguous().transpose(2, 3), value)))


def test_keys_and_values_of_different_widths():
    query, cache = build(int4=32, int2=32, tail=1)
    _, int4, int2 = cache.segments
    if triton_kernel.INTERPRETED:
        check(query, MixedKV((Segment(int4.key, int2.value), Segment(int2.key, int4.value)), cache.tail))
    _, eight = build(dense=32, tail=1, seed=3)
    key, value = (packed(x, 8) for x in (eight.segments[0].key, eight.segments[0].value))
    check(query, MixedKV((Segment(key, value), int2), cache.tail))


def test_repeats_are_bit_identical_and_the_order_of_segments_hardly_matters():
    query, cache = build(**every({"group": 3}, on_gpu=SHARED), dense=32, int4=64, int2=96, tail=7, q_len=3)
    first, again = (check(query, cache, num_splits=3) for _ in range(2))
    assert torch.equal(first, again)
    check(query, MixedKV(cache.segments[::-1], cache.tail), num_splits=3)


def test_the_public_function_names_what_the_kernel_cannot_do():
    query, cache = build(head_dim=320, int4=32, tail=1)
    with pytest.raises(UnsupportedError, match=r"head_dim = 320 is larger than 256.*backend='reference'"):
        mixed_decode(moved(query, DEVICE), moved(cache, DEVICE), backend="triton")
    query, cache = build(**SHARED, int4=32, tail=1)
    assert explain(moved(query, DEVICE), moved(cache, DEVICE), "triton").backend == "triton"
    result = mixed_decode(moved(query, DEVICE), moved(cache, DEVICE), backend="triton")
    assert error(result, truth(query, cache)) < LIMITS[query.dtype]


@settings(max_examples=every(10, on_gpu=60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(data):
    draw = data.draw
    if triton_kernel.INTERPRETED:
        kind = {
            "window_size": draw(st.sampled_from([8, 16, 32, 33])), "kv_heads": draw(st.integers(1, 2)),
            "group": draw(st.integers(1, 6)), "head_dim": draw(st.sampled_from([24, 64, 72, 80, 96, 128])),
            "granularity": draw(st.sampled_from(["window_channel", "window_head", "window"])),
            "dtype": draw(st.sampled_from([torch.float16, torch.float32])), "dense": draw(st.integers(0, 40)),
        }  # fmt: skip
    else:
        kind = {**SHARED, "window_size": 32, "dense": 16 * draw(st.integers(0, 20))}
    window_size = kind["window_size"]
    windows = draw(st.tuples(*[st.integers(0, every(64, on_gpu=2048) // window_size)] * 2))
    q_len = draw(st.integers(1, 6))
    query, cache = build(
        **kind, batch=draw(st.integers(1, every(2, on_gpu=4))), q_len=q_len, int4=windows[0] * window_size,
        int2=windows[1] * window_size, tail=q_len + draw(st.integers(0, 20)), seed=draw(st.integers(0, 99)),
        offset=draw(st.sampled_from([0.0, 30.0])),
    )  # fmt: skip
    segments = []
    for segment in cache.segments:
        lengths = st.lists(st.integers(0, segment.tokens), min_size=cache.batch, max_size=cache.batch)
        segments.append(Segment(segment.key, segment.value, torch.tensor(draw(lengths))))
    check(query, MixedKV(tuple(segments), cache.tail), num_splits=draw(st.integers(1, 3)))
