"""The bench of whole decode steps, on a tiny model and the reference: table, arithmetic and failures, never speed."""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from wqlab import bench, records
from wqlab.bench import decode_step
from wqlab.bench.decode_caches import Shape
from wqlab.bench.decode_step import DecodeStepBench, Point, decoder, row_bytes, with_ratios
from wqlab.errors import MissingPartError
from wqlab.profile import environment

SHAPE = Shape(2, 4, 2, 96, 64)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WQLAB_CACHE", str(tmp_path / "cache"))


def test_a_quick_record_has_both_sides_of_every_case(tmp_path):
    bench.run("decode_step", tmp_path, quick=True)
    data = records.read("decode_step", environment.gpu_key(), tmp_path).data
    assert list(data.columns) == list(DecodeStepBench.columns)
    assert list(data["method"]) == ["fp16", "windowquant"] * 2
    assert list(data["case"]) == ["same batch"] * 2 + ["largest batch"] * 2
    assert (data["p10_us"] <= data["step_us"]).all()
    assert (data["step_us"] <= data["p90_us"]).all()
    assert (data["rel_error"] < 1e-3).all()
    assert data["note"].isna().all()
    if not torch.cuda.is_available():
        assert (data["model"] == "tiny").all()
        assert list(data["backend"]) == ["torch sdpa", "reference"] * 2
        assert (data["layers"] == "fused, eager").all()
        for row in data.itertuples():
            wanted = row.batch * row_bytes(decode_step._TINY, row.visual_tokens, row.method)
            assert wanted <= row.kv_bytes <= wanted + 1000  # positions and lengths
    assert (data["visual_tokens"] == 256 * data["frames"]).all()
    assert data["ceiling"].notna().tolist() == [True, True, False, False]


def test_without_a_gpu_only_a_quick_run_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPartError, match="--quick"):
        DecodeStepBench().measure()


def test_the_shape_is_that_of_the_published_configuration():
    assert tuple(decoder()) == (28, 3584, 18944, 28, 4, 152064)
    assert decoder().head_dim == 128
    fp16, packed = (row_bytes(decoder(), 25600, method) for method in ("fp16", "windowquant"))
    assert fp16 == 28 * 2 * 2 * 4 * 128 * (25600 + 48)
    assert 3.1 < fp16 / packed < 3.3


def synthetic(**changes):
    row = {
        "case": "same batch", "layers": "fused", "batch": 8, "frames": 100, "num_layers": 28, "method": "fp16", "step_us": 8000.0,
        "attention_us": 100.0, "weight_bytes": 14_000_000_000, "read_bandwidth_tb_s": 4.0,
    }  # fmt: skip
    return row | changes


def test_ratios_compare_like_with_like():
    rows = [
        synthetic(),
        synthetic(method="windowquant", step_us=6000.0, attention_us=30.0),
        synthetic(batch=16, method="windowquant", step_us=7000.0),  # its FP16 side failed
        synthetic(layers="transformers", step_us=9000.0),
        synthetic(case="largest batch", batch=90, step_us=40000.0),
        synthetic(case="largest batch", batch=270, method="windowquant", step_us=60000.0),
    ]
    data = with_ratios(pd.DataFrame(rows))
    np.testing.assert_allclose(data["tokens_per_s"][:2], [1000, 8 / 6e-3])
    np.testing.assert_allclose(data["speedup"], [1, 8 / 6, np.nan, 1, 1, 270 / 60 / (90 / 40)])
    np.testing.assert_allclose(data["weight_floor_us"], 3500)
    np.testing.assert_allclose(data["ceiling"], [8000 / 5200, 8000 / 5200, np.nan, 9000 / 6200, np.nan, np.nan])
    np.testing.assert_allclose(data["ceiling_weights"][:2], 1 + 2800 / 3500)
    np.testing.assert_allclose(data["attention_share"][:2], [0.35, 0.14])


def test_headlines_name_the_points_that_were_measured():
    rows = [synthetic(), synthetic(method="windowquant", step_us=6000.0), synthetic(case="largest batch", batch=90)]
    found = DecodeStepBench().headlines(with_ratios(pd.DataFrame(rows)))
    assert [line.metric for line in found] == [
        "decode steps, 8 x 100 frames, 10/30/60",
        "decode steps, largest x 100 frames, 10/30/60",
    ]
    assert found[0].ours == pytest.approx(8 / 6e-3)
    assert found[0].theirs == pytest.approx(1000)
    assert found[1].ours is None


