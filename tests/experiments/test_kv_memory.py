"""kv_memory: exact bytes, the audit, evidence kept apart, bad input refused by name, and a figure that draws every case."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wqlab import experiments, figures
from wqlab.errors import DamagedFileError, MissingPartError, ParameterError, UnknownNameError
from wqlab.experiments.kv_memory import Shape, metadata_bytes, shape_of, shapes


def test_the_audit_of_the_printed_number() -> None:
    values = experiments.run("kv_memory").values
    assert shapes()["LLaVA-OneVision-0.5B"].kv_bytes(1) == 12_288
    assert shapes()["Qwen1.5-0.5B"].kv_bytes(1) == 96 * 1024
    assert values["named_visual_30_s_gb"].value == pytest.approx(2.831, abs=1e-3)
    assert values["ungrouped_visual_30_s_gb"].value == pytest.approx(19.818, abs=1e-3)
    assert (values["other_visual_30_s_mib"].value, values["other_visual_30_s_mib"].unit) == (21_600, "MiB")
    assert values["table10_window_channel_mb"].value == pytest.approx(70.2, abs=0.05)
    assert values["table10_window_mb"].value == pytest.approx(0.14, abs=0.005)
    assert values["table8_visual_kv_fp16_gb"].value == pytest.approx(4.40, abs=0.005)
    assert values["table8_largest_saving_gb"].value == pytest.approx(3.85, abs=0.005)
    assert 9 < values["table8_step_roofline_ms"].value < 10


def test_ledger_values_stay_in_the_papers_setting() -> None:
    other = experiments.run("kv_memory", model="LLaVA-1.5-13B", seconds=3, fps=2, bits=2, batch=7, tokens_per_frame=9)
    assert other.values == experiments.run("kv_memory").values


def test_computed_and_printed_numbers_never_share_a_column() -> None:
    result = experiments.run("kv_memory")
    assert {c: e.kind for c, e in result.evidence.items()} == {"gb": "simulated", "mib": "simulated", "paper_gb": "paper"}
    assert (result.data["gb"].isna() == result.data["paper_gb"].notna()).all()
    assert result.data["paper_gb"].dropna().tolist() == [21.6]
    json.dumps(result.parameters, allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(sorted(shapes())),
    seconds=st.floats(0.1, 60),
    fps=st.floats(0.5, 60),
    bits=st.sampled_from([16, 8, 4, 2]),
    batch=st.integers(1, 64),
    text_tokens=st.integers(0, 5000),
)
def test_bytes_follow_the_shape(model: str, seconds: float, fps: float, bits: int, batch: int, text_tokens: int) -> None:
    given_parameters = {"seconds": seconds, "fps": fps, "bits": bits, "batch": batch, "text_tokens": text_tokens}
    data = experiments.run("kv_memory", model=model, metadata=True, **given_parameters).data
    shape, last = (
        shapes()[model],
        data[(data["part_of"] == "length") & (data["seconds"] == max(data["seconds"][data["part_of"] == "length"]))],
    )
    part = last.set_index("part")
    tokens = int(part.loc["visual KV", "tokens"])
    assert tokens == math.floor(seconds * fps + 1e-9) * 256
    per_token = 2 * shape.layers * shape.num_kv_heads * shape.head_dim
    whole = tokens // 32 * 32  # 256 tokens per frame are whole windows
    metadata = 0 if bits == 16 else whole // 32 * per_token * 4
    assert part.loc["visual KV", "gb"] * 1e9 == pytest.approx(batch * (tokens * per_token * bits / 8 + metadata))
    assert part.loc["text KV", "gb"] * 1e9 == pytest.approx(batch * text_tokens * per_token * 2)
    assert part.loc["weights", "gb"] * 1e9 == pytest.approx(2 * shape.parameters())
    visual = data[(data["part_of"] == "length") & (data["part"] == "visual KV")].sort_values("seconds")["gb"]
    assert visual.is_monotonic_increasing


def test_the_remainder_below_one_window_stays_at_16_bits() -> None:
    result = experiments.run("kv_memory", seconds=1, fps=1, tokens_per_frame=33, bits=2)
    row = result.data[(result.data["seconds"] == 1) & (result.data["part"] == "visual KV") & (result.data["part_of"] == "length")]
    values = shapes()["LLaVA-OneVision-0.5B"].kv_values()
    assert row["gb"].iloc[0] * 1e9 == pytest.approx(32 * values / 4 + 1 * values * 2)


def test_metadata_by_granularity() -> None:
    shape = Shape("s", 2, 4, 2, 8, 32, 64, 100, False)
    assert metadata_bytes(shape, 95, "window_channel") == 2 * (2 * 2 * 2 * 8) * 4  # two whole windows
    assert metadata_bytes(shape, 95, "window_head") == 2 * (2 * 2 * 2) * 4
    assert metadata_bytes(shape, 95, "window") == 2 * (2 * 2) * 4
    assert metadata_bytes(shape, 31, "window_channel") == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": 0},
        {"seconds": -1},
        {"seconds": None},
        {"seconds": [30]},
        {"fps": 0},
        {"fps": math.nan},
        {"tokens_per_frame": 0},
        {"tokens_per_frame": 1.5},
        {"text_tokens": -1},
        {"bits": 3},
        {"batch": 0},
        {"model": 3},
        {"sceonds": 30},
    ],
)
def test_bad_parameters_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as error:
        experiments.run("kv_memory", **bad)
    assert next(iter(bad)) in str(error.value)
    assert "\n" not in str(error.value)


def test_numpy_scalars_are_accepted() -> None:
    parameters = experiments.run("kv_memory", seconds=np.float32(2.0), batch=np.int64(2)).parameters
    assert (parameters["seconds"], parameters["batch"]) == (2.0, 2)


def test_unknown_models_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean LLaVA-OneVision-0\.5B") as error:
        experiments.run("kv_memory", model="LLaVA-Onevision-0.5b")
    assert error.value.kind == "model"
    with pytest.raises(UnknownNameError):
        experiments.run("kv_memory", model="")
    with pytest.raises(UnknownNameError):
        experiments.run("kv_memory", model=str(tmp_path / "absent"))
    with pytest.raises(MissingPartError, match=r"download its config\.json"):
        experiments.run("kv_memory", model="some-owner/some-model")
    with pytest.raises(MissingPartError, match=r"no config\.json"):
        experiments.run("kv_memory", model=str(tmp_path))


def test_a_checkpoints_config_is_read_flat_and_nested(tmp_path: Path) -> None:
    flat = {
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    for content in (flat, {"text_config": flat, "vision_config": {"hidden_size": 1}}, {"llm_config": flat}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        shape = shape_of(str(tmp_path))
        assert shape.kv_bytes(1) == shapes()["LLaVA-OneVision-7B"].kv_bytes(1) == 57_344
        assert shape.parameters() == shapes()["LLaVA-OneVision-7B"].parameters()
        notes = experiments.run("kv_memory", model=str(tmp_path), tokens_per_frame=None).notes
        assert any("256 are assumed" in note for note in notes)
    assert shape_of("LLaVA-OneVision-0.5B").tokens_per_frame == 196


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "3", '{"num_hidden_layers": 0}', '{"text_config": 5}', '{"text_config": {"hidden_size": "x"}}']
)
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"config\.json"):
        experiments.run("kv_memory", model=str(tmp_path))


@pytest.mark.parametrize(
    "parameters", [{}, {"seconds": 0.01}, {"model": "LLaVA-1.5-13B", "bits": 2, "metadata": True, "batch": 64}]
)
def test_the_figure_draws_every_case(parameters: dict[str, Any]) -> None:
    figure = figures.draw(experiments.run("kv_memory", **parameters))
    figure.canvas.draw()
    text = " ".join(t.get_text() for t in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))
    assert "(simulated)" in text
    assert "printed: 21.6 GB (paper)" in text
    assert "printed in the paper" in text  # the caption names the evidence


def test_no_torch_is_imported() -> None:
    code = "import sys; from wqlab import experiments; experiments.run('kv_memory'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
