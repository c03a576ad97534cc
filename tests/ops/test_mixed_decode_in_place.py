"""Windows in the order of the video: the kernel's own source on an emulated GPU, against the reference over the reordered cache."""

import itertools
import random

import emulated
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_decode_cases import error

from wqlab import codegen
from wqlab.bench.decode_caches import Shape, Tokens, random_cache
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.ops.mixed_decode import MixedKV, Segment, cuda_kernel, in_place, mixed_decode, reference

LIMIT = 2e-3
SMALL = Shape(1, 7, 1, 320, 128)


def case(shape=SMALL, windows=(2, 3, 5), seed=0, q_len=1):
    generator = torch.Generator().manual_seed(seed)
    cache = random_cache(shape._replace(seq_len=32 * sum(windows)), Tokens(*(32 * n for n in windows)), generator)
    widths = [16] * windows[0] + [4] * windows[1] + [2] * windows[2]
    random.Random(seed).shuffle(widths)
    query = (2 * torch.randn(shape.batch, shape.num_heads, q_len, shape.head_dim, generator=generator)).half()
    return query, cache, in_place.interleave(cache, widths)


def emulate(call):
    for tensor in (call.output, call.kept[5]):  # the partial results
        tensor.fill_(torch.nan)
    loaded = emulated.library(in_place.source(call.tiling), "mixed_decode_in_place")
    for lane in call.lanes:
        for one in lane:
            emulated.launch(loaded, one.arguments, one.grid, 32 * call.tiling.num_warps, call.tiling.shared_bytes)
    assert not bool(call.kept[6].any())  # arrivals are back at zero
    return call.output


def one_launch(query, kv, num_splits=2, order="video"):
    return emulate(in_place.prepare(query, kv, kv.head_dim**-0.5, 132, emulated.SHARED_LIMIT, order, num_splits))


def runs(query, kv, num_splits=1, num_lanes=1):
    call = in_place.prepare_runs(query, kv, kv.head_dim**-0.5, emulated.SHARED_LIMIT, num_splits, num_lanes)
    assert call.launches == kv.runs
    return emulate(call)


def truth(query, cache):
    return reference.attend(query.double(), cache, query.shape[-1] ** -0.5, torch.float64)


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_every_arrangement_is_attention_over_the_same_windows(data):
    draw = data.draw
    windows = tuple(draw(st.integers(0, 3)) for _ in range(3))
    if not sum(windows):
        windows = (1, 0, 0)
    group, head_dim = draw(st.integers(1, 9)), draw(st.sampled_from([64, 128]))
    shape = Shape(draw(st.integers(1, 2)), 2 * group, 2, 0, head_dim)
    query, cache, kv = case(shape, windows, draw(st.integers(0, 99)), draw(st.sampled_from([1, 1, 3])))
    splits, lanes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    want = truth(query, cache)
    assert error(one_launch(query, kv, splits), want) < LIMIT
    assert error(one_launch(query, kv, splits, "width"), want) < LIMIT
    assert error(runs(query, kv, splits, lanes), want) < LIMIT


def test_the_launch_that_is_chosen():
    query, cache, kv = case(windows=(4, 12, 24))
    call = in_place.prepare(query, kv, 128**-0.5, 132, emulated.SHARED_LIMIT)
    assert call.launches == 1
    assert error(emulate(call), truth(query, cache)) < LIMIT


def test_lanes_run_beside_each_other(monkeypatch):
    """Each of the streams beside waits for the caller's once, before its first launch, and is waited for at the end."""
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class Kernel:
        def launch(self, stream, grid, block, shared_bytes, arguments):
            log.append(f"{stream.name} adds up in {arguments.first_slot}" if arguments.accumulate else f"{stream.name} begins")

    query, _, kv = case()
    call = in_place.prepare_runs(query, kv, 0.1, emulated.SHARED_LIMIT, num_lanes=3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("caller"))
    assert in_place.Prepared(call, Kernel(), (Stream("a"), Stream("b"))).launch() is call.output
    assert log[:3] == ["a waits for caller", "b waits for caller", "caller begins"]
    assert log[-2:] == ["caller waits for a", "caller waits for b"]
    assert len(log) == call.launches + 4
    assert {line for line in log if "adds" in line} == {"caller adds up in 0", "a adds up in 1", "b adds up in 2"}


