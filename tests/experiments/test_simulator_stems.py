"""bank_conflicts, occupancy_slack and simulator_validation, from synthetic records and from none. Their numbers are made up."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from wqlab import experiments, figures, paths, records
from wqlab.bench import get
from wqlab.bench.bank_conflicts import cases, simulated
from wqlab.errors import ParameterError, UnknownNameError
from wqlab.simulate.bank_conflicts import Layout
from wqlab.simulate.gpus import GPUS, gpu
from wqlab.simulate.occupancy import occupancy

PROVENANCE = {
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_gb": 8.0, "gpus": ["Synthetic GPU"]},
    "versions": {}, "git_commit": "0" * 40, "date": "2026-01-02T03:04:05+00:00", "command": "synthetic, a test's record",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of records without any."""
    monkeypatch.setattr(records, "root", lambda: tmp_path)
    return tmp_path


def write(folder, name, data):
    columns = get(name).columns
    records.write(name, "h200", data.reindex(columns=list(columns)), columns, PROVENANCE, folder)


def counts(factor=1.0, counters="ncu"):
    data = pd.DataFrame([simulated(case, 64) for case in cases()])
    for what in ("wavefronts", "conflicts"):
        data[what] = factor * data[f"simulated_{what}"]
    data["wavefront_error"] = data["simulated_wavefronts"] / data["wavefronts"] - 1
    data["conflict_error"] = (data["simulated_conflicts"] - data["conflicts"]) / data[["conflicts", "loads"]].max(axis=1)
    return data.assign(counters=counters)


def answers(wrong=0):
    rows = []
    for registers in range(16, 256, 16):
        for threads in (32, 256, 1024):
            blocks = occupancy(gpu("h200"), registers, threads).blocks
            rows.append({"registers": registers, "threads": threads, "simulated_blocks": blocks, "driver_blocks": blocks})
    data = pd.DataFrame(rows)
    data.loc[: wrong - 1, "driver_blocks"] += 1
    return data.assign(equal=data["simulated_blocks"] == data["driver_blocks"])


def shown(result, tmp_path):
    """Draw it, and return all that its axes say."""
    figure = figures.draw(result)
    figures.write(figure, tmp_path / "figure.png")
    words = [t.get_text() for axes in figure.axes for t in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    return " ".join([*words, *(text.get_text() for legend in legends for text in legend.get_texts())])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"scheme": "padded", "entry_bytes": 16, "access": "4 bytes"},
        {"scheme": "swizzled", "entry_bytes": 32, "num_entries": 4096, "skew": 2.0},
        {"scheme": "replicated", "n_reg": 16, "gpu": "rtx4090"},
        {"num_entries": 16, "n_reg": 16},  # all from registers
    ],
)
def test_bank_conflicts_of_every_layout(given, tmp_path):
    result = experiments.run("bank_conflicts", quick=True, **given)
    assert {evidence.kind for evidence in result.evidence.values()} == {"simulated"}
    assert "not validated yet" in figures.caption(result)
    data = dict(list(result.data.groupby("part")))
    held = given.get("n_reg", 0) >= result.parameters["num_entries"]
    assert data["bank"]["share"].sum() == pytest.approx(0.0 if held else 1.0)
    assert data["entry"]["share"].sum() <= 1 + 1e-9
    loads = data["wavefronts"].groupby("scheme")["loads"].sum()
    np.testing.assert_allclose(loads, 1.0)
    assert list(data["layout"]["scheme"]) == ["contiguous", "padded", "swizzled", "replicated"]
    assert (data["layout"]["conflicts_per_lookup"] >= 0).all()
    assert (data["layout"]["elements_per_clock"].dropna() > 0).all()
    assert "(simulated)" in shown(result, tmp_path)


def test_the_heat_map_has_the_banks_of_the_layout():
    result = experiments.run("bank_conflicts", quick=True, entry_bytes=8, skew=0.0, num_entries=64)
    table = result.data[result.data["part"] == "entry"].pivot(index="entry", columns="bank", values="share").to_numpy()
    for entry in (0, 5, 20):
        assert set(np.flatnonzero(table[entry])) == {2 * entry % 32, 2 * entry % 32 + 1}
    np.testing.assert_allclose(table[table > 0], 1 / 128)


def test_what_does_not_fit_is_refused_or_left_out():
    with pytest.raises(ParameterError, match=r"take 262144 bytes .* at most 232448"):
        experiments.run("bank_conflicts", num_entries=4096, entry_bytes=64)
    result = experiments.run("bank_conflicts", quick=True, num_entries=4096, entry_bytes=48, padding_bytes=16)
    assert "padded" not in set(result.data["scheme"].dropna())
    assert any(note.startswith("Left out, padded: 4096 entries") for note in result.notes)
    with pytest.raises(ParameterError, match="n_reg = 20: must be 0 to 16"):
        experiments.run("bank_conflicts", quick=True, num_entries=16, n_reg=20)
    with pytest.raises(ParameterError, match="entry_bytes = -8"):
        experiments.run("bank_conflicts", entry_bytes=-8)
    with pytest.raises(UnknownNameError):
        experiments.run("bank_conflicts", gpu="b200")


