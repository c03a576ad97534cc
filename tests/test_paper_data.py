"""The printed numbers: well-formed, consistent where the paper is, and the models' sizes recomputed from their shapes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from wqlab import paths
from wqlab.claims.schema import printed
from wqlab.experiments.kv_memory import shapes

FOLDER = paths.shipped("data") / "paper"
TABLES = sorted([*FOLDER.glob("windowquant_*.csv"), *FOLDER.glob("vqllm_*.csv")])


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_table_is_tidy(path: Path) -> None:
    data = pd.read_csv(path, dtype={"note": str})
    assert list(data.columns) == ["paper", "table", "row", "column", "value", "unit", "note"]
    assert data.drop(columns="note").notna().all().all()
    assert data["value"].map(lambda v: isinstance(v, float | int)).all()
    assert not data.duplicated(["row", "column"]).any()
    assert not data[["row", "column"]].map(lambda text: "|" in text).any().any()  # the ledger's separator
    assert data[data["unit"] == "%"]["value"].between(0, 100).all()
    assert data[data["unit"] == "yes = 1"]["value"].isin([0, 1]).all()
    assert set(data["paper"]) == {"WindowQuant" if path.stem.startswith("windowquant_") else "VQ-LLM"}
    if "_table" in path.stem:
        number = path.stem.rpartition("_table")[2]
        assert set(data["table"]) == {f"Table {'V' if path.stem == 'vqllm_table5' else number}"}


def test_every_file_is_a_checked_one() -> None:
    assert {path.stem for path in FOLDER.glob("*.csv")} == {*(path.stem for path in TABLES), "vlm_configs", "contradictions"}


def test_the_averages_of_table_3_fit_its_eleven_tasks() -> None:
    data = pd.read_csv(FOLDER / "windowquant_table3.csv")
    for row, part in data.groupby("row"):
        tasks = part[part["column"] != "average"]["value"]
        assert len(tasks) == 11 == printed("windowquant_text | MileBench | task columns").value
        average = part[part["column"] == "average"]["value"].iloc[0]
        assert tasks.mean() == pytest.approx(average, abs=0.11), row  # one printed digit, twice rounded up


def test_differences_quoted_in_the_text_are_those_of_the_tables() -> None:
    for column, quoted in (("attention latency", 0.43), ("decode latency", 558)):
        fused, unfused = (printed(f"windowquant_table9 | {row} | {column}").value for row in ("fused", "unfused"))
        assert unfused - fused == pytest.approx(quoted)
        assert printed(f"windowquant_text | unfused minus fused | {column}").value == quoted
    saved = (
        printed("windowquant_table8 | full precision | memory").value - printed("windowquant_table8 | WindowQuant | memory").value
    )
    assert saved == pytest.approx(4.0)  # the number that the ledger's entry inner-table8-saving uses
    step_ms = (
        printed("windowquant_text | Table 8 | batch").value
        / printed("windowquant_table8 | full precision | decode throughput").value
        * 1e3
    )
    assert step_ms / 2 == pytest.approx(67.6, abs=0.05)  # and inner-table8-bandwidth


def test_table_2_repeats_table_1_for_qwen2_vl() -> None:
    for place, column in enumerate(["NExT-QA", "EgoSchema", "IntentQA"], start=1):
        repeated = printed(f"windowquant_table2 | Qwen2-VL + WindowQuant | column {place}")
        assert repeated == printed(f"windowquant_table1 | Qwen2-VL + WindowQuant | {column}")


def test_the_quoted_mvbench_averages_are_table_1s_egoschema() -> None:
    for model in ("LLaVA-OneVision-Qwen2", "LLaVA-OneVision-Qwen2 + WindowQuant"):
        assert printed(f"windowquant_text | {model} | MVBench average") == printed(f"windowquant_table1 | {model} | EgoSchema")


def test_the_text_quotes_table_1() -> None:
    quoted = pd.read_csv(FOLDER / "windowquant_quoted.csv")
    assert len(quoted) == 16
    for row, column in zip(quoted["row"], quoted["column"], strict=True):
        assert printed(f"windowquant_quoted | {row} | {column}") == printed(f"windowquant_table1 | {row} | {column}")


def test_table_7_takes_away_one_module_per_row_of_table_8() -> None:
    modules = pd.read_csv(FOLDER / "windowquant_table7.csv").pivot(index="row", columns="column", values="value")
    assert modules.shape == (4, 3)
    missing = {
        "without first window": "first window in full precision",
        "random plan": "plan searched",
        "without reorder": "windows reordered",
    }
    for row, column in missing.items():
        assert modules.loc[row, column] == 0
        assert modules.loc[row].sum() == 2
    assert modules.loc["WindowQuant"].sum() == 3
    assert set(modules.index) | {"full precision"} == set(pd.read_csv(FOLDER / "windowquant_table8.csv")["row"])


def test_the_setup_agrees_with_the_text_and_the_tables() -> None:
    for column, unit in (("batch", "requests"), ("frames", "frames")):
        for table in ("Table 10", "Table 11"):  # both at the defaults
            assert printed(f"windowquant_setup | {table} | {column}") == printed(f"windowquant_text | default | {column}")
            assert printed(f"windowquant_setup | {table} | {column}").unit == unit
    longer = printed("windowquant_text | LLaVA-OneVision-0.5B | seconds")
    assert printed("windowquant_setup | LLaVA-OneVision-0.5B | seconds of the short video") < longer


def test_sizes_recomputed_from_shapes_are_the_published_ones() -> None:
    data = pd.read_csv(FOLDER / "vlm_configs.csv").set_index("name")
    assert set(data.index) == set(shapes())
    for name, shape in shapes().items():
        millions = shape.parameters() / 1e6
        assert millions == pytest.approx(data.loc[name, "published_million_parameters"], rel=0.01), name
        assert shape.num_attention_heads % shape.num_kv_heads == 0, name
        assert shape.num_attention_heads * shape.head_dim == shape.hidden_size, name