def test_units_lie_where_the_windows_are():
    _, cache, kv = case()
    units = [unit for window in in_place.units_of(kv) for unit in window]
    assert sum(unit.size for unit in units) == kv.pool.shape[2]
    assert all(unit.offset % 512 == 0 for unit in units)
    for bits, segment in zip((4, 2), cache.segments[1:], strict=True):
        found = [kv.pool[0, 0, u.offset : u.offset + segment.codes.shape[3]] for u in units if u.bits == bits]
        assert torch.equal(torch.stack(found), segment.codes[0, 0])


def test_other_backends_read_the_same_windows():
    query, cache, kv = case(windows=(2, 3, 5))
    assert len(in_place.in_order(kv).segments) == kv.runs
    assert error(mixed_decode(query, in_place.in_order(kv)), truth(query, cache)) < LIMIT


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 40))
def test_parts_hold_about_the_same_bytes(sizes, parts):
    firsts = in_place._shares(sizes, parts)
    assert len(firsts) == parts + 1
    assert (firsts[0], firsts[-1]) == (0, len(sizes))
    assert firsts == sorted(firsts)
    fair = sum(sizes) / parts
    assert all(sum(sizes[a:b]) <= fair + max(sizes, default=0) for a, b in itertools.pairwise(firsts))


def test_a_sorted_table_gives_every_program_its_part_of_each_width():
    query, _, kv = case(windows=(4, 12, 24))
    call = in_place.prepare(query, kv, 0.1, 132, emulated.SHARED_LIMIT, "width", num_splits=4)
    table, first = call.kept[2], call.kept[3][0]
    assert len(table) == 4 * 4 + 12 + 24
    for split in range(4):
        kinds = (table[first[16 * split] : first[16 * split + 16]] % 4).tolist()
        assert kinds == [0] * 3 + [1] * 6 + [2] * 4


def test_what_cannot_be_laid_out_is_said():
    query, cache, kv = case()
    with pytest.raises(ParameterError, match="do not name the same"):
        in_place.interleave(cache, [16] * 10)
    with pytest.raises(UnsupportedError, match="that every row has"):
        in_place.interleave(MixedKV((Segment(torch.zeros(1, 1, 30, 64).half(), torch.zeros(1, 1, 30, 64).half()),)), [16])
    with pytest.raises(ParameterError, match="does not fit"):
        in_place.prepare_runs(query[..., :64], kv, 1.0, emulated.SHARED_LIMIT)
    with pytest.raises(ParameterError, match="contiguous and float16"):
        in_place.prepare_runs(query.float(), kv, 1.0, emulated.SHARED_LIMIT)


@pytest.mark.parametrize("num_warps", [8, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_compiles_for_sm_90_without_spills(head_dim, num_warps):
    tiling = cuda_kernel.choose(head_dim, (2, 4), True, emulated.SHARED_LIMIT, num_warps)
    usage = codegen.compile_cubin(in_place.source(tiling), arch="sm_90").usage["mixed_decode_in_place"]
    assert not usage.spills
    assert usage.registers <= 128


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_it_compiles_for_older_gpus_without_spills(arch):
    tiling = cuda_kernel.choose(128, (2, 4), True, 164 << 10 if arch == "sm_80" else 100 << 10)
    assert not codegen.compile_cubin(in_place.source(tiling), arch=arch).usage["mixed_decode_in_place"].spills


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("windows", [(10, 30, 60), (0, 3, 1), (2, 0, 0)])
def test_on_a_gpu(windows):
    query, cache, kv = case(Shape(3, 28, 4, 0, 128), windows)
    want = truth(query, cache)
    query, kv = query.cuda(), kv._replace(pool=kv.pool.cuda())
    for ready in (
        in_place.prepared(query, kv, 128**-0.5), in_place.prepared(query, kv, 128**-0.5, "width"),
        in_place.prepared_runs(query, kv, 128**-0.5), in_place.prepared_runs(query, kv, 128**-0.5, 2, 4),
    ):  # fmt: skip
        first = ready.launch().clone()
        assert error(first, want) < LIMIT
        assert error(ready.launch(), want) < LIMIT
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ready.launch()
        ready.call.output.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(ready.call.output, first, rtol=2e-3, atol=2e-3)
