"""operator_fusion, reorder_cost and the latency of alpha_sweep, from synthetic records and from none. Their numbers are made up."""

import numpy as np
import pandas as pd
import pytest

from wqlab import experiments, figures, records
from wqlab.bench import get
from wqlab.bench.alpha_latency import AlphaLatencyBench
from wqlab.bench.operator_fusion import ARRANGEMENTS as FUSIONS
from wqlab.bench.operator_fusion import FUSED, IN_PLACE, MATMUL, MIXES, PLAIN, SDPA
from wqlab.bench.operator_fusion import SHAPES as FUSION_SHAPES
from wqlab.bench.width_order import ARRANGEMENTS as ORDERS
from wqlab.bench.width_order import PLANS, REORDERED, RUNS, SORTED, TABLE
from wqlab.bench.width_order import SHAPES as ORDER_SHAPES
from wqlab.errors import MissingPartError, UnknownNameError
from wqlab.experiments import alpha_sweep

PROVENANCE = {
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_gb": 8.0, "gpus": ["Synthetic GPU"]},
    "versions": {}, "git_commit": "0" * 40, "date": "2026-01-02T03:04:05+00:00", "command": "synthetic, a test's record",
}  # fmt: skip
STEMS = {"operator_fusion": "operator_fusion", "reorder_cost": "width_order"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of records: those of the CPU as they are, and none of a GPU."""
    (tmp_path / "cpu").symlink_to(records.root() / "cpu")
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    alpha_sweep._latency.cache_clear()
    yield tmp_path
    alpha_sweep._latency.cache_clear()


def write(folder, name, rows):
    bench = get(name)
    data = bench.finish(pd.DataFrame(rows).reindex(columns=list(bench.columns)).astype(dict.fromkeys(bench.whole, "Int64")))
    records.write(name, "h200", data[list(bench.columns)], bench.columns, PROVENANCE, folder)


def times(latency):
    return {"latency_us": latency, "p10_us": 0.9 * latency, "p90_us": 1.1 * latency, "repeats": 1, "copies": 2, "rel_error": 0.0}


def fusion_rows(shapes=FUSION_SHAPES, slower=(1, 3, 2.5, 5, 40)):
    rows = []
    for shape in shapes:
        for mix in MIXES:
            for arrangement, factor in zip(FUSIONS, slower, strict=True):
                if arrangement == IN_PLACE and mix != "10/30/60":
                    continue
                row = {**shape._asdict(), "mix": mix, "arrangement": arrangement, **times(10.0 * factor), "seed": 0}
                if arrangement in (SDPA, IN_PLACE, MATMUL):
                    row |= {"decode_us": 4.0, "attention_us": 6.0, "decoded_bytes": 16_000_000, "attention": "made up"}
                rows.append(row)
    return rows


def order_rows(counted=True, slower=(1, 1.25, 1.5, 8)):
    rows = []
    for shape in ORDER_SHAPES:
        for plan in PLANS:
            for arrangement, factor in zip(ORDERS, slower, strict=True):
                row = {
                    **shape._asdict(), "plan": plan, "windows": shape.seq_len // 32, "runs": 10, "arrangement": arrangement,
                    "launches": 10 if arrangement == RUNS else 1, **times(20.0 * factor), "seed": 0,
                    "counters": "unavailable: ncu is not installed",
                }  # fmt: skip
                if counted and (shape, plan) == (ORDER_SHAPES[0], PLANS[0]):
                    row |= {"counters": "ncu", "sectors_per_request": 16.0, "dram_bytes": 10**8}
                rows.append(row)
    return rows


@pytest.mark.parametrize(("stem", "name"), STEMS.items())
def test_without_a_record_it_is_said_how_to_get_one(folder, stem, name):
    with pytest.raises(MissingPartError, match=f"wqlab bench {name}"):
        experiments.run(stem)
    with pytest.raises(UnknownNameError):
        experiments.run(stem, gpu="h2000")
    rows = fusion_rows() if stem == "operator_fusion" else order_rows()
    write(folder, name, [{**row, "latency_us": np.nan, "note": "it failed"} for row in rows])
    with pytest.raises(MissingPartError, match="holds no time"):
        experiments.run(stem)


@pytest.mark.parametrize("mix", MIXES)
def test_fused_and_unfused_are_compared_at_the_papers_shape(folder, tmp_path, mix):
    write(folder, "operator_fusion", fusion_rows())
    result = experiments.run("operator_fusion", mix=mix)
    values = {name: value.value for name, value in result.values.items()}
    assert values["fused_ms"] == pytest.approx(0.01)
    found = {name: values[f"{name}_to_fused"] for name in ("unfused", "unfused_in_place", "matmul", "operators")}
    assert found == pytest.approx({"unfused": 3, "unfused_in_place": 2.5, "matmul": 5, "operators": 40})
    assert values["decode_tb_s_long_video"] == pytest.approx(4)
    assert result.evidence["latency_ms"].kind == "recorded"
    paper = result.data[result.data["part"] == "paper"].set_index("arrangement")["paper_ms"]
    assert (paper[FUSED], paper[MATMUL]) == (0.82, 1.25)
    shown_with_its_evidence(result, tmp_path)


def test_what_the_record_of_fusion_lacks_is_said(folder):
    rows = [row for row in fusion_rows(FUSION_SHAPES[1:]) if row["mix"] == "int4"]
    rows[-1] |= {"latency_us": np.nan, "note": "it failed"}
    assert rows[-1]["arrangement"] == PLAIN
    write(folder, "operator_fusion", rows)
    result = experiments.run("operator_fusion")
    assert "unfused_to_fused" not in result.values
    assert f"60, 1280, int4, {PLAIN}" in " ".join(result.notes)
    text = " ".join(t.get_text() for axes in figures.draw(result).axes for t in axes.texts)
    assert "no time" in text


@pytest.mark.parametrize("plan", PLANS)
def test_arrangements_are_compared_with_the_reordered_one(folder, tmp_path, plan):
    write(folder, "width_order", order_rows())
    result = experiments.run("reorder_cost", plan=plan)
    values = {name: value.value for name, value in result.values.items()}
    for where in ("", "_independent", "_long_video", "_long_video_independent"):
        assert values[f"in_place_to_reordered{where}"] == pytest.approx(1.25)
        assert values[f"in_place_sorted_to_reordered{where}"] == pytest.approx(1.5)
        assert values[f"per_run_to_reordered{where}"] == pytest.approx(8)
    assert values["in_place_sectors_per_request_long_video"] == 16
    assert "in_place_sectors_per_request" not in values
    paper = result.data[result.data["part"] == "paper"].set_index("arrangement")["paper_tokens_per_s"]
    assert (paper[REORDERED], paper[TABLE]) == (1250, 500)
    shown_with_its_evidence(result, tmp_path)


def test_a_record_without_counters_says_why(folder):
    rows = order_rows(counted=False)
    for row in rows:
        if row["arrangement"] == SORTED:
            row |= {"latency_us": np.nan, "note": "it failed"}
    write(folder, "width_order", rows)
    result = experiments.run("reorder_cost")
    assert "ncu is not installed" in " ".join(result.notes)
    assert f"8, 25600, clustered, {SORTED}" in " ".join(result.notes)
    text = " ".join(t.get_text() for axes in figures.draw(result).axes for t in axes.texts)
    assert "holds no counters" in text


def shown_with_its_evidence(result, tmp_path):
    figure = figures.draw(result)
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    shown = " ".join(text.get_text() for legend in legends for text in legend.get_texts())
    assert "(recorded)" in shown
    assert "(paper)" in shown
    assert "Synthetic GPU" in figures.caption(result)
    figures.write(figure, tmp_path / "figure.png")


def alpha_rows():
    bench, rows = AlphaLatencyBench(), []
    for point in bench.points(quick=False):
        rows += [{**bench._named(point, case), **times(10 + case.alpha)} for case in point.cases]
    return rows


def test_latency_against_alpha_is_a_panel_of_its_own(folder, tmp_path):
    write(folder, "alpha_latency", alpha_rows())
    result = experiments.run("alpha_sweep", similarity="prose")
    assert result.evidence["latency_us"].kind == "recorded"
    assert result.evidence["share"].kind == "recorded"
    values = {name: value.value for name, value in result.values.items()}
    assert values["latency_us_alpha_2"] == pytest.approx(12)
    assert values["latency_slowest_to_fastest"] == pytest.approx(22 / 10.1)
    latency = result.data[result.data["part"] == "latency"]
    assert set(latency["similarity"]) == {"video", "prose"}
    assert "25,600 tokens" in " ".join(result.notes)
    figure = figures.draw(result)
    (axes,) = (a for a in figure.axes if a.get_title("left").startswith("Latency"))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["video (recorded)", "prose (recorded)"]
    figures.write(figure, tmp_path / "alpha.png")


def test_without_a_record_the_panel_says_what_is_missing(folder):
    result = experiments.run("alpha_sweep", similarity="prose")
    assert "latency_us" not in result.evidence
    assert not any(name.startswith("latency") for name in result.values)
    assert "wqlab bench alpha_latency" in " ".join(result.notes)
    text = " ".join(t.get_text() for axes in figures.draw(result).axes for t in axes.texts)
    assert "not recorded on h200" in text
    with pytest.raises(UnknownNameError):
        experiments.run("alpha_sweep", similarity="prose", gpu="h2000")
