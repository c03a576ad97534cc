"""The CUDA kernel: its own source run on an emulated GPU, its host side, and what it compiles to for real ones."""

import dataclasses

import emulated
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_decode_cases import error, truth

from wqlab import codegen, quantizers
from wqlab.cache.mixed import MixedSegments
from wqlab.errors import ParameterError
from wqlab.ops.mixed_decode import MixedKV, Segment, cuda_kernel, explain, mixed_decode
from wqlab.ops.mixed_decode.operands import FragmentSegment, PackedTensor

LIMIT = 2e-3  # ||out - truth|| / ||truth|| in float16


@dataclasses.dataclass
class Exact:
    """A packed side in float64, not rounded to halfs: what the kernel computes with."""

    side: PackedTensor

    @property
    def values(self):
        x = self.side
        from wqlab.layouts import bitpack

        codes = bitpack.unpack(x.codes, x.num_bits, x.head_dim).double().unflatten(2, (-1, x.window_size))
        return (codes * x.scale.double().unsqueeze(3) + x.minimum.double().unsqueeze(3)).flatten(2, 3)


def exactly(cache):
    """The same cache, dense and in float64."""

    def dense(segment):
        if isinstance(segment, Segment):
            return segment
        sides = [Exact(side).values for side in (segment.key, segment.value)]
        return Segment(*(x.float() for x in sides), segment.lengths, segment.mask)

    return MixedKV(tuple(map(dense, cache.segments)), cache.tail)


def build(
    batch=1, kv_heads=1, group=7, q_len=1, head_dim=128, int4=64, int2=96, tail=40, window_size=32, offset=0.0, scale=1.0, seed=0,
    lengths=False, mask=False,
):  # fmt: skip
    torch.manual_seed(seed)

    def kv(tokens):
        key, value = (scale * torch.randn(batch, kv_heads, tokens, head_dim) for _ in range(2))
        key[..., head_dim // 3] += offset
        return key.half(), value.half()

    segments = []
    for tokens, bits in ((int4, 4), (int2, 2)):
        if tokens:
            coded = [
                quantizers.create("rtn", bits, window_size, "window_channel", role).quantize(x)
                for role, x in zip(("key", "value"), kv(tokens), strict=True)
            ]
            windows = torch.randint(0, tokens // window_size + 1, (batch,), dtype=torch.int32) if lengths else None
            made = FragmentSegment.pack(*coded, windows if windows is None else windows * window_size)
            segments.append(dataclasses.replace(made, mask=torch.rand(batch, tokens) > 0.3 if mask else None))
    key, value = kv(tail)
    last = torch.randint(q_len, tail + 1, (batch,), dtype=torch.int32) if lengths else None
    seen = None
    if mask:
        seen = torch.rand(batch, tail) > 0.3
        seen[:, -q_len:] = True
    if last is not None:
        for row in range(batch):
            key[row, :, int(last[row]) :] = value[row, :, int(last[row]) :] = torch.nan
            if seen is not None:
                seen[row, int(last[row]) - q_len :] = True
    if seen is not None:
        key.masked_fill_(~seen[:, None, :, None], torch.nan)
        value.masked_fill_(~seen[:, None, :, None], torch.nan)
    query = torch.randn(batch, kv_heads * group, q_len, head_dim).half()
    return query, MixedKV(tuple(segments), Segment(key, value, last, seen))


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("parts", [{"int4": 0, "int2": 0}, {"int2": 0}, {"int4": 0}, {}])
def test_every_mix_at_every_head_size(head_dim, parts, truncated):
    """Also with tensor cores that cut sums off 24 bits below their largest term."""
    query, cache = build(head_dim=head_dim, **parts)
    assert error(emulated.attend(query, cache, truncated=truncated), truth(query, exactly(cache))) < LIMIT


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 9, 16])
def test_every_ratio_of_query_to_kv_heads(group):
    query, cache = build(group=group, kv_heads=2, batch=2, head_dim=64)
    assert error(emulated.attend(query, cache), truth(query, exactly(cache))) < LIMIT