def test_a_side_that_fails_leaves_the_other(monkeypatch):
    def fail(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(decode_step, "QUICK", (Point(2, 2),))
    monkeypatch.setattr(decode_step, "_packed_cache", fail)
    data = DecodeStepBench().measure(quick=True).set_index("method")
    assert "on purpose" in data.loc["windowquant", "note"]
    assert np.isnan(data.loc["windowquant", "step_us"])
    assert data.loc["fp16", "step_us"] > 0


def test_a_batch_that_does_not_fit_is_made_smaller(monkeypatch):
    tried = []

    def step(subject, shape, *_):
        tried.append(shape.batch)
        if len(tried) < 3:
            raise torch.OutOfMemoryError("too much")
        return {"step_us": 1.0}

    monkeypatch.setattr(decode_step, "_step", step)
    monkeypatch.setattr(decode_step, "_largest", lambda *_: 100)
    subject = SimpleNamespace(device=torch.device("cpu"), shape=decoder())
    assert decode_step._measured(subject, Point(100, None), "fp16", 3) == {"batch": 88, "step_us": 1.0}
    assert tried == [100, 94, 88]
    tried.clear()
    with pytest.raises(torch.OutOfMemoryError):
        decode_step._measured(subject, Point(100, 8), "fp16", 3)


def fake_flashinfer():
    """A stand-in that reads pages as flashinfer documents them: tests where tokens lie, nothing else."""

    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores):
            self.layout = layout

        def plan(self, rows, pages, last, num_heads, heads, dim, page, **_):
            self.rows, self.pages, self.last, self.heads, self.page = rows.tolist(), pages.long(), last, heads, page

        def run(self, query, pair):
            outputs = []
            for row, states in enumerate(query):
                mine = self.pages[self.rows[row] : self.rows[row + 1]]
                sides = []
                for x in pair:
                    x = x[mine].transpose(1, 2) if self.layout == "HND" else x[mine]  # pages, page, heads, dim
                    sides.append(x.reshape(-1, *x.shape[2:]).transpose(0, 1).float())
                q = states.view(self.heads, -1, states.shape[-1]).float()
                weights = (q @ sides[0].transpose(1, 2) * states.shape[-1] ** -0.5).softmax(-1)
                outputs.append((weights @ sides[1]).reshape(states.shape))
            return torch.stack(outputs).to(query.dtype)

    return SimpleNamespace(__version__="0", BatchDecodeWithPagedKVCacheWrapper=Wrapper)


@pytest.mark.parametrize("kind", ["heads", "group as tokens", "HND", "NHD"])
def test_a_cache_in_16_bits_reads_the_token_that_was_written(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    monkeypatch.setattr(decode_step, "_WORKSPACE_BYTES", 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, 4, 1, 64), generator=generator).half()
    paged = "ND" in kind
    variant = decode_step._flashinfer(SHAPE, kind, query) if paged else decode_step._sdpa(SHAPE, kind, None, kind == "heads")
    key, value = (torch.randn(SHAPE.elements, generator=generator).half() for _ in range(2))
    store = decode_step._DenseStore(variant, key, value)
    assert store.error(query, SHAPE) < 2e-3
    new = torch.full((2, 2, 1, 64), 7.0).half()
    store.write(new, new)
    ends = variant.ends(variant.held(value))
    assert ends.shape == (2, 2, 96, 64)
    assert (ends[:, :, -1] == 7).all()
    assert (ends[:, :, :-1] != 7).all()
    assert store.error(query, SHAPE) < 2e-3


def test_no_attention_that_serves_a_shape_is_an_error(monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_BASELINE_ERROR", -1.0)
    query = torch.randn(2, 4, 1, 64).half()
    with pytest.raises(RuntimeError, match="torch sdpa: relative error"):
        decode_step._dense_cache(1, SHAPE, torch.Generator(), query)


def test_a_compiler_that_fails_is_noted(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(decode_step, "QUICK", (Point(2, 1),))
    subject = decode_step._Subject(torch.device("cpu"))
    subject.compiled = True
    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(decode_step, "_subject", lambda device: subject)
    decode_step._subject.cache_clear = lambda: None
    data = DecodeStepBench().measure(quick=True)
    assert (data["layers"] == "fused, eager").all()
    assert data["note"].str.contains("no compiler here").all()
    assert (data["step_us"] > 0).all()
