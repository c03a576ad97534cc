"""decode_latency and memory_and_throughput from a synthetic record, and from none at all. Its numbers are made up and stay here."""

import numpy as np
import pandas as pd
import pytest

from wqlab import experiments, figures, records
from wqlab.bench.decode_step import DecodeStepBench, row_bytes, with_ratios
from wqlab.bench.decode_step import decoder as shape_of
from wqlab.errors import MissingPartError, UnknownNameError
from wqlab.experiments import decode_steps
from wqlab.experiments.decode_latency import fit

STEMS = ("decode_latency", "memory_and_throughput")
PROVENANCE = {
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_gb": 8.0, "gpus": ["Synthetic GPU"]},
    "versions": {}, "git_commit": "0" * 40, "date": "2026-01-02T03:04:05+00:00", "command": "synthetic, a test's record",
}  # fmt: skip
WHOLE = (
    "batch", "frames", "visual_tokens", "text_tokens", "num_layers", "repeats", "peak_memory_bytes", "kv_bytes", "weight_bytes",
    "seed",
)  # fmt: skip


def step(batch, frames, method, case="same batch", layers="fused", **changes):
    """A step that takes 4 ms and its cache at 4 TB/s; the packed one reads at 3 TB/s."""
    kv = batch * row_bytes(shape_of(), 256 * frames, method)
    attention = kv / (4e12 if method == "fp16" else 3e12) * 1e6
    row = {
        "case": case, "model": "synthetic", "layers": layers, "batch": batch, "frames": frames, "visual_tokens": 256 * frames,
        "text_tokens": 48, "num_layers": 28, "method": method, "mix": "fp16" if method == "fp16" else "10/30/60",
        "backend": "none", "step_us": 4000 + attention, "p10_us": 4000 + attention, "p90_us": 4000 + attention, "repeats": 1,
        "attention_us": attention / 28, "peak_memory_bytes": kv + 15_000_000_000, "kv_bytes": kv, "weight_bytes": 14_000_000_000,
        "read_bandwidth_tb_s": 4.0, "rel_error": 0.0, "variants": "", "note": "", "seed": 0, "provenance": "synthetic",
    }  # fmt: skip
    return row | changes


def both(*point, **changes):
    return [step(*point, method, **changes) for method in ("fp16", "windowquant")]


def rows():
    found = [row for batch in (1, 8, 16) for row in both(batch, 100)] + both(8, 50) + both(60, 5)
    found += both(8, 100, layers="transformers")
    found += [step(90, 100, "fp16", "largest batch"), step(280, 100, "windowquant", "largest batch")]
    return found