@pytest.mark.parametrize("q_len", [2, 3, 8, 40])
def test_query_tokens_are_causal_among_themselves(q_len):
    query, cache = build(group=3, q_len=q_len, head_dim=64, int4=32, int2=32)
    assert error(emulated.attend(query, cache, num_splits=2), truth(query, exactly(cache))) < LIMIT


@pytest.mark.parametrize("window_size", [32, 64, 96])
@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
def test_windows_and_channels_far_from_zero(window_size, offset):
    query, cache = build(window_size=window_size, int4=2 * window_size, int2=2 * window_size, offset=offset)
    assert error(emulated.attend(query, cache, truncated=True), truth(query, exactly(cache))) < LIMIT


@pytest.mark.parametrize("scale", [1e-3, 0.03, 30.0])
def test_small_and_large_values(scale):
    """Small scales reach for the subnormal halfs; scores of hundreds for the end of exp2."""
    query, cache = build(scale=scale)
    assert error(emulated.attend(query, cache, scaling=0.1 / scale), truth(query, exactly(cache), 0.1 / scale)) < LIMIT


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape(data):
    draw = data.draw
    query, cache = build(
        batch=draw(st.integers(1, 3)), kv_heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 9)),
        q_len=draw(st.sampled_from([1, 1, 1, 2, 5])), head_dim=draw(st.sampled_from([64, 128])),
        int4=32 * draw(st.integers(0, 6)), int2=32 * draw(st.integers(0, 6)), tail=draw(st.integers(5, 70)),
        seed=draw(st.integers(0, 99)), lengths=draw(st.booleans()), mask=draw(st.booleans()),
    )  # fmt: skip
    got = emulated.attend(query, cache, num_splits=draw(st.integers(1, 9)))
    assert error(got, truth(query, exactly(cache))) < LIMIT


def test_repeats_are_bit_identical_and_splits_hardly_matter():
    query, cache = build(int4=256, int2=256)
    first = emulated.attend(query, cache, num_splits=5)
    assert torch.equal(emulated.attend(query, cache, num_splits=5), first)
    torch.testing.assert_close(emulated.attend(query, cache, num_splits=1), first, rtol=2e-3, atol=2e-3)
    chosen = emulated.attend(query, cache, num_splits=None)
    torch.testing.assert_close(chosen, first, rtol=2e-3, atol=2e-3)


def test_strided_queries_and_tails():
    query, cache = build(batch=2, kv_heads=2, tail=32)
    assert cache.tail is not None
    spread = torch.full((2, 2, 48, 3 * 128), torch.nan, dtype=torch.float16)
    spread[:, :, :32, 128:256] = cache.tail.key
    tail = Segment(spread[:, :, :32, 128:256], cache.tail.value)
    swapped = query.transpose(1, 2).contiguous().transpose(1, 2)
    got = emulated.attend(swapped, MixedKV(cache.segments, tail))
    assert torch.equal(got, emulated.attend(query, cache))


def test_a_query_that_sees_nothing_gives_zero():
    query, cache = build(int4=0, int2=0, tail=16)
    assert cache.tail is not None
    blind = MixedKV((), dataclasses.replace(cache.tail, mask=torch.zeros(1, 16, dtype=torch.bool)))
    assert bool((emulated.attend(query, blind) == 0).all())


def test_other_backends_read_fragments_too():
    query, cache = build(lengths=True, mask=True, batch=2)
    assert error(mixed_decode(query, cache), truth(query, exactly(cache))) < LIMIT


