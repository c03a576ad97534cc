import pytest
import torch

from wqlab import bench, records
from wqlab.bench import cq_encode
from wqlab.bench.cq_encode import CQEncodeBench
from wqlab.errors import LimitError, MissingPartError
from wqlab.ops.cq_encode import reference
from wqlab.profile import environment


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    bench.run("cq_encode", folder, quick=True)
    return records.read("cq_encode", environment.gpu_key(), folder).data


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU adds the kernel's rows")
def test_a_quick_record_has_a_row_per_variant(quick):
    assert list(quick["variant"].unique()) == ["reference", "torch cdist", "torch baddbmm"]
    assert len(quick) == 3 * len(cq_encode.QUICK) * len(cq_encode.VECTOR_SIZES)
    assert quick["note"].isna().all()
    assert (quick["data"] == "synthetic").all()
    assert quick["provenance"].str.contains("commit").all()
    assert CQEncodeBench().headlines(quick) == []


def test_numbers_follow_from_each_other(quick):
    assert (quick[["latency_us", "linears_us"]] > 0).all(axis=None)
    assert quick["us_per_token_layer"].to_numpy() == pytest.approx((quick["latency_us"] / quick["tokens"]).to_numpy())
    assert quick["share_of_linears"].to_numpy() == pytest.approx((quick["latency_us"] / quick["linears_us"]).to_numpy())
    assert (quick["tokens"] == quick["batch"] * quick["seq_len"]).all()
    groups = quick["head_dim"] // quick["vector_size"]
    assert (quick["checked"] == quick["tokens"] * quick["heads"] * groups).all()


def test_the_reference_names_the_nearest_entries(quick):
    rows = quick[quick["variant"] == "reference"]
    assert (rows["excess_of_bound"] <= 1).all()
    assert (rows["mse_ratio"] < 1 + 1e-6).all()


def test_without_a_gpu_only_a_quick_run_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPartError, match="--quick"):
        CQEncodeBench().measure()


def test_a_variant_that_fails_or_errs_is_told(monkeypatch):
    def broken(x, books):
        raise RuntimeError("out of\n registers")

    def lazy(x, books):
        return lambda: books.codes.fill_(7)

    monkeypatch.setattr(cq_encode, "_variants", lambda *_: [("triton", "1-1", broken), ("triton", "2-2", lazy)])
    data = CQEncodeBench().measure(quick=True)
    failed, wrong = data[data["tiling"] == "1-1"], data[data["tiling"] == "2-2"]
    assert (failed["note"] == "RuntimeError: out of registers").all()
    assert failed["latency_us"].isna().all()
    assert (wrong["excess_of_bound"] > 1).all()
    assert (wrong["mse_ratio"] > 2).all()
    assert (wrong["mismatches"] > 0).all()
    with pytest.raises(LimitError, match=r"8 of 8 rows of the kernel failed.*out of registers"):
        CQEncodeBench().check(data)


def test_headlines_compare_with_the_fastest_of_torch(monkeypatch):
    def exact(x, books):
        return lambda: books.codes.copy_(reference.encode(x, books.entries))

    monkeypatch.setattr(
        cq_encode, "_variants", lambda *_: [("triton", "", exact), ("torch cdist", "", exact), ("reference", "", exact)]
    )
    data = CQEncodeBench().measure(quick=True)
    CQEncodeBench().check(data)
    found = CQEncodeBench().headlines(data)
    assert [line.metric for line in found[:2]] == [
        "encode keys and values of a layer, CQ-4, 1 x 48 tokens, per token",
        "encode keys and values of a layer, CQ-2, 1 x 48 tokens, per token",
    ]
    first = data[(data["vector_size"] == 2) & (data["seq_len"] == 48)].set_index("variant")["us_per_token_layer"]
    assert found[0].ours == first["triton"]
    assert found[0].theirs == min(first["torch cdist"], first["reference"])


@pytest.mark.parametrize("way", [cq_encode._cdist, cq_encode._baddbmm, cq_encode._differences, cq_encode._reference])
@pytest.mark.parametrize("size", cq_encode.VECTOR_SIZES)
def test_every_way_of_torch_does_the_same_work(way, size, monkeypatch):
    monkeypatch.setattr(cq_encode, "_TOKENS_AT_ONCE", 5)
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(2, 8 // size, 30, size, generator=generator)
    x = torch.randn(2, 2, 11, 8, generator=generator).half()
    books = cq_encode.Codebooks(entries, torch.full((2, 2, 11, 8 // size), 255, dtype=torch.uint8))
    cq_encode._in_parts(way)(x, books)()
    excess, least = reference.excess(x, entries, books.codes)
    assert (excess <= 1e-4 * (1 + least)).all()


def test_the_codebooks_fit_what_they_were_learnt_from():
    draw, entries = cq_encode._learnt(cq_encode.TINY, 2, torch.Generator().manual_seed(0))
    x = draw(1, 64)
    assert x.shape == (1, 2, 64, 32)
    assert entries.shape == (2, 16, 256, 2)
    least = reference.excess(x, entries, reference.encode(x, entries))[1]
    assert least.mean() < 0.02 * x.double().square().mean()
    assert x[..., 3].mean() > 10  # an outlier channel off centre
