"""`mixed_decode` without a kernel: the reference against float64 SDPA, the choice of a backend, and what is refused."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_decode_cases import LIMITS, build, decode, error, packed, truth

from wqlab.cache.policies import WindowedPolicy
from wqlab.cache.segments import TensorSegments
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops.mixed_decode import MixedKV, PackedTensor, Segment, explain, mixed_decode, reference
from wqlab.quantizers import create


@settings(max_examples=40)
@given(data=st.data())
def test_the_reference_equals_sdpa_in_float64_on_the_decoded_cache(data):
    q_len = data.draw(st.integers(1, 64))
    query, cache = build(
        batch=data.draw(st.integers(1, 3)), kv_heads=data.draw(st.integers(1, 3)), group=data.draw(st.integers(1, 16)), q_len=q_len,
        head_dim=data.draw(st.sampled_from([1, 7, 64, 80, 96, 128, 256, 320])), dense=data.draw(st.integers(0, 40)),
        int4=32 * data.draw(st.integers(0, 2)), int2=32 * data.draw(st.integers(0, 2)), tail=q_len + data.draw(st.integers(0, 9)),
        granularity=data.draw(st.sampled_from(["window_channel", "window_head", "window"])),
        dtype=data.draw(st.sampled_from(list(LIMITS))), seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    segments = []
    for segment in cache.segments:
        lengths = st.lists(st.integers(0, segment.tokens), min_size=cache.batch, max_size=cache.batch)
        segments.append(Segment(segment.key, segment.value, torch.tensor(data.draw(lengths))))
    pads = torch.tensor(data.draw(st.lists(st.integers(0, cache.tail.tokens - q_len), min_size=cache.batch, max_size=cache.batch)))
    mask = torch.arange(cache.tail.tokens) >= pads[:, None]
    ragged = MixedKV(tuple(segments), Segment(cache.tail.key, cache.tail.value, mask=mask))
    expected = truth(query, ragged)
    assert error(reference.attend(query, ragged, query.shape[-1] ** -0.5, torch.float64), expected) < 1e-12
    assert error(mixed_decode(query, ragged), expected) < LIMITS[query.dtype]


@pytest.mark.parametrize("granularity", ["window_channel", "window_head", "window"])
@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_the_reference_decodes_as_the_quantizer_does(num_bits, granularity):
    for dtype in LIMITS:
        side = packed(3 + torch.randn(2, 2, 64, 80).to(dtype), num_bits, 16, granularity)
        assert torch.equal(reference.dequantize(side, torch.float64), decode(side))


def test_what_a_row_lacks_may_be_nan_and_a_query_that_sees_nothing_gives_zero():
    query, cache = build(batch=2, dense=8, int4=32, tail=4, q_len=2)
    dense, int4, _ = cache.segments
    dense.key[1, :, 5:], dense.value[1, :, 5:], int4.value.scale[0] = float("nan"), float("nan"), float("nan")
    segments = (Segment(dense.key, dense.value, torch.tensor([8, 5])), Segment(int4.key, int4.value, torch.tensor([0, 32])))
    assert mixed_decode(query, MixedKV(segments, cache.tail)).isfinite().all()
    nothing = Segment(cache.tail.key, cache.tail.value, torch.tensor([4, 0]))
    result = mixed_decode(query, MixedKV(tail=nothing))
    assert result[1].eq(0).all()
    assert result[0].ne(0).all()
    assert mixed_decode(query * float("nan"), cache).isnan().all()  # a broken query is not hidden


def test_the_segments_of_a_cache_fit_as_they_are():
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, 2, 150, 64).half()
    sides = []
    for x in (key, value):
        side = TensorSegments(create("rtn", 4, 32), WindowedPolicy(window_size=32))
        side.append(side.prepare(x))
        sides.append(side)
    encoded = [PackedTensor(s.packed, s.scale, s.minimum, 4, 32, 64) for s in sides]
    parts = [Segment(*encoded)]
    if sides[0].head is not None:
        parts.append(Segment(sides[0].head, sides[1].head))
    query = torch.randn(2, 4, 3, 64).half()
    result = mixed_decode(query, MixedKV(tuple(parts), Segment(sides[0].tail, sides[1].tail)))
    whole = MixedKV(tail=Segment(sides[0].dequantize(), sides[1].dequantize()))
    assert error(result, truth(query, whole)) < LIMITS[torch.float16]


def test_cpu_tensors_take_the_reference_and_the_kernel_is_refused_by_name(caplog):
    query, cache = build(int4=32, tail=1)
    assert explain(query, cache) == ("reference", "the query lies on cpu, and the kernels need a CUDA device")
    assert explain(query, cache, "reference").reason == "asked for by name"
    with caplog.at_level(logging.WARNING):
        mixed_decode(query, cache)
    assert not caplog.records
    with pytest.raises(UnsupportedError, match=r"lies on cpu.*backend='reference'"):
        mixed_decode(query, cache, backend="triton")
    with pytest.raises(UnsupportedError, match=r"'cuda' cannot serve.*one dense one can be served"):
        mixed_decode(query, cache, backend="cuda")
    with pytest.raises(ParameterError, match="'hip' is not one of auto, cuda, triton, reference"):
        mixed_decode(query, cache, backend="hip")


def refused(error_class, match, call):
    with pytest.raises(error_class, match=match):
        call()


def test_queries_that_do_not_fit_are_refused():
    query, cache = build(kv_heads=2, q_len=3, int4=32, tail=3)
    refused(ParameterError, r"\[2, 3, 64\] is not", lambda: mixed_decode(query[0], cache))
    refused(ParameterError, "batch 1, 2 KV heads", lambda: mixed_decode(query[:, :1], cache))
    refused(ParameterError, "head_dim 64", lambda: mixed_decode(query[..., :32], cache))
    refused(UnsupportedError, "torch.float64", lambda: mixed_decode(query.double(), cache))
    refused(ParameterError, "scaling = inf", lambda: mixed_decode(query, cache, scaling=float("inf")))
    refused(ParameterError, "3 query tokens, but the tail holds 0", lambda: mixed_decode(query, MixedKV(cache.segments)))
    refused(
        ParameterError,
        "parts of the cache on meta",
        lambda: mixed_decode(query, MixedKV((on_meta(cache.segments[0]),), cache.tail)),
    )


def on_meta(segment):
    return Segment(segment.key.to("meta"), segment.value.to("meta"))


def test_caches_that_contradict_themselves_are_refused():
    _, cache = build(batch=2, dense=4, int4=32, tail=3)
    dense, int4, _ = cache.segments
    side, tail = int4.key, cache.tail
    refused(ParameterError, "nothing to attend to", MixedKV)
    refused(ParameterError, "tail is packed", lambda: MixedKV(tail=int4))
    refused(ParameterError, "differ in", lambda: MixedKV((Segment(dense.key[:1], dense.value[:1]),), tail))
    refused(ParameterError, "packed key and a dense value", lambda: Segment(side, dense.value))
    refused(ParameterError, r"value \[2, 1, 3, 64\]", lambda: Segment(dense.key, tail.value))
    refused(UnsupportedError, "torch.int32", lambda: Segment(dense.key.int(), dense.value))
    refused(ParameterError, r"between 0 and the 4 tokens", lambda: Segment(dense.key, dense.value, torch.tensor([4, 5])))
    refused(ParameterError, r"lengths \[1\]", lambda: Segment(dense.key, dense.value, torch.tensor([4])))
    refused(ParameterError, r"mask \[2, 3\]", lambda: Segment(dense.key, dense.value, mask=torch.ones(2, 3, dtype=torch.bool)))
    refused(ParameterError, "whole windows of 24", lambda: PackedTensor(side.codes, side.scale, side.minimum, 4, 24, 64))
    refused(ParameterError, "take 16 bytes", lambda: PackedTensor(side.codes, side.scale, side.minimum, 2, 32, 64))
    refused(ParameterError, "num_bits = 3", lambda: PackedTensor(side.codes, side.scale, side.minimum, 3, 32, 64))
    refused(UnsupportedError, "torch.float64", lambda: PackedTensor(side.codes, side.scale.double(), side.minimum, 4, 32, 64))
    refused(ParameterError, "must both be", lambda: PackedTensor(side.codes, side.scale[..., :2], side.minimum[..., :2], 4, 32, 64))