def test_what_it_cannot_serve_is_said():
    query, cache = build()
    assert cuda_kernel.refusal(query, cache) is None
    assert "bfloat16" in cuda_kernel.refusal(query.bfloat16(), cache)
    rows = MixedKV(tuple(Segment(s.key, s.value) for s in cache.segments[:1]))
    assert "FragmentSegment.pack" in cuda_kernel.refusal(query, rows)
    assert "several segments of 4 bits" in cuda_kernel.refusal(query, MixedKV(cache.segments[:1] * 2))
    assert "head_dim = 96" in cuda_kernel.refusal(query[..., :96], MixedKV((), Segment(*[torch.zeros(1, 1, 8, 96).half()] * 2)))
    assert "kernels need a CUDA device" in explain(query, cache).reason
    bare = torch.zeros(1, 1, 8, 130).half()[..., 1:129]
    assert "multiples of 16 bytes" in cuda_kernel.refusal(query, MixedKV((), Segment(bare, bare)))


@given(st.integers(1, 4000), st.integers(0, 20000), st.sampled_from([3072, 5120]), st.integers(16, 160))
def test_the_plan_fills_the_device(tasks, units, unit_bytes, multiprocessors):
    num_warps, splits = cuda_kernel._plan(tasks, units, units * unit_bytes, multiprocessors)
    assert num_warps in (8, 16)
    assert 1 <= splits <= max(units // num_warps, 1)
    places = multiprocessors * 16 // num_warps
    if tasks <= places and units // num_warps >= -(-places // tasks):
        assert tasks * splits > 0.5 * places


def test_the_plan_at_known_shapes():
    """25,600 tokens of 32 KV heads: four programs each for 132 multiprocessors; 240 short ones: one wave of small programs."""
    assert cuda_kernel._plan(32, 800, 800 * 5120, 132) == (16, 4)
    assert cuda_kernel._plan(240, 40, 40 * 5120, 132) == (8, 1)


def test_counters_return_to_zero_and_serve_the_next_call():
    query, cache = build()
    numbers = (emulated.MULTIPROCESSORS, emulated.SHARED_LIMIT, 3)
    first, second = (cuda_kernel.prepare(query, cache, 0.1, *numbers) for _ in range(2))
    alone = cuda_kernel.prepare(query, cache, 0.1, *numbers, own_counters=True)
    assert first.arguments.arrived == second.arguments.arrived != alone.arguments.arrived
    emulated.attend(query, cache, num_splits=3)
    wide, more = build(batch=3, kv_heads=2, group=17, seed=1)  # needs more of them
    assert error(emulated.attend(wide, more, num_splits=2), truth(wide, exactly(more))) < LIMIT
    counters = cuda_kernel._counters(1, query.device)
    assert counters.numel() >= 3 * 2 * 3
    assert not bool(counters.any())


TILINGS = [
    cuda_kernel.choose(head_dim, widths, dense, emulated.SHARED_LIMIT, num_warps)
    for num_warps in (16, 8)
    for head_dim in (64, 128)
    for widths, dense in (((), True), ((4,), True), ((2,), True), ((2, 4), True), ((2,), False))
]


@pytest.mark.parametrize("tiling", sorted(set(TILINGS)), ids=str)
def test_it_compiles_for_sm_90_without_spills(tiling):
    usage = codegen.compile_cubin(cuda_kernel.source(tiling), arch="sm_90").usage["mixed_decode"]
    assert not usage.spills
    assert usage.registers <= 128
    assert 16 // tiling.num_warps * (tiling.shared_bytes + 1024) <= 228 << 10


#: Shared memory of a multiprocessor of older GPUs, less what is left for other needs.
OLDER = {"sm_80": 162 << 10, "sm_86": 98 << 10, "sm_89": 98 << 10}


@pytest.mark.slow
@pytest.mark.parametrize("arch", OLDER)
def test_it_compiles_for_older_gpus_without_spills(arch):
    chosen = {
        cuda_kernel.choose(head_dim, widths, dense, OLDER[arch], num_warps)
        for num_warps in (16, 8)
        for head_dim in (64, 128)
        for widths, dense in (((), True), ((4,), True), ((2,), True), ((2, 4), True), ((2,), False))
    }
    for tiling in sorted(chosen):
        usage = codegen.compile_cubin(cuda_kernel.source(tiling), arch=arch).usage["mixed_decode"]
        assert not usage.spills
        assert 16 // tiling.num_warps * (tiling.shared_bytes + 1024) <= OLDER[arch]


def test_it_reads_what_a_cache_holds():
    """Ragged rows, padding on the left, a question of three tokens: the cache's own parts."""
    torch.manual_seed(0)
    coders = {
        bits: tuple(quantizers.create("rtn", bits, 32, "window_channel", role) for role in ("key", "value")) for bits in (4, 2)
    }
    layer = MixedSegments(coders, "fragments-v1")
    layer.append(*(torch.randn(2, 2, 210, 64).half() for _ in range(2)))
    windows = torch.full((2, 5, 32), -1)
    windows[0] = 20 + torch.arange(160).reshape(5, 32)
    windows[1, :3] = 90 + torch.arange(96).reshape(3, 32)
    layer.encode(windows, [16, 4, 2, 2, 4])
    layer.append(*(torch.randn(2, 2, 3, 64).half() for _ in range(2)))
    visible = torch.ones(2, 213, dtype=torch.bool)
    visible[1, :80] = False
    parts = layer.parts(visible)
    query = torch.randn(2, 6, 3, 64).half()
    assert error(emulated.attend(query, parts), truth(query, exactly(parts))) < LIMIT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_on_a_gpu(data):
    """The same as emulated, and bit-identical when repeated."""
    draw = data.draw
    query, cache = build(
        batch=draw(st.integers(1, 3)), kv_heads=draw(st.integers(1, 4)), group=draw(st.integers(1, 9)),
        q_len=draw(st.sampled_from([1, 1, 2, 5, 64])), head_dim=draw(st.sampled_from([64, 128])),
        int4=32 * draw(st.integers(0, 60)), int2=32 * draw(st.integers(0, 60)), tail=draw(st.integers(64, 300)),
        seed=draw(st.integers(0, 99)), lengths=draw(st.booleans()), mask=draw(st.booleans()),
        offset=draw(st.sampled_from([0.0, 300.0])),
    )  # fmt: skip
    want = truth(query, exactly(cache))

    def there(segment):
        moved = {name: x.cuda() for name, x in vars(segment).items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(segment, **moved)

    there_cache = MixedKV(tuple(map(there, cache.segments)), there(cache.tail))
    got = mixed_decode(query.cuda(), there_cache, backend="cuda")
    assert error(got, want) < LIMIT
    assert torch.equal(mixed_decode(query.cuda(), there_cache, backend="cuda"), got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_and_prepared_launches_on_a_gpu():
    query, cache = build(batch=2, kv_heads=2, int4=2048, int2=2048)
    query = query.cuda()
    segments = [dataclasses.replace(s, codes=s.codes.cuda(), meta=s.meta.cuda()) for s in cache.segments]
    cache = MixedKV(tuple(segments), Segment(cache.tail.key.cuda(), cache.tail.value.cuda()))
    want = mixed_decode(query, cache, backend="cuda")
    ready = cuda_kernel.prepared(query, cache, 128**-0.5)
    torch.testing.assert_close(ready.launch(), want, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ready.launch()
        recorded = [mixed_decode(query, cache, backend="cuda") for _ in range(3)]
    for _ in range(3):
        for output in (ready.call.output, *recorded):
            output.fill_(torch.nan)
        graph.replay()
        mixed_decode(query, cache, backend="cuda")  # beside the replay's counters
        for output in (ready.call.output, *recorded):
            torch.testing.assert_close(output, want, rtol=0, atol=0)
    with pytest.raises(ParameterError, match="contiguous"):
        cuda_kernel.prepared(query.repeat_interleave(2, -1)[..., ::2], cache, 1.0)
