"""The Triton kernel of `cq_encode` on CPU tensors, in Triton's interpreter. test_cq_encode.py runs this file in a process of its
own, with TRITON_INTERPRET set before anything imports triton; on a GPU the same tests run the compiled kernel."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from wqlab.errors import ParameterError
from wqlab.ops import cq_encode
from wqlab.ops.cq_encode import reference, triton_kernel
from wqlab.ops.cq_encode.triton_kernel import TILINGS, Tiling

DEVICE = "cpu" if triton_kernel.INTERPRETED else "cuda"
NAN = float("nan")
#: Small steps cost less in the interpreter; every relation of columns to classes.
SMALL = [Tiling(32, 4, 32, 16, 4), Tiling(64, 4, 32, 32, 2), Tiling(64, 4, 32, 64, 1), Tiling(64, 2, 64, 256, 4)]


def every(number, on_gpu):
    """Return a number of examples; the interpreter is slow."""
    return number if triton_kernel.INTERPRETED else on_gpu


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill outputs with 255, which names no entry of a short book: whatever the kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(255 if made.dtype == torch.uint8 else NAN)

    monkeypatch.setattr(torch, "empty", poisoned)


def build(batch=1, heads=1, seq=33, groups=4, size=2, count=250, dtype=torch.float16, offset=0.0, spread=1.0, seed=0):
    """Return vectors and entries; no codebook has 256 entries unless it is asked for."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    place = offset * normal(heads, groups, 1, size)
    scale = spread * normal(heads, groups, 1, 1).exp()
    entries = place + scale * normal(heads, groups, count, size)
    x = place.transpose(1, 2).reshape(1, heads, 1, -1) + 1.5 * scale.expand(-1, -1, 1, size).reshape(
        1, heads, 1, groups * size
    ) * normal(batch, heads, seq, groups * size)
    return x.to(dtype), entries


def judged(x, entries, codes):
    """Return the largest share of `reference.bound` that the codes use; infinite for a code without an entry."""
    excess, least = reference.excess(x, entries, codes)
    allowed = reference.bound(x, entries, least)
    assert excess.isfinite().all()
    return float((excess / allowed.clamp(min=1e-300)).max())


def check(x, entries, tiling=None):
    prepared = triton_kernel.prepare(entries.to(DEVICE), x.dtype, tiling.classes if tiling else None)
    codes = triton_kernel.encode(x.to(DEVICE), prepared, tiling).cpu()
    assert codes.shape == (*x.shape[:3], entries.shape[1])
    assert codes.dtype == torch.uint8
    assert codes.is_contiguous()
    assert judged(x, entries, codes) <= 1
    return codes


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_tilings_name_the_nearest_entry(size, dtype):
    x, entries = build(seq=140, size=size, dtype=dtype, count=256)
    codes = check(x, entries)
    assert (codes != reference.encode(x, entries, torch.float64)).float().mean() < 1e-2


@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_of_tiling(tiling, size):
    check(*build(size=size), tiling)


@pytest.mark.parametrize("groups", [1, 2, 3, 6, 8])
def test_every_number_of_groups(groups):
    check(*build(groups=groups, heads=2, batch=2, seq=5), SMALL[0])


@pytest.mark.parametrize("count", [1, 2, 16, 255, 256])
def test_short_books(count):
    x, entries = build(count=count)
    assert int(check(x, entries, SMALL[0]).max()) < count


