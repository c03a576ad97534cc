"""Packed windows to halfs: the kernel's own source on an emulated GPU, against what each segment says its keys and values are."""

import dataclasses

import emulated
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab import codegen
from wqlab.bench.decode_caches import Shape, random_cache
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.layouts import fragments
from wqlab.ops.mixed_decode import MixedKV, Segment, dequantizer, reference


def outputs(cache):
    size = (cache.batch, cache.num_kv_heads, sum(s.tokens for s in cache.all()), cache.head_dim)
    return tuple(torch.full(size, torch.nan, dtype=torch.float16) for _ in range(2))


def emulate(cache, multiprocessors=132, copy_dense=True):
    key, value = outputs(cache)
    call = dequantizer.prepare(cache, key, value, multiprocessors, copy_dense)
    loaded = emulated.library(dequantizer.source(cache.head_dim), "dequantize")
    emulated.launch(loaded, call.arguments, call.grid, call.threads, call.shared_bytes)
    return key, value


def random(batch=2, kv_heads=2, seq_len=320, head_dim=128, mix="10/30/60", seed=0):
    return random_cache(Shape(batch, kv_heads, kv_heads, seq_len, head_dim), mix, torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["fp16", "int4", "int2", "10/30/60"]), st.sampled_from([64, 128]), st.integers(1, 3), st.integers(1, 2),
    st.integers(10, 14), st.integers(1, 4), st.integers(0, 99),
)  # fmt: skip
def test_it_is_the_segments_own_decoding_to_the_bit(mix, head_dim, batch, kv_heads, windows, multiprocessors, seed):
    """Few multiprocessors, so that programs take several blocks, through both buffers and all widths."""
    cache = random(batch, kv_heads, 32 * windows, head_dim, mix, seed)
    want = outputs(cache)
    dequantizer.decode_into(cache, *want)
    got = emulate(cache, multiprocessors)
    assert all(bool(x.isfinite().all()) for x in want)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("window_size", [64, 96])
def test_windows_of_several_blocks_and_tails_that_end_anywhere(window_size):
    cache = random(seq_len=2 * window_size, mix="int4")
    (one,) = cache.segments
    wide = dataclasses.replace(one, meta=one.meta[:, :, :2].contiguous(), window_size=window_size)
    spread = torch.randn(2, 2, 77, 3 * 128).half()
    tail = Segment(spread[..., 128:256], torch.randn(2, 2, 77, 128).half())
    cache = MixedKV((wide,), tail)
    want = outputs(cache)
    dequantizer.decode_into(cache, *want)
    assert all(torch.equal(*pair) for pair in zip(emulate(cache, 1), want, strict=True))
    key, value = emulate(cache, copy_dense=False)
    assert bool(key[:, :, 2 * window_size :].isnan().all())
    assert torch.equal(value[:, :, : 2 * window_size], want[1][:, :, : 2 * window_size])


def test_the_ends_of_the_range_stay_finite():
    cache = random(1, 1, 32, 64, "int2")
    (one,) = cache.segments
    parts = [torch.full((1, 1, 1, 64), x).half() for x in (30000.0, -20000.0, 44000.0, -65504.0)]
    cache = MixedKV((dataclasses.replace(one, meta=fragments.pack_meta(*parts)),))
    key, value = emulate(cache)
    assert torch.equal(key, reference.dequantize(cache.segments[0].key, torch.float16))
    assert torch.equal(value, reference.dequantize(cache.segments[0].value, torch.float16))
    assert key.max() == 65504


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_bits", [2, 4])
def test_every_code_has_a_place_of_its_own(num_bits, head_dim):
    places = dequantizer.code_places(num_bits, head_dim)
    assert torch.equal(places.flatten().sort().values, torch.arange(places.numel()) * num_bits)
    assert torch.equal(dequantizer.meta_places(head_dim).flatten().sort().values, torch.arange(4 * head_dim))


def test_what_it_cannot_serve_is_said():
    cache = random()
    key, value = outputs(cache)
    with pytest.raises(ParameterError, match=r"decodes to float16 \[2, 2, 320, 128\]"):
        dequantizer.decode_into(cache, key[:, :, 1:], value)
    with pytest.raises(ParameterError, match="contiguous"):
        dequantizer.prepare(cache, key.transpose(2, 3).contiguous().transpose(2, 3), value, 132)
    rows = random_cache(Shape(2, 2, 2, 320, 128), "int4", torch.Generator().manual_seed(0), fragments=False)
    with pytest.raises(UnsupportedError, match="decode_into"):
        dequantizer.prepare(rows, key, value, 132)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_compiles_for_sm_90_without_spills(head_dim):
    usage = codegen.compile_cubin(dequantizer.source(head_dim), arch="sm_90").usage["dequantize"]
    assert not usage.spills
    assert usage.registers * dequantizer._RESIDENT_THREADS <= 65536


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_it_compiles_for_older_gpus_without_spills(arch):
    assert not codegen.compile_cubin(dequantizer.source(128), arch=arch).usage["dequantize"].spills


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mix", ["int4", "int2", "10/30/60"])
def test_on_a_gpu(head_dim, mix):
    shape = Shape(3, 4, 4, 32 * 41, head_dim)
    cache = random_cache(shape, mix, torch.Generator("cuda").manual_seed(0))
    want, got = ([x.cuda() for x in outputs(cache)] for _ in range(2))
    dequantizer.decode_into(cache, *want)
    dequantizer.prepared(cache, *got).launch()
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