def test_copies_are_as_many_as_fit():
    result = experiments.run("bank_conflicts", quick=True, num_entries=4096, entry_bytes=16)
    row = result.data[(result.data["part"] == "layout") & (result.data["scheme"] == "replicated")].iloc[0]
    assert (row["copies"], row["shared_kb"]) == (2, 128)
    Layout(4096, 16, 16, "replicated", copies=2).check(gpu("h200"))


@pytest.mark.parametrize("key", sorted(GPUS))
def test_slack_of_every_gpu(key, tmp_path):
    result = experiments.run("occupancy_slack", gpu=key)
    rows = result.data[result.data["part"] == "gpu"].set_index("gpu")
    assert set(rows.index) == set(GPUS)
    p, found = result.parameters, rows.loc[key]
    want = occupancy(gpu(key), p["registers"], p["threads"], 1024 * p["shared_kb"])
    assert (found["blocks"], found["register_slack"], 1024 * found["shared_slack_kb"]) == (
        want.blocks, want.register_slack, want.shared_slack_bytes,
    )  # fmt: skip
    curve = result.data[result.data["part"] == "registers"].set_index("registers")["warps"]
    last = p["registers"] + want.register_slack
    assert curve[last] == want.warps > curve[last + 1]
    assert "not validated yet" in figures.caption(result)
    if key == "a40":
        assert "(simulated)" in shown(result, tmp_path)


def test_a_kernel_that_some_gpus_cannot_hold(tmp_path):
    result = experiments.run("occupancy_slack", shared_kb=150)
    rows = result.data[result.data["part"] == "gpu"].set_index("gpu")
    assert rows.loc["a40", "limiter"] == "does not fit: at most 99 KB per block"
    assert rows.loc["a100", "blocks"] == 1
    assert "does not fit" in shown(result, tmp_path)
    with pytest.raises(ParameterError, match="0 to 101376"):
        experiments.run("occupancy_slack", shared_kb=150, gpu="a40")
    assert "no block can be launched" in shown(experiments.run("occupancy_slack", registers=255, threads=1024), tmp_path)


def test_without_records_the_validation_says_what_is_missing(tmp_path):
    result = experiments.run("simulator_validation")
    assert {evidence.kind for evidence in result.evidence.values()} == {"simulated"}
    assert result.values == {}
    assert "wavefronts" not in result.data
    text = shown(result, tmp_path)
    assert "wqlab bench bank_conflicts" in text
    assert "wqlab bench occupancy" in text
    with pytest.raises(UnknownNameError):
        experiments.run("simulator_validation", gpu="h2000")


def test_records_are_compared_and_every_simulated_figure_carries_the_error(folder, tmp_path):
    write(folder, "bank_conflicts", counts(1 / 1.02))
    write(folder, "occupancy", answers(wrong=2))
    result = experiments.run("simulator_validation")
    values = {name: value.value for name, value in result.values.items()}
    assert values["cases"] == len(cases())
    assert values["wavefront_error_max_percent"] == pytest.approx(2)
    assert values["occupancy_configurations"] - values["occupancy_equal"] == 2
    kinds = {column: evidence.kind for column, evidence in result.evidence.items()}
    assert kinds["wavefronts"] == kinds["driver_blocks"] == "recorded"
    assert kinds["simulated_wavefronts"] == kinds["simulated_blocks"] == "simulated"
    text = shown(result, tmp_path)
    assert "largest error 2 %" in text
    assert "different: 2" in text
    conflicts = experiments.run("bank_conflicts", quick=True)
    assert "simulated wavefronts were within 2 % of the counters" in figures.caption(conflicts)
    slack = experiments.run("occupancy_slack")
    assert f"{len(answers()) - 2} of {len(answers())} configurations" in figures.caption(slack)
    assert [found.name for r in (conflicts, slack) for found in r.inputs] == [
        "data/recorded/h200/bank_conflicts.csv", "data/recorded/h200/occupancy.csv",
    ]  # fmt: skip


def test_denied_counters_validate_nothing(folder, tmp_path):
    data = counts(counters="unavailable: ERR_NVGPUCTRPERM")
    data[["wavefronts", "conflicts", "wavefront_error", "conflict_error"]] = np.nan
    write(folder, "bank_conflicts", data)
    result = experiments.run("simulator_validation")
    assert "wavefronts" not in result.evidence
    assert "its record says unavailable: ERR_NVGPUCTRPERM" in figures.caption(result)
    assert "not counted" in shown(result, tmp_path)


def test_every_shipped_figure_of_a_simulator_states_its_error():
    """Exact counts (bytes of a layout) and drawn data are simulated too; an error has what `wqlab.simulate` computes."""
    sidecars = [json.loads(path.read_text()) for path in (Path(paths.checkout()) / "figures").glob("*.json")]
    from_simulators = {
        sidecar["stem"]: sidecar["notes"]
        for sidecar in sidecars
        if any(e["kind"] == "simulated" and e["source"].startswith("wqlab.simulate") for e in sidecar["evidence"].values())
    }
    assert set(from_simulators) >= {"bank_conflicts", "occupancy_slack", "simulator_validation"}
    for stem, notes in from_simulators.items():
        assert any(note.startswith("Validated: ") for note in notes), stem
    used = [
        path.stem
        for path in (Path(paths.checkout()) / "wqlab" / "experiments").glob("*.py")
        if "wqlab.simulate" in path.read_text()
    ]
    assert set(used) - {"simulator_errors"} == set(from_simulators)