@pytest.mark.parametrize(("offset", "spread"), [(30.0, 1.0), (1000.0, 0.5), (0.0, 1e-3), (0.0, 1e3), (3.0, 1e-2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_offsets_and_scales(offset, spread, dtype):
    check(*build(offset=offset, spread=spread, dtype=dtype, size=4), SMALL[0])


def test_vectors_far_from_every_entry():
    x, entries = build(size=4, seq=12)
    x[:, :, :4] *= 100
    x[:, :, 4:8] = 60000.0 * x[:, :, 4:8].sign()
    check(x, entries, SMALL[0])


def test_entries_themselves_are_found():
    _, entries = build(count=256)
    entries = entries.half().float()
    x = entries[0].transpose(0, 1).reshape(1, 1, 256, -1).half()
    assert torch.equal(check(x, entries, SMALL[0])[0, 0].long(), torch.arange(256)[:, None].expand(-1, 4))


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_books_of_equal_entries(value):
    x, entries = build(count=256, seq=5)
    entries.fill_(value)
    codes = triton_kernel.encode(x.to(DEVICE), triton_kernel.prepare(entries.to(DEVICE)))
    assert reference.excess(x, entries, codes.cpu())[0].eq(0).all()


def test_the_mean_of_entries_on_a_circle():
    """All scores are as near to zero as they come: a negative one would compare the wrong way round."""
    angle = torch.arange(256) * (2 * torch.pi / 256)
    entries = torch.stack([angle.cos(), angle.sin()], -1).expand(1, 4, 256, 2).contiguous()
    x = torch.zeros(1, 1, 9, 8, dtype=torch.float16)
    x[0, 0, 1:] = 1e-3 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).half()
    check(x, entries, SMALL[0])


def test_nan_names_some_entry():
    x, entries = build(count=3)
    x[0, 0, 0] = NAN
    codes = triton_kernel.encode(x.to(DEVICE), triton_kernel.prepare(entries.to(DEVICE))).cpu()
    assert codes.max() < 3
    assert judged(x[:, :, 1:], entries, codes[:, :, 1:]) <= 1


def test_strided_vectors():
    x, entries = build(batch=2, seq=7)
    want = check(x, entries, SMALL[0])
    prepared = triton_kernel.prepare(entries.to(DEVICE), classes=16)
    token_major = x.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(triton_kernel.encode(token_major, prepared, SMALL[0]).cpu(), want)
    channels_apart = x.to(DEVICE).transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(triton_kernel.encode(channels_apart, prepared, SMALL[0]).cpu(), want)


def test_float32_has_the_reference_of_its_own():
    x, entries = build(dtype=torch.float32, batch=2, size=4, count=20)
    codes = cq_encode.encode(x.to(DEVICE), entries.to(DEVICE), backend="triton").cpu()
    assert judged(x, entries, codes) <= 1
    assert (codes != reference.encode(x, entries)).float().mean() < 1e-2


def test_prepared_entries_serve_the_public_call():
    x, entries = build(seq=3)
    plain, prepared = (cq_encode.encode(x.to(DEVICE), e, backend="triton") for e in (entries.to(DEVICE), _prepared(entries)))
    assert torch.equal(plain, prepared)
    assert cq_encode.explain(x.to(DEVICE), _prepared(entries), "triton").reason == "asked for by name"


def _prepared(entries):
    return cq_encode.prepare(entries.to(DEVICE))


def test_books_prepared_for_something_else_are_refused():
    x, entries = build()
    with pytest.raises(ParameterError, match=r"prepared for .*float16 and \d+ classes, not for .*bfloat16"):
        triton_kernel.encode(x.bfloat16(), triton_kernel.prepare(entries))
    with pytest.raises(ParameterError, match="and 64 classes"):
        triton_kernel.encode(x, triton_kernel.prepare(entries, classes=64))


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seq": 0}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nothing_to_encode(shape, dtype):
    x, entries = build(**shape, dtype=dtype)
    assert cq_encode.encode(x.to(DEVICE), entries.to(DEVICE), backend="triton").shape == (*x.shape[:3], 4)


def test_the_bench_launches_what_it_names(monkeypatch):
    from wqlab.bench import cq_encode as bench

    monkeypatch.setattr(bench, "TILINGS", {2: tuple(map(tuple, SMALL[:1]))})
    x, entries = build(seq=9, count=256)
    for name, _, variant in bench._variants(bench._TUNED, 2, torch.device("cuda"), quick=True):
        books = bench.Codebooks(entries.to(DEVICE), torch.empty((1, 1, 9, 4), dtype=torch.uint8, device=DEVICE))
        variant(x.to(DEVICE), books)()
        assert judged(x, entries, books.codes.cpu()) <= 1, name


@settings(max_examples=every(6, on_gpu=30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shape(data):
    draw = data.draw
    shape = {
        "batch": draw(st.integers(1, 3)), "heads": draw(st.integers(1, 2)), "seq": draw(st.integers(1, 40)),
        "groups": draw(st.integers(1, 6)), "size": draw(st.sampled_from([2, 4])), "count": draw(st.integers(1, 256)),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16])), "offset": draw(st.sampled_from([0.0, 10.0])),
        "seed": draw(st.integers(0, 99)),
    }  # fmt: skip
    check(*build(**shape), SMALL[0])


def test_the_tilings_fit_the_kernel():
    for size, tiling in TILINGS.items():
        assert size in triton_kernel.VECTOR_SIZES
        assert triton_kernel.NUM_CODES % tiling.classes == 0