def write(folder, entries):
    data = with_ratios(pd.DataFrame(entries).reindex(columns=list(DecodeStepBench.columns)))
    data = data.astype(dict.fromkeys(WHOLE, "Int64"))[list(DecodeStepBench.columns)]
    records.write("decode_step", "h200", data, DecodeStepBench.columns, PROVENANCE, folder)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return a function that makes rows the record of the H200, and the only one."""
    monkeypatch.setattr(records, "root", lambda: tmp_path)

    def use(entries):
        write(tmp_path, entries)
        decode_steps.recorded.cache_clear()

    decode_steps.recorded.cache_clear()
    yield use
    decode_steps.recorded.cache_clear()


def search(folder, cases):
    columns = dict.fromkeys(("device", "dtype", "case", "num_visual", "median_us", "graph_us"), "synthetic")
    rows = [(device, "float32", case, 6400, us, us / 2 if device == "cuda" and "token" in case else np.nan)
            for device in ("cpu", "cuda") for case, us in cases.items()]  # fmt: skip
    data = pd.DataFrame(rows, columns=list(columns))
    records.write("window_search", "h200", data, columns, PROVENANCE, folder)


@pytest.mark.parametrize("stem", STEMS)
def test_without_a_record_it_is_said_how_to_get_one(recorded, stem):
    with pytest.raises(MissingPartError, match="wqlab bench decode_step"):
        experiments.run(stem)
    with pytest.raises(UnknownNameError):
        experiments.run(stem, gpu="h2000")


def test_latency_is_fitted_against_the_common_size(recorded):
    recorded(rows())
    result = experiments.run("decode_latency")
    values = {name: value.value for name, value in result.values.items()}
    assert values["fp16_r_squared"] == pytest.approx(1)
    assert values["fp16_ms_per_gb"] == pytest.approx(0.25)
    assert values["fp16_without_kv_ms"] == pytest.approx(4)
    full, packed = (step(8, 100, method)["step_us"] for method in ("fp16", "windowquant"))
    assert values["speedup"] == pytest.approx(full / packed)
    assert values["ceiling"] == pytest.approx(full / 4000)
    assert values["ceiling_weights"] == pytest.approx(1 + (full - 4000) / 3500)
    assert values["largest_speedup_batch"] == 16
    assert values["speedup_batch_8"] == values["speedup"]
    assert values["largest_speedup"] == values["speedup_batch_16"] < values["largest_speedup_ceiling"]
    assert result.evidence["latency_ms"].kind == "recorded"
    sizes = result.data.groupby(["batch", "frames"])["size_gb"].nunique()
    assert (sizes == 1).all()
    held = experiments.run("decode_latency", size="held").data
    assert (held["size_gb"] == held["kv_gb"]).all()


def test_a_line_needs_three_sizes():
    assert np.isnan(fit(pd.Series([1.0, 2.0]), pd.Series([1.0, 2.0]))[0])
    assert fit(pd.Series([0.0, 1.0, 2.0]), pd.Series([1.0, 3.0, 5.0])) == pytest.approx((2, 1, 1))


def test_table_8_and_largest_batches_are_compared(recorded, tmp_path):
    recorded(rows())
    search(tmp_path, {"search_and_plan": 500.0, "token_search_and_plan": 2000.0})
    result = experiments.run("memory_and_throughput")
    values = {name: value.value for name, value in result.values.items()}
    full, packed = (step(60, 5, method) for method in ("fp16", "windowquant"))
    assert values["table8_throughput_ratio"] == pytest.approx(full["step_us"] / packed["step_us"])
    assert values["table8_memory_saved_gb"] == pytest.approx((full["kv_bytes"] - packed["kv_bytes"]) / 1e9)
    assert (values["largest_fp16_batch"], values["largest_batch"]) == (90, 280)
    assert 3.1 < values["kv_ratio"] < 3.3
    assert values["table8_ceiling_weights"] == pytest.approx(1 + values["table8_fp16_attention_ms"] / 3.5)
    assert values["table8_fp16_latency_ms"] == pytest.approx(4 + values["table8_fp16_attention_ms"])
    assert values["token_to_window_search"] == pytest.approx(2)
    printed = result.data[result.data["part"] == "table8"].set_index("method")
    assert printed.loc["windowquant", "paper_tokens_per_s"] == 1250
    assert result.evidence["paper_memory_gb"].kind == "paper"
    assert result.evidence["search_ms"].kind == "recorded"


def test_searches_of_one_kind_are_compared_and_the_most_that_windows_gain_is_stated(recorded, tmp_path):
    recorded(rows())
    small = {"search_and_plan": 500.0, "token_search_and_plan": 400.0, "cosine_closed_form": 200.0}
    large = {"search_and_plan": 800.0, "token_search_and_plan": 400.0, "token_search_and_plan_max": 1000.0}
    order = {"search_plan_and_order": 1000.0, "token_search_plan_and_order": 700.0}
    columns = dict.fromkeys(("device", "dtype", "case", "num_visual", "median_us", "graph_us"), "synthetic")
    found = [("cuda", "float32", case, 6400, us, us / 10) for case, us in (small | order).items()]
    found += [("cuda", "float32", f"large_{case}", 25600, us, us / 10) for case, us in large.items()]
    found += [("cpu", "float32", case, 6400, us * 9, np.nan) for case, us in small.items()]
    records.write("window_search", "h200", pd.DataFrame(found, columns=list(columns)), columns, PROVENANCE, tmp_path)
    result = experiments.run("memory_and_throughput")
    values = {name: value.value for name, value in result.values.items()}
    assert (values["search_and_plan_ms"], values["token_search_and_plan_ms"]) == pytest.approx((0.05, 0.04))
    assert values["token_to_window_search"] == pytest.approx(0.8)
    assert values["token_to_window_search_order"] == pytest.approx(0.7)
    assert values["token_to_window_search_large"] == pytest.approx(0.5)
    assert "token_to_window_search_order_large" not in values
    assert values["token_to_window_search_most"] == pytest.approx(1.25)
    assert values["token_search_to_window_scores"] == pytest.approx(2)
    shown = result.data[result.data["part"] == "search"]
    assert sorted(shown["visual_tokens"].unique()) == [6400, 25600]
    assert len(shown) == 10  # each search once per device and way
    figures.draw(result)


def test_what_the_records_lack_is_said_and_not_drawn(recorded, tmp_path):
    recorded([*both(8, 100)[:1], *both(4, 100), step(60, 5, "windowquant", step_us=np.nan, note="it failed")])
    search(tmp_path, {"search_and_plan": 500.0})
    result = experiments.run("memory_and_throughput")
    notes = " ".join(result.notes)
    assert "windowquant same batch 5 frames" in notes
    assert "search per token was not recorded" in notes
    assert not any(name.startswith(("table8", "largest", "token")) for name in result.values)
    figures.draw(result)
    assert "No search was recorded" not in notes
    figures.draw(experiments.run("decode_latency"))


def test_a_record_of_one_side_is_no_comparison(recorded):
    recorded([step(8, 100, "fp16"), step(8, 100, "windowquant", step_us=np.nan, note="it failed")])
    with pytest.raises(MissingPartError, match="no time of windowquant"):
        experiments.run("decode_latency")


@pytest.mark.parametrize(
    ("stem", "given"), [(STEMS[0], {}), (STEMS[0], {"size": "held"}), (STEMS[1], {}), (STEMS[1], {"batch": 3})]
)
def test_the_figure_names_its_evidence(recorded, tmp_path, stem, given):
    recorded(rows())
    search(tmp_path, {"search_and_plan": 500.0, "token_search_and_plan": 2000.0})
    result = experiments.run(stem, **given)
    figure = figures.draw(result)
    shown = " ".join(text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts())
    assert "(recorded)" in shown
    assert ("(paper)" in shown) == (stem == STEMS[1])
    assert "Synthetic GPU" in figures.caption(result)
    figures.write(figure, tmp_path / f"{stem}.png")


def test_a_point_that_was_not_recorded_is_named(recorded):
    recorded(rows())
    assert "no step with batch = 3" in " ".join(experiments.run("memory_and_throughput", batch=3).notes)
